// A CUDA block on the CPU: every thread is a fiber, warp instructions are rendezvous of 32 fibers.
// The kernels are compiled a second time as plain C++ with -DJFT_EMULATE and run unchanged, so
// their indexing, masks and arithmetic are tested on machines without a GPU. Not a performance
// model.
//
// Made to find faults: cp.async lands as late as the program allows, shared memory starts as NaN,
// warps run in an order that changes from barrier to barrier, and every shared access is checked.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

namespace jft::emu {

struct AsyncCopy {
  uint32_t dst;
  const void* src;
  int bytes;  // of 16; the rest is zero-filled
};

struct Fiber {
  void* sp = nullptr;
  std::vector<char> stack;
  bool done = false;
  bool at_barrier = false;
  uint64_t waiting_for = 0;                    // warp generation it waits for (0: runnable)
  std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
  std::vector<AsyncCopy> open;                 // not yet committed
};

struct Warp {
  void* slots[32];
  int arrived = 0;
  uint64_t generation = 1;
};

struct Block {
  int threads = 0;
  int64_t index = 0;
  std::vector<char> smem;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int barrier_or = 0, barrier_result = 0;
  int current = 0;
  void* scheduler_sp = nullptr;
  const std::function<void()>* body = nullptr;
};

extern thread_local Block* block;

void yield();
void run_block(int64_t index, int threads, size_t smem_bytes, const std::function<void()>& body);
// All blocks of a grid, one after the other.
void run_grid(int64_t blocks, int threads, size_t smem_bytes, const std::function<void()>& body);

inline char* shared_at(uint32_t offset, size_t bytes) {
  if (offset + bytes > block->smem.size()) {
    std::fprintf(stderr, "emulator: shared access at %u + %zu beyond %zu\n", offset, bytes,
                 block->smem.size());
    std::abort();
  }
  return block->smem.data() + offset;
}

// Every lane of the warp calls this with its own arguments; the last one runs `exec` for all 32.
template <class Exec>
void warp_collective(void* args, Exec exec) {
  Fiber& self = block->fibers[block->current];
  Warp& warp = block->warps[block->current / 32];
  warp.slots[block->current % 32] = args;
  if (++warp.arrived == 32) {
    exec(warp.slots);
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  self.waiting_for = warp.generation + 1;
  yield();
}

int sync_block_or(int predicate);
void copy_async_wait(int pending);

}  // namespace jft::emu
