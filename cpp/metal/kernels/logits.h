// From the product q.k to the weight: visibility, logit, dropout. One home for all kernels, so that
// the backward recomputes bit for bit what the forward saw.
#pragma once

#include "common.h"

// Everything about one (batch element, query head).
struct Scene {
  Positions pos;
  device const int* q_segments;
  device const int* kv_segments;
  device const uchar* mask;
  i64 mask_row, mask_col;
  device const uchar* bias;  // first byte of the array
  i64 bias_at, bias_row, bias_col;
  float slope;
  u32 seed0, seed1, row0, col0, bh;
};

inline Positions positions(constant MetalParams& p, thread const Options& o, BatchIndex b) {
  i64 offset = p.Sk - p.Sq, left = p.window_left, right = p.window_right;
  i64 q_length = p.Sq, kv_length = p.Sk;
  if (came(p, kBufQOffset)) offset = o.q_offset[batch_offset(p, p.in[kBufQOffset], b)];
  if (came(p, kBufWindowLeft)) left = o.window_left[batch_offset(p, p.in[kBufWindowLeft], b)];
  if (came(p, kBufWindowRight)) right = o.window_right[batch_offset(p, p.in[kBufWindowRight], b)];
  if (came(p, kBufQLengths)) q_length = o.q_lengths[batch_offset(p, p.in[kBufQLengths], b)];
  if (came(p, kBufKvLengths)) kv_length = o.kv_lengths[batch_offset(p, p.in[kBufKvLengths], b)];
  return make_positions(p.Sq, p.Sk, q_length, kv_length, offset, p.causal != 0, left, right);
}

inline Scene make_scene(constant MetalParams& p, thread const Options& o, BatchIndex b, i64 head) {
  Scene s;
  s.pos = positions(p, o, b);
  if (kHasSegments) {
    s.q_segments = o.q_segments + batch_offset(p, p.in[kBufQSegmentIds], b);
    s.kv_segments = o.kv_segments + batch_offset(p, p.in[kBufKvSegmentIds], b);
  }
  if (kHasMask) {
    s.mask = o.mask + batch_offset(p, p.in[kBufMask], b) + head * p.in[kBufMask].head;
    s.mask_row = p.in[kBufMask].row;
    s.mask_col = p.in[kBufMask].col;
  }
  if (kHasBias) {
    s.bias = o.bias;
    s.bias_at = batch_offset(p, p.in[kBufBias], b) + head * p.in[kBufBias].head;
    s.bias_row = p.in[kBufBias].row;
    s.bias_col = p.in[kBufBias].col;
  }
  if (kHasAlibi) {
    s.slope =
        o.slopes[batch_offset(p, p.in[kBufAlibiSlopes], b) + head * p.in[kBufAlibiSlopes].head];
  }
  if (kHasDropout) {
    device const uint* seed = o.seed + batch_offset(p, p.in[kBufDropoutSeed], b);
    device const uint* origin = o.origin + batch_offset(p, p.in[kBufDropoutOrigin], b) +
                                head * p.in[kBufDropoutOrigin].head;
    s.seed0 = seed[0];
    s.seed1 = seed[1];
    s.row0 = origin[0];
    s.col0 = origin[1];
    s.bh = origin[2];
  }
  return s;
}

inline bool visible(thread const Scene& s, i64 i, i64 j) {
  if (i >= s.pos.Sq || j >= s.pos.Sk) return false;
  Range keys = visible_keys(s.pos, i);
  bool seen = j >= keys.begin && j < keys.end;
  if (kHasSegments && seen) seen = s.q_segments[i] == s.kv_segments[j];
  if (kHasMask && seen) seen = s.mask[i * s.mask_row + j * s.mask_col] != 0;
  return seen;
}

// Does every pair of the tile see each other? Then no element is tested.
inline bool all_visible(thread const Scene& s, i64 i0, i64 i1, i64 j0, i64 j1) {
  if (kHasSegments || kHasMask) return false;
  Range keys = visible_keys_all(s.pos, i0, i1);
  return j0 >= keys.begin && j1 <= keys.end;
}

// Smallest and largest segment id of the positions [begin, end), at least one (simdgroup-wide).
struct IdRange {
  int lo, hi;
};

inline IdRange segment_range(device const int* ids, i64 begin, i64 end, uint lane) {
  int lo = ids[begin], hi = lo;
  for (i64 i = begin + lane; i < end; i += 32) {
    lo = min(lo, ids[i]);
    hi = max(hi, ids[i]);
  }
  IdRange range;
  range.lo = simd_min(lo);
  range.hi = simd_max(hi);
  return range;
}

// Tiles whose ranges of ids do not meet hold no visible pair (exact for sorted ids).
inline bool segments_apart(IdRange a, IdRange b) { return a.hi < b.lo || b.hi < a.lo; }

struct Logit {
  float s;      // final logit
  float slope;  // ds/d(scale * q.k): the softcap's derivative
};

inline Logit logit(constant MetalParams& p, thread const Scene& s, float dot, i64 i, i64 j) {
  Logit x;
  x.s = dot * p.scale;
  x.slope = 1.0f;
  if (kHasSoftcap) {
    float t = precise::tanh(x.s / p.softcap);
    x.s = p.softcap * t;
    x.slope = 1.0f - t * t;
  }
  if (kHasBias) {
    i64 at = s.bias_at + i * s.bias_row + j * s.bias_col;
    float b;
    if (kBiasType == 0) {
      b = reinterpret_cast<device const float*>(s.bias)[at];
    } else if (kBiasType == 1) {
      b = float(reinterpret_cast<device const half*>(s.bias)[at]);
    } else {
      b = float(reinterpret_cast<device const bfloat*>(s.bias)[at]);
    }
    x.s += b;
  }
  if (kHasAlibi) x.s -= s.slope * fabs(float(i + s.pos.offset - j));
  return x;
}

// 0 for a dropped weight, 1 / (1 - rate) for a kept one.
inline float dropout_factor(constant MetalParams& p, thread const Scene& s, i64 i, i64 j) {
  u32 row = s.row0 + u32(i), col = s.col0 + u32(j);
  Philox draws = dropout_draws(row, col >> 3, s.bh, s.seed0, s.seed1);
  return dropout_keeps(dropout_draw(draws, int(col & 7u)), p.dropout_threshold) ? p.dropout_scale
                                                                                : 0.0f;
}

// exp(x), x <= 0 up to rounding. The caller subtracts the maximum before this multiplies by log2 e.
inline float exp_natural(float x) { return fast::exp2(x * M_LOG2E_F); }
