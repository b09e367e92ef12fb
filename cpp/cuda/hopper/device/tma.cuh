// The copy engine: tiles through a rank-5 tensor map, and plain bulk reduction of f32 into global
// memory.
#pragma once

#include <cuda.h>

#include "memory.cuh"

#if !defined(JFT_EMULATE)
namespace jft::hopper {

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Global -> shared; completes on `bar` with the full size of the box, also where parts of it lie
// outside the tensor (those are zero-filled).
__device__ __forceinline__ void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t bar,
                                         int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Shared -> global; elements outside the tensor are not written. The shared memory must have been
// made visible with fence_async_shared() by its writers.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t smem, int c0, int c1,
                                          int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Plain bytes, global -> shared; bytes % 16 == 0, both 16-byte aligned. Completes on `bar`.
__device__ __forceinline__ void bulk_load(uint32_t smem, const void* global, uint32_t bytes,
                                          uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(reinterpret_cast<uint64_t>(global)), "r"(bytes), "r"(bar)
      : "memory");
}

// global[0 .. bytes/4) += shared, f32. bytes % 16 == 0, both 16-byte aligned.
__device__ __forceinline__ void bulk_reduce_add_f32(float* global, uint32_t smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   reinterpret_cast<uint64_t>(global)),
               "r"(smem), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's groups still READ shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until at most kPending of this thread's groups are incomplete (their writes have been made).
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jft::hopper
#endif
