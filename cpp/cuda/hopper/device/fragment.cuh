// Accumulator fragments of m64nN: lane l of warp w of the warpgroup holds, for column group g (8
// columns),
//     d[4g + 0, 4g + 1] = row 16 w + l/4,      columns 8 g + 2 (l % 4) + {0, 1}
//     d[4g + 2, 4g + 3] = row 16 w + l/4 + 8,  the same columns.
// Two such groups packed to 16 bits are exactly the A fragment of one k16 step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "memory.cuh"

#if !defined(JFT_EMULATE)
namespace jft::hopper {

// Two floats -> one register of T, `lo` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The low 16 bits as a number: float16 or bfloat16.
template <bool kHalf>
__device__ __forceinline__ float low_half(uint32_t bits) {
  if constexpr (kHalf) {
    float x;
    asm("{.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, lo;\n}" : "=f"(x) : "r"(bits));
    return x;
  } else {
    return __uint_as_float(bits << 16);
  }
}

// An 8 x 8 matrix of 16-bit elements, a word of two per lane: lane l holds row l / 4, columns
// 2 (l % 4) and the next; afterwards the same of the transpose.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// 2^x, flushes denormals; relative error 2^-22.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23; flushes denormals.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

}  // namespace jft::hopper
#endif

namespace jft::hopper {

// Accumulators of N columns -> A fragments of N / 16 k-steps.
template <class T, int kAcc>
__device__ __forceinline__ void pack_fragments(uint32_t (&a)[kAcc / 2], const float (&d)[kAcc]) {
#pragma unroll
  for (int i = 0; i < kAcc / 2; ++i) a[i] = pack<T>(d[2 * i], d[2 * i + 1]);
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a panel of 128-byte rows with 128B swizzle
// (panel 1024-byte aligned): chunk index XOR row % 8.
__device__ __forceinline__ uint32_t swizzle128(int row, int chunk) {
  return static_cast<uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// 64 rows (one warpgroup) x kCols accumulators, times row factors, to 16 bits in swizzled panels of
// 64 columns. `panel_bytes` = distance of panels.
template <class T, int kCols>
__device__ __forceinline__ void store_fragments(uint32_t smem, uint32_t panel_bytes,
                                                const float (&d)[kCols / 2], float scale0,
                                                float scale1) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int row = 16 * warp + (lane & 15);  // matrices 0, 2: rows 0-7; matrices 1, 3: rows 8-15
#pragma unroll
  for (int pair = 0; pair < kCols / 16; ++pair) {
    const int panel = pair / 4, chunk = 2 * (pair % 4) + (lane >> 4);
    const float* x = d + 8 * pair;
    stmatrix_x4(smem + panel * panel_bytes + swizzle128(row, chunk),
                pack<T>(x[0] * scale0, x[1] * scale0), pack<T>(x[2] * scale1, x[3] * scale1),
                pack<T>(x[4] * scale0, x[5] * scale0), pack<T>(x[6] * scale1, x[7] * scale1));
  }
}

// Sum or maximum over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace jft::hopper
