// One warpgroup's share of a backward tile with queries on the M dimension: 64 queries x kKeys keys
// of S = Q K^T and dP = dO V^T, and dS = P (dP - delta) of them.
#pragma once

#include "bias.cuh"
#include "device/wgmma.cuh"
#include "forward_work.cuh"
#include "tile_ops.cuh"

namespace jft::hopper {

// Params: gauge, delta, rows_pitch, shape, logit and hidden (lines are queries).
template <class Traits, class Params>
struct QueryTile {
  using T = typename Traits::T;
  static constexpr int kDim = Traits::kDim, kKeys = Traits::kKeys;

  const Params& p;
  const ForwardWork* w;
  int wg;                          // 0 or 1, warp-uniform
  TileInfo tile;                   // of s and dp; plain: no flags
  float factor;                    // as in TransposedTile
  float gauge[2], c[2], delta[2];  // of this thread's two rows, as in BackwardParams
  uint32_t visible[2];             // of the mask
  QueryBias<kKeys> bias;
  float s[kKeys / 2], dp[kKeys / 2];  // S; dP, then dS

  __device__ __forceinline__ QueryTile(const Params& p_, const ForwardWork* w_, int wg_)
      : p(p_),
        w(w_),
        wg(wg_),
        factor(!Traits::kGeneral  ? p_.logit.scale_log2
               : p_.logit.natural ? 1.f
                                  : p_.logit.scale) {}

  __device__ __forceinline__ int row(int r) const {
    return w->q0 + 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2) + 8 * r;
  }

  __device__ __forceinline__ void load_facts() {
    const int64_t head = int64_t(w->b0 * p.shape.B1 + w->b1) * p.shape.Hq + w->h;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row(r);
      gauge[r] = delta[r] = 0.f;
      c[r] = static_cast<float>(kEmptyRow);
      if (i < p.shape.Sq) {
        const int64_t at = head * p.rows_pitch + i;
        const float* pair = p.gauge + 4 * (at >> 1) + (at & 1);
        gauge[r] = pair[0];
        c[r] = pair[2];
        delta[r] = p.delta[at];
      }
    }
  }
  __device__ __forceinline__ bool is_dead(int r) const {
    return c[r] > static_cast<float>(kEmptyRow / 2);
  }

  // C[64 queries, kKeys] = A[64 queries, kDim] B[kKeys, kDim]^T, for Q K^T and dO V^T
  __device__ __forceinline__ void issue_scores(float (&to)[kKeys / 2], uint32_t a_tile,
                                               uint32_t b_tile) {
    const uint64_t a = descriptor_k_major(a_tile + wg * 64 * 128), b = descriptor_k_major(b_tile);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<kKeys>::template ss<T, 0, 0>(
          to, descriptor_advance(a, k_major_step(i, Traits::kQPanel)),
          descriptor_advance(b, k_major_step(i, Traits::kKvPanel)), i > 0);
    wgmma_commit();
  }

  // Loads what make_logits needs of mask and bias, while products run; beyond head size 192 dq
  // leaves no registers for the bias.
  __device__ __forceinline__ void prefetch() {
    if (!Traits::kGeneral) return;
    if ((tile.flags & kTileMixed) && p.hidden.bits.data) {
      const int line[2] = {row(0), row(1)};
      load_visible(visible, p.hidden, w->b0, w->b1, w->h, line, p.shape.Sq, tile.index);
    }
    if (Traits::kBias && Traits::kEarlyBias) bias.start(p.logit.bias, bias_place(), p.shape);
  }

  // s becomes the logit: softcap (dp then takes its derivative), bias, alibi; what is hidden is
  // -inf.
  __device__ __forceinline__ void make_logits() {
    const int j = tile.index;
    if (Traits::kGeneral) transform(j);
    if (Traits::kGeneral ? tile.flags & kTileEdge : j < w->full_begin || j >= w->full_end) mask(j);
    if (Traits::kGeneral && (tile.flags & kTileMixed)) hide();
  }

  // dS = P (dP - delta), in place of dP
  __device__ __forceinline__ void make_ds() {
    make_logits();
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      dp[i] = probability(i) * (is_capped() ? dp[i] : dp[i] - delta[(i >> 1) & 1]);
  }

  __device__ __forceinline__ float probability(int i) const {
    const int r = (i >> 1) & 1;
    const float above = fmaf(s[i], factor, -gauge[r]);
    return exp2_fast(Traits::kGeneral ? fmaf(above, 1.4426950408889634f, -c[r]) : above - c[r]);
  }

 private:
  __device__ __forceinline__ bool is_capped() const {  // never with a bias (hopper.cc)
    return Traits::kGeneral && !Traits::kBias && p.logit.softcap > 0.f;
  }

  __device__ __forceinline__ BiasPlace bias_place() const {
    return {p.logit.bias, w->b0, w->b1, w->h, row(0), row(1), tile.index * kKeys};
  }

  __device__ __forceinline__ void transform(int j) {
    if (!p.logit.natural) return;
    if (is_capped()) {
      apply_softcap(s, p.logit);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float x = s[i] * p.logit.inverse_softcap;
        dp[i] = (dp[i] - delta[(i >> 1) & 1]) * fmaf(-x, x, 1.f);
      }
    }
    float scale = is_capped() ? 1.f : p.logit.scale;
    if (Traits::kBias) {
      if (!Traits::kEarlyBias) bias.start(p.logit.bias, bias_place(), p.shape);
      bias.add(s, scale, p.logit.bias, bias_place(), p.shape);
      scale = 1.f;
    }
    if (!p.logit.alibi.data) return;
    const float slope = *p.logit.alibi.at(w->b0, w->b1, w->h);
    const float k0 = static_cast<float>(j * kKeys + 2 * (threadIdx.x & 3)) - w->rows.offset;
    const float to0 = static_cast<float>(row(0)) - k0, to1 = static_cast<float>(row(1)) - k0;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)
      s[i] =
          fmaf(-slope, fabsf(((i & 2) ? to1 : to0) - float(8 * (i / 4) + (i & 1))), s[i] * scale);
  }

  __device__ __forceinline__ void mask(int j) {
    const int k0 = j * kKeys + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lo = w->rows.begin(row(r)) - k0, hi = w->rows.end(row(r)) - k0;
#pragma unroll
      for (int g = 0; g < kKeys / 8; ++g)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * g + e < lo || 8 * g + e >= hi) s[4 * g + 2 * r + e] = -INFINITY;
    }
  }

  // Mask and segment ids.
  __device__ __forceinline__ void hide() {
    const int line[2] = {row(0), row(1)};
    if (p.hidden.bits.data) hide_masked(s, visible);
    if (p.hidden.line_ids.data)
      hide_other_segments(s, p.hidden, w->b0, w->b1, line, p.shape.Sq, tile.index * kKeys,
                          p.shape.Sk);
  }
};

}  // namespace jft::hopper
