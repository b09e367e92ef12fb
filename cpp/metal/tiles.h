// The tile sizes: one rule, read by the kernels, by the launch code and by the tests.
//
// A threadgroup has 4 simdgroups. A simdgroup owns 8 rows of the output tile. Feature sizes are
// padded to a multiple of 8. Above 128 features the register file (2 f32 per lane and 8x8 fragment:
// 8 x 256 floats of q, do and dq are 192 registers) is too small for the backward, so two
// simdgroups share 8 rows and take one half of the features each (`split`); padding is then to a
// multiple of 16.
#pragma once

#include "../core/semantics.h"

namespace jft {

JFT_CONST int kSimdgroups = 4;
JFT_CONST int kThreads = 32 * kSimdgroups;
JFT_CONST int kForwardRows = 8 * kSimdgroups;
JFT_CONST int kThreadgroupLimit = 32768;

constexpr int metal_split(int d, int dv) { return d > 128 || dv > 128 ? 2 : 1; }

// Padded feature size of a head of size `d` beside one of size `other`.
constexpr int metal_padded(int d, int other) {
  return metal_split(d, other) == 2 ? (d + 15) / 16 * 16 : (d + 7) / 8 * 8;
}

// Elements between rows of a staged tile: 16 bytes of padding spread the banks.
constexpr int metal_ld(int d, int bytes) { return d + 16 / bytes; }

// Bytes of two staged tiles (K and V, or Q and dO) of n rows.
constexpr int metal_tile_bytes(int n, int dp, int dvp, int bytes) {
  return n * (metal_ld(dp, bytes) + metal_ld(dvp, bytes)) * bytes;
}

// Forward: keys per step, 32 where K and V fit (D = 64 .. 128 in 16 bits), else 16, else 8.
constexpr int metal_forward_keys(int dp, int dvp, int bytes) {
  return metal_tile_bytes(32, dp, dvp, bytes) <= kThreadgroupLimit   ? 32
         : metal_tile_bytes(16, dp, dvp, bytes) <= kThreadgroupLimit ? 16
                                                                     : 8;
}

constexpr int metal_forward_bytes(int dp, int dvp, int bytes) {
  return metal_tile_bytes(metal_forward_keys(dp, dvp, bytes), dp, dvp, bytes);
}

// Backward kernels: rows of the output tile (queries in dq and dbias, keys in dkdv).
constexpr int metal_backward_rows(int dp, int dvp) { return 32 / metal_split(dp, dvp); }

// Bytes for n staged rows: two tiles, 3 f32 row statistics, and (split) the f32 halves of S and dP
// that the two simdgroups of a row block exchange.
constexpr int metal_backward_bytes_for(int n, int dp, int dvp, int bytes) {
  return metal_tile_bytes(n, dp, dvp, bytes) + 3 * n * 4 +
         (metal_split(dp, dvp) == 2 ? 2 * kSimdgroups * 8 * n * 4 : 0);
}

// Backward kernels: rows that are staged per step (keys in dq and dbias, queries in dkdv).
constexpr int metal_backward_staged(int dp, int dvp, int bytes) {
  return metal_backward_bytes_for(32, dp, dvp, bytes) <= kThreadgroupLimit   ? 32
         : metal_backward_bytes_for(16, dp, dvp, bytes) <= kThreadgroupLimit ? 16
                                                                             : 8;
}

constexpr int metal_backward_bytes(int dp, int dvp, int bytes) {
  return (metal_backward_bytes_for(metal_backward_staged(dp, dvp, bytes), dp, dvp, bytes) + 15) /
         16 * 16;
}

// dbias sums its tile over rows in f32 scratch that takes the place of the staged tiles.
constexpr int metal_dbias_bytes(int dp, int dvp, int bytes) {
  return metal_backward_bytes(dp, dvp, bytes) >
                 4 * metal_backward_rows(dp, dvp) * metal_backward_staged(dp, dvp, bytes)
             ? metal_backward_bytes(dp, dvp, bytes)
             : 4 * metal_backward_rows(dp, dvp) * metal_backward_staged(dp, dvp, bytes);
}

static_assert(metal_forward_bytes(256, 256, 4) <= kThreadgroupLimit, "largest forward tile");
static_assert(metal_backward_bytes(256, 256, 4) <= kThreadgroupLimit, "largest backward tile");

}  // namespace jft
