#include "emulator.h"

#include <cstdarg>
#include <cstring>
#include <random>

namespace jft::emu {

thread_local Block* block = nullptr;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

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
  Fiber& me = self();
  if (me.stores_read < me.stores.size() || !me.open_stores.empty()) {
    fail("a thread ended while its bulk copies still read shared memory");
  }
  for (const auto& group : me.stores) {
    for (const BulkStore& s : group) s.write(s.bytes);
  }
  me.stores.clear();
  me.done = true;
  ++block->done;
  for (;;) yield();
}

bool ready(const Block& b, const Fiber& f, int thread) {
  switch (f.wait) {
    case Wait::kNothing:
      return true;
    case Wait::kWarp:
      return b.warps[thread / 32].generation >= f.generation;
    case Wait::kBlock:
      return false;  // released all together, below
    case Wait::kNamed:
      return b.named[f.object].generation >= f.generation;
    case Wait::kWarpgroup:
      return b.warpgroups[thread / 128].generation >= f.generation;
    case Wait::kPhase:
      return (b.phases.at(f.object).phase & 1) != f.parity;
    case Wait::kCount:
      return *f.counter == f.value;
  }
  return true;
}

void start_block(Block& b, int64_t index, int64_t grid, int threads, size_t smem_bytes,
                 const std::function<void()>& body) {
  b.threads = threads;
  b.index = index;
  b.grid = grid;
  b.body = &body;
  b.smem.assign(smem_bytes, static_cast<char>(0xFF));  // NaN in every format
  b.fibers.resize(threads);
  b.warps.assign(threads / 32, Warp());
  b.at_barrier = b.done = b.barrier_or = 0;
  b.named.assign(16, NamedBarrier());
  b.warpgroups.assign(threads / 128, Warpgroup());
  b.phases.clear();
  b.landing.clear();
  b.writer.assign(smem_bytes / 16 + 1, 0);
  for (Fiber& f : b.fibers) {
    std::vector<char> stack = std::move(f.stack);
    f = Fiber();
    f.stack = std::move(stack);
    f.stack.resize(kStackBytes);
    uintptr_t top = (reinterpret_cast<uintptr_t>(f.stack.data()) + kStackBytes) & ~uintptr_t(15);
    void** sp = reinterpret_cast<void**>(top - 16);
    *sp = reinterpret_cast<void*>(&fiber_main);
    for (int i = 0; i < 6; ++i) *--sp = nullptr;
    f.sp = sp;
  }
}

std::mt19937& order() {
  static thread_local std::mt19937 generator(1);
  return generator;
}

void land_one(Block& b) {
  const size_t pick = order()() % b.landing.size();
  const auto land = std::move(b.landing[pick]);
  b.landing.erase(b.landing.begin() + static_cast<long>(pick));
  land();
}

// One round over the block's warps. False if nothing could move.
bool step_block(Block& b) {
  block = &b;
  const int warps = b.threads / 32;
  const int first = static_cast<int>(order()() % warps);
  const bool hasty = b.warpgroups.size() > 1;  // roles: let some run ahead of others
  bool moved = false, skipped = false;
  for (int n = 0; n < warps; ++n) {
    const int w = (first + n) % warps;
    if (hasty && order()() % 4 == 0) {
      skipped = true;
      continue;
    }
    for (bool again = true; again;) {
      again = false;
      for (int lane = 0; lane < 32; ++lane) {
        Fiber& f = b.fibers[w * 32 + lane];
        if (f.done || !ready(b, f, w * 32 + lane)) continue;
        f.wait = Wait::kNothing;
        b.current = w * 32 + lane;
        jft_emu_switch(&b.scheduler_sp, f.sp);
        again = moved = true;
      }
    }
  }
  if (b.at_barrier > 0 && b.at_barrier + b.done == b.threads) {
    if (b.done != 0) fail("%d threads left while %d wait at a barrier", b.done, b.at_barrier);
    b.barrier_result = b.barrier_or;
    b.barrier_or = 0;
    b.at_barrier = 0;
    for (Fiber& f : b.fibers) f.wait = Wait::kNothing;
    moved = true;
  }
  if (!b.landing.empty() && ((!moved && !skipped) || order()() % 8 == 0)) {
    land_one(b);
    moved = true;
  }
  block = nullptr;
  return moved || skipped;
}

[[noreturn]] void report_deadlock(const Block& b) {
  const char* names[] = {"?",           "a warp",      "__syncthreads", "a named barrier",
                         "a warpgroup", "an mbarrier", "a counter"};
  for (int t = 0; t < b.threads; t += 32) {
    const Fiber& f = b.fibers[t];
    if (f.done) continue;
    std::fprintf(stderr, "  thread %d waits for %s, object %u parity %u\n", t,
                 names[static_cast<int>(f.wait)], f.object, f.parity);
  }
  std::fprintf(stderr, "emulator: deadlock in block %lld\n", static_cast<long long>(b.index));
  std::abort();
}

}  // namespace

void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::fprintf(stderr, "emulator: ");
  std::vfprintf(stderr, format, args);
  std::fprintf(stderr, "\n");
  va_end(args);
  std::abort();
}

void yield() {
  Fiber& me = self();
  jft_emu_switch(&me.sp, block->scheduler_sp);
}

void copy_async_wait(int pending) { finish_copies(self(), static_cast<size_t>(pending)); }

int sync_block_or(int predicate) {
  if (predicate) block->barrier_or = 1;
  self().wait = Wait::kBlock;
  ++block->at_barrier;
  yield();
  return block->barrier_result;
}

void run_grid(int64_t blocks, int threads, size_t smem_bytes, const std::function<void()>& body,
              int side_by_side) {
  static thread_local std::vector<std::unique_ptr<Block>> pool;
  while (static_cast<int>(pool.size()) < side_by_side) pool.push_back(std::make_unique<Block>());
  std::vector<Block*> live;
  std::vector<Block*> idle;
  for (int n = 0; n < side_by_side; ++n) idle.push_back(pool[n].get());
  for (int64_t next = 0; next < blocks || !live.empty();) {
    while (next < blocks && !idle.empty()) {
      Block* b = idle.back();
      idle.pop_back();
      start_block(*b, next++, blocks, threads, smem_bytes, body);
      live.push_back(b);
    }
    bool moved = false;
    for (size_t n = 0; n < live.size(); ++n) {
      moved |= step_block(*live[n]);
      if (live[n]->done == threads) {
        if (!live[n]->landing.empty()) fail("a block ended while a copy into it was in flight");
        idle.push_back(live[n]);
        live.erase(live.begin() + static_cast<long>(n--));
        moved = true;
      }
    }
    if (!moved) report_deadlock(*live.front());
  }
}

}  // namespace jft::emu
