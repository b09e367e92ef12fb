// From products q.k to logits: scale, softcap, bias, ALiBi, visibility, dropout, per element of the
// accumulator tiles.
//
// A warp's accumulator tile c[kM][kN][4] holds, for lane = 4 g + t, element e of block (m, n) at
//     r = 16 m + g + 8 (e / 2),   c = 8 n + 2 t + e % 2.
// kKeysFirst = false: r counts query rows, c keys (forward, dq). true: r keys, c queries (dk, dv).
#pragma once

#include "call.h"

namespace jft::cuda {

// Where the warp's tile lies in the logit matrix.
template <bool kKeysFirst>
struct Place {
  int i0, j0;  // query and key of element r = 0, c = 0
  int g, t;

  JFT_DEV Place(int query, int key) : i0(query), j0(key) {
    const int lane = thread_index() & 31;
    g = lane >> 2;
    t = lane & 3;
  }
  JFT_DEV int r(int m, int e) const { return 16 * m + g + 8 * (e >> 1); }
  JFT_DEV int c(int n, int e) const { return 8 * n + 2 * t + (e & 1); }
  JFT_DEV int i(int m, int n, int e) const { return i0 + (kKeysFirst ? c(n, e) : r(m, e)); }
  JFT_DEV int j(int m, int n, int e) const { return j0 + (kKeysFirst ? r(m, e) : c(n, e)); }
};

// Element `at` of a float array. Predicated loads instead of a switch: this is inlined per logit.
JFT_DEV float load_float(const void* data, DType dtype, i64 at) {
  const bool half = dtype == DType::kF16 || dtype == DType::kBF16;
  float x = 0.0f;
  if (half) {
    const unsigned short bits = static_cast<const unsigned short*>(data)[at];
    x = dtype == DType::kF16 ? f16_to_float(bits) : bits_float(static_cast<u32>(bits) << 16);
  } else if (dtype == DType::kF32) {
    x = static_cast<const float*>(data)[at];
  } else {
    x = static_cast<float>(static_cast<const double*>(data)[at]);
  }
  return x;
}

// The logit of one product, in natural units, and the derivative of the softcap there.
struct LogitMath {
  const Params& params;
  i64 bias_at;    // offset of the head's bias, -1 without
  i64 offset;     // position of row 0
  float slope;    // ALiBi, 0 without

  JFT_DEV LogitMath(const Params& all, const Control& c, int h) : params(all) {
    const Problem& p = all.p;
    bias_at = p.in[kBias].data ? c.offset[kBias] + h * p.in[kBias].head : -1;
    offset = c.pos.offset;
    slope = p.in[kAlibiSlopes].data ? *c.operand<const float>(p, kAlibiSlopes, h) : 0.0f;
  }

  JFT_DEV float distance(int i, int j) const {
    const i64 d = offset + i - j;
    return static_cast<float>(d < 0 ? -d : d);
  }

  JFT_DEV float operator()(float product, int i, int j, float* softcap_slope) const {
    float s = mul_rn(product, params.scale);
    *softcap_slope = 1.0f;
    if (params.softcap > 0.0f) {
      // tanh(x) = 1 - 2 / (1 + exp(2x)): absolute error 1e-7, where tanh.approx has 5e-4.
      const float e = exp2_fast(mul_rn(product, params.softcap_log2));
      const float tanh = add_rn(1.0f, -fast_divide(2.0f, add_rn(1.0f, e)));
      s = mul_rn(params.softcap, tanh);
      *softcap_slope = fma_rn(-tanh, tanh, 1.0f);
    }
    if (bias_at >= 0) {
      const Tensor& bias = params.p.in[kBias];
      // Elements outside the matrix are hidden later; they read an element inside it.
      const int row = min_int(i, static_cast<int>(params.p.Sq) - 1);
      const int col = min_int(j, static_cast<int>(params.p.Sk) - 1);
      s = add_rn(s, load_float(bias.data, bias.dtype,
                               bias_at + static_cast<i64>(row) * bias.row +
                                   static_cast<i64>(col) * bias.col));
    }
    return fma_rn(-slope, distance(i, j), s);
  }
};

// Bit 4n + e of bits[m]: element e of block (m, n) is visible. `map_plain`: mask and ids hide nothing
// here. Bit 2n + e%2 of *seen tells whether a row of this thread sees that column.
template <bool kKeysFirst, int kM, int kN>
JFT_DEV void visibility(u32 (&bits)[kM], const Params& params, const Control& control, int h,
                        const Place<kKeysFirst>& at, bool map_plain, u32* seen) {
  static_assert(kN <= 8, "the bits of a row of blocks are one word");
  const Problem& p = params.p;
  const bool ids = !map_plain && p.in[kQSegmentIds].data != nullptr;
  const bool masked = !map_plain && p.in[kMask].data != nullptr;
  const int* q_ids = nullptr;
  const int* k_ids = nullptr;
  if (ids) {
    q_ids = control.operand<const int>(p, kQSegmentIds, 0);
    k_ids = control.operand<const int>(p, kKvSegmentIds, 0);
  }
  const unsigned char* mask =
      masked ? control.operand<const unsigned char>(p, kMask, h) : nullptr;
  u32 columns = 0;
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    u32 word = 0;
    JFT_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int outer = kKeysFirst ? at.j(m, 0, 2 * half) : at.i(m, 0, 2 * half);
      // Of the other index.
      const Span span =
          Span::of(kKeysFirst ? visible_queries_any(control.pos, outer, static_cast<i64>(outer) + 1)
                              : visible_keys(control.pos, outer));
      int outer_id = 0;
      if (ids && span.begin < span.end) outer_id = kKeysFirst ? k_ids[outer] : q_ids[outer];
      JFT_NO_UNROLL
      for (int n = 0; n < kN; ++n) {
        JFT_UNROLL
        for (int c = 0; c < 2; ++c) {
          const int e = 2 * half + c;
          const int inner = kKeysFirst ? at.i(m, n, e) : at.j(m, n, e);
          bool visible = inner >= span.begin && inner < span.end;
          if (ids && visible) visible = (kKeysFirst ? q_ids[inner] : k_ids[inner]) == outer_id;
          if (masked && visible) {
            const i64 i = kKeysFirst ? inner : outer, j = kKeysFirst ? outer : inner;
            visible = mask[i * p.in[kMask].row + j * p.in[kMask].col] != 0;
          }
          word |= static_cast<u32>(visible) << (4 * n + e);
          columns |= static_cast<u32>(visible) << (2 * n + c);
        }
      }
    }
    bits[m] = word;
  }
  *seen = columns;
}

