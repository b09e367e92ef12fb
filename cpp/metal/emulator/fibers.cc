#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace jft::emu {

#if defined(__x86_64__)
asm(R"(
.text
.globl jft_emu_switch
.type jft_emu_switch, @function
jft_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size jft_emu_switch, .-jft_emu_switch
)");
constexpr int kSavedWords = 6;  // below the return address
#elif defined(__aarch64__)
asm(R"(
.text
.globl jft_emu_switch
.type jft_emu_switch, @function
jft_emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size jft_emu_switch, .-jft_emu_switch
)");
#else
#error "the emulator's fibers know x86-64 and arm64"
#endif

FiberStack::FiberStack(std::size_t bytes) : bytes_(bytes) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(p);
  mprotect(base_, static_cast<std::size_t>(getpagesize()), PROT_NONE);
}

FiberStack::~FiberStack() { munmap(base_, bytes_); }

void* FiberStack::prepare(void (*entry)()) {
  auto top = reinterpret_cast<std::uintptr_t>(base_ + bytes_) & ~std::uintptr_t{15};
#if defined(__x86_64__)
  // [6 saved registers][entry][pad]: at entry rsp must be 8 below a multiple of 16.
  auto* sp = reinterpret_cast<std::uintptr_t*>(top) - 2 - kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) sp[i] = 0;
  sp[kSavedWords] = reinterpret_cast<std::uintptr_t>(entry);
  sp[kSavedWords + 1] = 0;
#else
  auto* sp = reinterpret_cast<std::uintptr_t*>(top - 160);
  for (int i = 0; i < 20; ++i) sp[i] = 0;
  sp[11] = reinterpret_cast<std::uintptr_t>(entry);  // x30
#endif
  return sp;
}

bool FiberStack::in_guard(const void* address) const {
  auto* p = static_cast<const char*>(address);
  return p >= base_ && p < base_ + getpagesize();
}

}  // namespace jft::emu
