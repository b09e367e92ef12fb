// Transaction barriers in shared memory (PTX mbarrier). A barrier is named by its 32-bit shared
// address.
//
// Parity convention: phase number p = 0, 1, 2 ... completes in order; wait(bar, p & 1) returns once
// phase p is complete. A fresh barrier counts as if phase -1 (parity 1) were complete, so the first
// wait of a producer for an empty slot uses parity 1 and falls through.
#pragma once

#include "memory.cuh"

#if !defined(JFT_EMULATE)
namespace jft::hopper {

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}

// Makes the initialised barriers visible to the copy engine (async proxy).
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// One arrival that also announces `bytes` of copies. Zero-filled bytes count like loaded ones.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// JFT_HOPPER_WATCHDOG (tests only): a wait gives up after 10 ms and goes on with wrong data, so
// that a broken protocol fails a comparison instead of hanging the GPU. (A trap or a printf here
// would serialise every wgmma of the kernel and hide races.)
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
#ifdef JFT_HOPPER_WATCHDOG
  uint32_t start, now = 0;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(start));
  for (now = start; !mbarrier_try_wait(bar, parity) && now - start < 20000000u;)
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
#else
  while (!mbarrier_try_wait(bar, parity)) {
  }
#endif
}

}  // namespace jft::hopper
#endif
