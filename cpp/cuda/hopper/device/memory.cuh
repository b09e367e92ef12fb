// Shared memory by 32-bit address, and ordered access to counters in global memory.
#pragma once

#include <cstdint>

#if defined(JFT_EMULATE)
#include "../../emulator/hopper_emulated.h"
#else

namespace jft::hopper {

__device__ __forceinline__ uint8_t* dynamic_shared() {
  extern __shared__ uint8_t jft_hopper_shared[];
  return jft_hopper_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void load_shared(uint32_t address, float& x0, float& x1) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x0), "=f"(x1) : "r"(address));
}

__device__ __forceinline__ void load_shared(uint32_t address, float& x0, float& x1, float& x2,
                                            float& x3) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x0), "=f"(x1), "=f"(x2), "=f"(x3)
               : "r"(address));
}

__device__ __forceinline__ void store_shared(uint32_t address, float x0, float x1, float x2,
                                             float x3) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x0), "f"(x1), "f"(x2),
               "f"(x3)
               : "memory");
}

// global[0 .. 4) += x, one instruction from registers; 16-byte aligned.
__device__ __forceinline__ void reduce_add_v4(float* global, float x0, float x1, float x2,
                                              float x3) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x0),
               "f"(x1), "f"(x2), "f"(x3)
               : "memory");
}

// One thread waits until *counter == value; what was written before the counter was raised to it
// is then visible.
__device__ __forceinline__ void wait_for_count(const int* counter, int value) {
  int seen;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  while (seen != value);
}

__device__ __forceinline__ void raise_count(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void fence_global() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace jft::hopper
#endif
