// The emulated GPU: runs one dispatch, threadgroup after threadgroup, one fiber per thread, in an
// order drawn from a seed. It stops at the first fault and says what happened where.
//
// Found by it: accesses outside the bound buffers and threadgroup memory, reads of threadgroup
// memory that nobody wrote, races on threadgroup memory inside one barrier interval, collectives
// and barriers that not all threads reach, stack overflow of a thread.
// Not found by it: what Apple's compiler refuses, registers and occupancy, the GPU's own rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shim/emu_api.h"

namespace jft::emu {

constexpr std::size_t kThreadgroupMemoryLimit = 32768;
constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxThreads = 1024;

struct Counters {
  std::uint64_t dispatches = 0, threadgroups = 0;
  std::uint64_t matrix_ops = 0;  // 8x8x8 products
  std::uint64_t device_read_bytes = 0, device_write_bytes = 0;
  std::uint64_t threadgroup_bytes = 0;   // moved, not allocated
  std::uint64_t threadgroup_memory = 0;  // largest allocation of a dispatch
  std::uint64_t barriers = 0;            // threadgroup barriers, summed over threadgroups
  std::uint64_t collectives = 0;
};

struct Range {
  const void* begin;
  std::size_t bytes;
};

struct Dispatch {
  std::string name;
  void (*entry)(EmuArguments*);
  std::vector<Range> buffers;  // what each bound buffer may touch
  EmuArguments arguments{};    // buffers filled in; threadgroup pointers come from the machine
  std::vector<std::size_t> threadgroup_bytes;
  unsigned grid[3], threads[3];
};

// Runs it; returns "" or the fault. `counters` is added to.
std::string run(const Dispatch& dispatch, std::uint64_t seed, Counters* counters);

const EmuApi* api();

}  // namespace jft::emu
