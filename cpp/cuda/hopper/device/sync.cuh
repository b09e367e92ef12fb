// Fences, named barriers, register reallocation.
#pragma once

#include "memory.cuh"

#if !defined(JFT_EMULATE)
namespace jft::hopper {

// Generic writes to shared memory -> visible to wgmma and the copy engine. Every writing thread
// runs it before the barrier behind which the asynchronous reader starts.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Barrier 0 belongs to __syncthreads.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All four warps of a warpgroup, once, before their heavy code. Needs __launch_bounds__(n, 1).
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jft::hopper
#endif

namespace jft::hopper {

// Warp-uniform warpgroup index: descriptors built from it stay in uniform registers.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
}

}  // namespace jft::hopper
