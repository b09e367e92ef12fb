// Operations on whole tiles in shared memory: loading through a tensor map, and scrubbing of dead
// rows.
#pragma once

#include "device/fragment.cuh"
#include "device/sync.cuh"
#include "device/tma.cuh"
#include "params.h"
#include "tiles.h"

namespace jft::hopper {

template <int kPanels, uint32_t kPanelBytes>
__device__ __forceinline__ void load_tile(uint32_t smem, const TileMap& m, uint32_t bar, int row,
                                          int head, int b0, int b1) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel)
    tma_load(smem + panel * kPanelBytes, &m.map, bar, panel * kPanel, row, head, b1 * m.has_b1,
             b0 * m.has_b0);
}

// Zeroes those of the rows [row0, row0 + kRows) that live.has() denies, by kThreads threads. Dead
// rows may hold NaN, and 0 * NaN is NaN in a product. Several warpgroups may each run it on one
// tile: zeros over zeros harm nobody who already reads. The caller synchronises its own threads
// afterwards.
template <int kRows, int kPanels, int kThreads, class Live>
__device__ __forceinline__ void scrub_rows(uint32_t tile, int row0, const Live& live) {
  for (int c = threadIdx.x & (kThreads - 1); c < kRows * 8; c += kThreads) {
    if (live.has(row0 + c / 8)) continue;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      store_shared(tile + panel * kRows * 128 + c * 16, 0.f, 0.f, 0.f, 0.f);
  }
  fence_async_shared();
}

// x -> cap tanh(x / cap) of scaled products, in natural units. Small arguments (|x| <= cap in the
// whole warp) take an odd polynomial on the FMA pipe, absolute error 2.5e-7 cap; else cap - 2 cap /
// (1 + exp(2 x / cap)). The special-function unit already carries one exponential per logit;
// tanh.approx is too coarse (2^-11).
template <int kN>
__device__ __forceinline__ void apply_softcap(float (&s)[kN], const LogitArgs& a) {
  const float to_unit = a.scale * a.inverse_softcap;
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < kN; ++i) top = fmaxf(top, fabsf(s[i]));
  if (__all_sync(0xffffffffu, top * to_unit <= 1.f)) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float t = s[i] * to_unit, u = t * t;
      float y = -0.00285426062f;
      y = fmaf(y, u, 0.0161604322f);
      y = fmaf(y, u, -0.051026985f);
      y = fmaf(y, u, 0.132564187f);
      y = fmaf(y, u, -0.333246827f);
      y = fmaf(y, u, 0.999997377f);
      s[i] = t * a.softcap * y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i)
      s[i] = fmaf(-2.f * a.softcap,
                  reciprocal_fast(1.f + exp2_fast(s[i] * a.scale * a.softcap_log2)), a.softcap);
  }
}

}  // namespace jft::hopper
