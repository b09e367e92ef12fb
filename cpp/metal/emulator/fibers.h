// Fibers: one per GPU thread of a threadgroup. A switch saves the callee-saved registers only, so a
// dispatch with thousands of collectives stays cheap.
#pragma once

#include <cstddef>

namespace jft::emu {

// Saves the current context's stack pointer in *from and continues at `to`.
extern "C" void jft_emu_switch(void** from, void* to);

// A stack with a guard page below, reused for every threadgroup.
class FiberStack {
 public:
  explicit FiberStack(std::size_t bytes = 128 * 1024);
  ~FiberStack();
  FiberStack(const FiberStack&) = delete;
  FiberStack& operator=(const FiberStack&) = delete;

  // Stack pointer that, when switched to, calls entry() (which must never return).
  void* prepare(void (*entry)());
  bool in_guard(const void* address) const;

 private:
  char* base_;
  std::size_t bytes_;
};

}  // namespace jft::emu
