// What the kernels that recompute P and dS share.
//     S = scale Q K^T -> s      p = exp((s - m) - c)      dP = dO V^T
//     ds = p (Z dP - delta), then times the softcap's slope for dq and dk
#pragma once

#include "logits.h"

constant constexpr int kRows = metal_backward_rows(kDP, kDVP);              // of the output tile
constant constexpr int kStaged = metal_backward_staged(kDP, kDVP, kBytes);  // per step
constant constexpr int kN = kStaged / 8;
constant constexpr int kExchange = 2 * kN * 64;  // floats per simdgroup: halves of S and dP

struct RowStats {
  float m, c, delta;
};

struct Weights {
  float weight;  // p Z: multiplies do in dv
  float ds;      // before the softcap
  float slope;   // of the softcap
};

// One element. The caller knows that i and j see each other and that row i is not empty.
inline Weights weights(constant MetalParams& p, thread const Scene& s, float dot, float dp,
                       RowStats row, i64 i, i64 j) {
  const Logit x = logit(p, s, dot, i, j);
  const float prob = exp_natural((x.s - row.m) - row.c);
  const float z = kHasDropout ? dropout_factor(p, s, i, j) : 1.0f;
  Weights w;
  w.weight = prob * z;
  w.ds = prob * (z * dp - row.delta);
  w.slope = x.slope;
  return w;
}

inline bool is_empty(RowStats row) { return row.c >= kMetalEmptyTest; }

// Split heads: each of the two simdgroups of a row block has summed S and dP over its half of the
// features; both get the sum, lower half first. All threads of the threadgroup call this.
inline void exchange_halves(thread Fragment (&s)[kN], thread Fragment (&dp)[kN],
                            threadgroup float* scratch, uint simd, uint lane) {
  threadgroup float* mine = scratch + simd * kExchange + lane * 2;
  for (int n = 0; n < kN; ++n) {
    for (int e = 0; e < 2; ++e) {
      mine[n * 64 + e] = get(s[n], e);
      mine[(kN + n) * 64 + e] = get(dp[n], e);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup const float* other = scratch + (simd ^ 1u) * kExchange + lane * 2;
  const bool lower = (simd & 1u) == 0;
  for (int n = 0; n < kN; ++n) {
    for (int e = 0; e < 2; ++e) {
      const float s2 = other[n * 64 + e], dp2 = other[(kN + n) * 64 + e];
      put(s[n], e, lower ? get(s[n], e) + s2 : s2 + get(s[n], e));
      put(dp[n], e, lower ? get(dp[n], e) + dp2 : dp2 + get(dp[n], e));
    }
  }
}

inline RowStats load_stats(constant MetalParams& p, device const float* max_in,
                           device const float* log_sum_in, device const float* delta_in,
                           BatchIndex b, i64 head, i64 row) {
  RowStats stats;
  stats.m = 0.0f;
  stats.c = kMetalEmptyRow;
  stats.delta = 0.0f;
  if (row < p.Sq) {
    stats.m = max_in[batch_offset(p, p.in[kBufRowMax], b) + head * p.in[kBufRowMax].head +
                     row * p.in[kBufRowMax].row];
    stats.c = log_sum_in[batch_offset(p, p.in[kBufRowLogSum], b) + head * p.in[kBufRowLogSum].head +
                         row * p.in[kBufRowLogSum].row];
    stats.delta = delta_in[batch_offset(p, p.scratch, b) + head * p.scratch.head + row];
  }
  return stats;
}

#define JFT_BACKWARD_ARGUMENTS                                                      \
  device const JFT_T *q [[buffer(kBufQ)]], device const JFT_T *k [[buffer(kBufK)]], \
      device const JFT_T *v [[buffer(kBufV)]], JFT_OPTION_ARGUMENTS,                \
      device const float *max_in [[buffer(kBufRowMax)]],                            \
      device const float *log_sum_in [[buffer(kBufRowLogSum)]],                     \
      device const JFT_T *d_out [[buffer(kBufDO)]],                                 \
      device const float *delta_in [[buffer(kBufDelta)]]