// Column flags of the block: each warp writes the OR of its rows, four words (lanes with equal lane % 4
// hold the same columns); after a barrier column_seen ORs the warps'.
constexpr int kSeenWarps = 8;
template <int kWarps>
JFT_DEV void publish_seen(u32 seen, u32 words) {
  static_assert(kWarps <= kSeenWarps, "the warps' words must fit the control bytes");
  seen |= shuffle_xor(seen, 4);
  seen |= shuffle_xor(seen, 8);
  seen |= shuffle_xor(seen, 16);
  const int lane = thread_index() & 31;
  if (lane < 4) shared<u32>(words + 16 * (thread_index() >> 5) + 4 * lane) = seen;
}
template <int kWarps>
JFT_DEV bool column_seen(u32 words, int column) {
  u32 seen = 0;
  JFT_UNROLL
  for (int w = 0; w < kWarps; ++w) seen |= shared<u32>(words + 16 * w + 4 * ((column & 7) >> 1));
  return (seen >> (2 * (column >> 3) + (column & 1))) & 1;
}

// The Philox draws of a head.
struct Dropout {
  u32 threshold, key0, key1, row0, col0, bh;

  JFT_DEV Dropout(const Problem& p, const Control& c, int h) : threshold(p.dropout_threshold) {
    key0 = key1 = row0 = col0 = bh = 0;
    if (threshold == 0) return;
    const u32* seed = c.operand<const u32>(p, kDropoutSeed, 0);
    const u32* origin = c.operand<const u32>(p, kDropoutOrigin, h);
    key0 = seed[0];
    key1 = seed[1];
    row0 = origin[0];
    col0 = origin[1];
    bh = origin[2];
  }

  // Bit 4n + e of bits[m]: element e of block (m, n) is kept.
  template <bool kKeysFirst, int kM, int kN>
  JFT_DEV void keep(u32 (&bits)[kM], const Place<kKeysFirst>& at) const {
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      u32 word = 0;
      JFT_NO_UNROLL
      for (int n = 0; n < kN; ++n) {
        JFT_NO_UNROLL
        for (int e = 0; e < 4; ++e) {
          const u32 col = col0 + at.j(m, n, e);
          const Philox draws = dropout_draws(row0 + at.i(m, n, e), col >> 3, bh, key0, key1);
          if (!kKeysFirst && ((col0 + at.j0) & 7) == 0) {
            // Two neighbouring columns are one word of the same call.
            const u32 pair = pick(draws, at.t);
            word |= static_cast<u32>(dropout_keeps(pair & 0xFFFFu, threshold)) << (4 * n + e);
            ++e;
            word |= static_cast<u32>(dropout_keeps(pair >> 16, threshold)) << (4 * n + e);
          } else {
            const u32 draw = (pick(draws, (col & 7) >> 1) >> (16 * (col & 1))) & 0xFFFFu;
            word |= static_cast<u32>(dropout_keeps(draw, threshold)) << (4 * n + e);
          }
        }
      }
      bits[m] = word;
    }
  }
  JFT_DEV static u32 pick(const Philox& draws, u32 n) {
    return n == 0 ? draws.w[0] : n == 1 ? draws.w[1] : n == 2 ? draws.w[2] : draws.w[3];
  }
};

}  // namespace jft::cuda
