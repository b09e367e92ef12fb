#include "emulator.h"

#include <cstring>
#include <random>

namespace jft::emu {

thread_local Block* block = nullptr;

namespace {

constexpr size_t kStackBytes = 256 * 1024;

// Saves the callee-saved registers on the current stack, stores its pointer, loads the other.
extern "C" void jft_emu_switch(void** save_sp, void* load_sp);
#if defined(__x86_64__)
asm(R"(
.text
.globl jft_emu_switch
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
)");
#else
#error "the CUDA emulator knows only x86-64"
#endif

void finish_copies(Fiber& fiber, size_t keep) {
  while (fiber.groups.size() > keep) {
    for (const AsyncCopy& c : fiber.groups.front()) {
      char* dst = shared_at(c.dst, 16);
      std::memset(dst, 0, 16);
      if (c.bytes > 0) std::memcpy(dst, c.src, c.bytes);
    }
    fiber.groups.erase(fiber.groups.begin());
  }
}

void fiber_main() {
  (*block->body)();
  Fiber& self = block->fibers[block->current];
  self.done = true;
  for (;;) yield();
}

}  // namespace

void yield() {
  Fiber& self = block->fibers[block->current];
  jft_emu_switch(&self.sp, block->scheduler_sp);
}

void copy_async_wait(int pending) {
  finish_copies(block->fibers[block->current], static_cast<size_t>(pending));
}

int sync_block_or(int predicate) {
  Fiber& self = block->fibers[block->current];
  if (predicate) block->barrier_or = 1;
  self.at_barrier = true;
  yield();
  return block->barrier_result;
}

void run_block(int64_t index, int threads, size_t smem_bytes, const std::function<void()>& body) {
  static thread_local Block storage;
  static thread_local std::mt19937 order(1);
  Block& b = storage;
  block = &b;
  b.threads = threads;
  b.index = index;
  b.body = &body;
  b.smem.assign(smem_bytes, static_cast<char>(0xFF));  // NaN in every format
  b.fibers.resize(threads);
  b.warps.assign(threads / 32, Warp());
  for (Fiber& f : b.fibers) {
    f.stack.resize(kStackBytes);
    f.done = f.at_barrier = false;
    f.waiting_for = 0;
    f.groups.clear();
    f.open.clear();
    uintptr_t top = (reinterpret_cast<uintptr_t>(f.stack.data()) + kStackBytes) & ~uintptr_t(15);
    void** sp = reinterpret_cast<void**>(top - 16);
    *sp = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    f.sp = sp;
  }
  const int warps = threads / 32;
  for (;;) {
    const int first = static_cast<int>(order() % warps);
    bool all_done = true, moved = false;
    for (int n = 0; n < warps; ++n) {
      const int w = (first + n) % warps;
      for (bool again = true; again;) {
        again = false;
        for (int lane = 0; lane < 32; ++lane) {
          Fiber& f = b.fibers[w * 32 + lane];
          if (f.done || f.at_barrier) continue;
          if (f.waiting_for > b.warps[w].generation) continue;
          f.waiting_for = 0;
          b.current = w * 32 + lane;
          jft_emu_switch(&b.scheduler_sp, f.sp);
          again = moved = true;
        }
      }
    }
    int waiting = 0, done = 0;
    for (Fiber& f : b.fibers) {
      done += f.done;
      waiting += f.at_barrier;
    }
    all_done = done == threads;
    if (all_done) break;
    if (waiting + done == threads) {
      if (done != 0) {
        std::fprintf(stderr, "emulator: %d threads left while %d wait at a barrier\n", done,
                     waiting);
        std::abort();
      }
      b.barrier_result = b.barrier_or;
      b.barrier_or = 0;
      for (Fiber& f : b.fibers) f.at_barrier = false;
    } else if (!moved) {
      std::fprintf(stderr, "emulator: deadlock (a warp instruction that not all lanes reached)\n");
      std::abort();
    }
  }
  block = nullptr;
}

void run_grid(int64_t blocks, int threads, size_t smem_bytes, const std::function<void()>& body) {
  for (int64_t i = 0; i < blocks; ++i) run_block(i, threads, smem_bytes, body);
}

}  // namespace jft::emu
