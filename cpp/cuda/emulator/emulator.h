// CUDA blocks on the CPU: every thread is a fiber, warp instructions are rendezvous of 32 fibers.
// The kernels are compiled a second time as plain C++ with -DJFT_EMULATE and run unchanged, so
// their indexing, masks and arithmetic are tested on machines without a GPU. Not a performance
// model.
//
// Made to find faults: cp.async lands as late as the program allows, shared memory starts as NaN,
// warps run in an order that changes from barrier to barrier, and every shared access is checked.
// What Hopper adds (hopper_emulated.h) follows the same idea.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace jft::emu {

constexpr int kMultiprocessors = 6;  // blocks of a grid that run side by side, where asked for

struct AsyncCopy {
  uint32_t dst;
  const void* src;
  int bytes;  // of 16; the rest is zero-filled
};

// A copy from shared to global memory: the reading half, then the writing half.
struct BulkStore {
  std::function<void(std::vector<char>&)> read;
  std::function<void(const std::vector<char>&)> write;
  std::vector<char> bytes;
};

// Accumulators that a product in flight will write: poisoned until then.
struct InFlight {
  float* registers;
  int count;                 // of registers
  int products = 0;          // that still write them
  std::vector<float> saved;  // their values at the first issue
};

enum class Wait { kNothing, kWarp, kBlock, kNamed, kWarpgroup, kPhase, kCount };

struct Fiber {
  void* sp = nullptr;
  std::vector<char> stack;
  bool done = false;
  Wait wait = Wait::kNothing;
  uint64_t generation = 0;       // kWarp, kNamed, kWarpgroup: goes on when theirs is at least this
  uint32_t object = 0;           // kNamed: barrier; kPhase: barrier address
  uint32_t parity = 0;           // kPhase
  const int* counter = nullptr;  // kCount
  int value = 0;
  std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
  std::vector<AsyncCopy> open;                 // not yet committed
  // Hopper
  std::vector<std::vector<BulkStore>> stores;  // committed, oldest first; then the open ones
  std::vector<BulkStore> open_stores;
  size_t stores_read = 0;          // groups whose reading half was done
  std::vector<uint32_t> unfenced;  // 16-byte chunks written since the last proxy fence
  std::vector<InFlight> in_flight;
  size_t issued = 0, commits = 0;  // products, groups of products
  bool fenced = false;             // wgmma.fence since the last wait
};

struct Warp {
  void* slots[32];
  int arrived = 0;
  uint64_t generation = 1;
};

struct NamedBarrier {
  int arrived = 0, threads = 0;
  uint64_t generation = 1;
};

// mbarrier: phase completes when neither arrivals nor bytes are missing.
struct PhaseBarrier {
  int64_t arrivals = 0, missing = 0, bytes = 0;
  uint32_t phase = 0;
};

struct Product;  // one wgmma of a warpgroup (hopper_emulated.cc)

struct Warpgroup {
  int arrived = 0;
  uint64_t generation = 1;
  std::vector<std::shared_ptr<Product>> products;  // every one issued so far; finished ones empty
  std::vector<size_t> groups;                      // products before each commit
  size_t finished = 0;
  std::map<float*, std::vector<float>> sums;  // 64 x N accumulators by the first thread's registers
};

struct Block {
  int threads = 0;
  int64_t index = 0, grid = 0;
  std::vector<char> smem;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int at_barrier = 0, done = 0;
  int barrier_or = 0, barrier_result = 0;
  int current = 0;
  void* scheduler_sp = nullptr;
  const std::function<void()>* body = nullptr;
  // Hopper
  std::vector<NamedBarrier> named;
  std::vector<Warpgroup> warpgroups;
  std::map<uint32_t, PhaseBarrier> phases;
  std::vector<std::function<void()>> landing;  // copies into shared memory that are on their way
  std::vector<uint16_t> writer;  // per 16 bytes: thread + 1 whose write no proxy fence followed yet
};

extern thread_local Block* block;

void yield();
[[noreturn]] void fail(const char* format, ...);
// All blocks of a grid: one after the other, or `side_by_side` of them at a time.
void run_grid(int64_t blocks, int threads, size_t smem_bytes, const std::function<void()>& body,
              int side_by_side = 1);

inline char* shared_at(uint32_t offset, size_t bytes) {
  if (offset + bytes > block->smem.size()) {
    fail("shared access at %u + %zu beyond %zu", offset, bytes, block->smem.size());
  }
  return block->smem.data() + offset;
}

inline Fiber& self() { return block->fibers[block->current]; }

// Every lane of the warp calls this with its own arguments; the last one runs `exec` for all 32.
template <class Exec>
void warp_collective(void* args, Exec exec) {
  Fiber& me = self();
  Warp& warp = block->warps[block->current / 32];
  warp.slots[block->current % 32] = args;
  if (++warp.arrived == 32) {
    exec(warp.slots);
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  me.wait = Wait::kWarp;
  me.generation = warp.generation + 1;
  yield();
}

int sync_block_or(int predicate);
void copy_async_wait(int pending);

}  // namespace jft::emu
