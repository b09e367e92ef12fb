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

JFT_DEV float half_to_float(unsigned short bits, bool f16) {
  return f16 ? f16_to_float(bits) : bits_float(static_cast<u32>(bits) << 16);
}

// What turns products into logits, one option after the other over the whole tile: a branch per
// element would run the elements one by one.
struct LogitMath {
  const Params& params;
  const Control& control;
  int h;
  float slope;  // ALiBi, 0 without

  JFT_DEV LogitMath(const Params& all, const Control& c, int head)
      : params(all), control(c), h(head) {
    slope = all.p.in[kAlibiSlopes].data ? *c.operand<const float>(all.p, kAlibiSlopes, head) : 0.0f;
  }

  // |i + offset - j|; offsets are 32-bit operands.
  JFT_DEV float distance(int i, int j) const {
    return abs_f(static_cast<float>(static_cast<int>(control.pos.offset) + i - j));
  }

  // s: products in, logits in natural units out. cap_slope: derivative of the softcap.
  template <bool kKeysFirst, int kM, int kN>
  JFT_DEV void form(float (&s)[kM][kN][4], float (&cap_slope)[kM][kN][4],
                    const Place<kKeysFirst>& at) const {
    if (params.softcap > 0.0f) {
      each<kKeysFirst>(s, at, [&](float& x, int m, int n, int e, int, int) {
        // tanh(x) = 1 - 2 / (1 + exp(2x)): absolute error 1e-7, where tanh.approx has 5e-4.
        const float power = exp2_fast(mul_rn(x, params.softcap_log2));
        const float tanh = add_rn(1.0f, -fast_divide(2.0f, add_rn(1.0f, power)));
        x = mul_rn(params.softcap, tanh);
        cap_slope[m][n][e] = fma_rn(-tanh, tanh, 1.0f);
      });
    } else {
      each<kKeysFirst>(s, at, [&](float& x, int m, int n, int e, int, int) {
        x = mul_rn(x, params.scale);
        cap_slope[m][n][e] = 1.0f;
      });
    }
    if (params.p.in[kBias].data) add_bias(s, at);
    if (slope != 0.0f) {
      each<kKeysFirst>(s, at, [&](float& x, int, int, int, int i, int j) {
        x = fma_rn(-slope, distance(i, j), x);
      });
    }
  }

 private:
  template <bool kKeysFirst, int kM, int kN, class Visit>
  JFT_DEV static void each(float (&s)[kM][kN][4], const Place<kKeysFirst>& at, Visit visit) {
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      JFT_UNROLL
      for (int n = 0; n < kN; ++n) {
        JFT_UNROLL
        for (int e = 0; e < 4; ++e) visit(s[m][n][e], m, n, e, at.i(m, n, e), at.j(m, n, e));
      }
    }
  }

  template <bool kKeysFirst, int kM, int kN>
  JFT_DEV void add_bias(float (&s)[kM][kN][4], const Place<kKeysFirst>& at) const {
    const Tensor& bias = params.p.in[kBias];
    const i64 head_at = control.offset[kBias] + h * bias.head;
    // Elements outside the matrix are hidden later; they read an element inside it.
    const int last_i = static_cast<int>(params.p.Sq) - 1,
              last_j = static_cast<int>(params.p.Sk) - 1;
    const auto offset = [&](int i, int j) {
      return head_at + static_cast<i64>(min_int(i, last_i)) * bias.row +
             static_cast<i64>(min_int(j, last_j)) * bias.col;
    };
    if (bias.dtype == DType::kF16 || bias.dtype == DType::kBF16) {
      const unsigned short* data = static_cast<const unsigned short*>(bias.data);
      const bool f16 = bias.dtype == DType::kF16;
      if (!kKeysFirst && params.bias_pairs) {
        JFT_UNROLL
        for (int m = 0; m < kM; ++m) {
          JFT_UNROLL
          for (int half = 0; half < 2; ++half) {
            const i64 row =
                head_at + static_cast<i64>(min_int(at.i(m, 0, 2 * half), last_i)) * bias.row;
            JFT_UNROLL
            for (int n = 0; n < kN; ++n) {
              // Sk is even here: the pair lies inside, or all of it is replaced.
              const int j = min_int(at.j(m, n, 0), last_j - 1);
              const u32 two = *reinterpret_cast<const u32*>(data + row + j);
              float& x = s[m][n][2 * half];
              float& y = s[m][n][2 * half + 1];
              x = add_rn(x, half_to_float(static_cast<unsigned short>(two), f16));
              y = add_rn(y, half_to_float(static_cast<unsigned short>(two >> 16), f16));
            }
          }
        }
      } else {
        each<kKeysFirst>(s, at, [&](float& x, int, int, int, int i, int j) {
          x = add_rn(x, half_to_float(data[offset(i, j)], f16));
        });
      }
    } else if (bias.dtype == DType::kF32) {
      const float* data = static_cast<const float*>(bias.data);
      each<kKeysFirst>(
          s, at, [&](float& x, int, int, int, int i, int j) { x = add_rn(x, data[offset(i, j)]); });
    } else {
      const double* data = static_cast<const double*>(bias.data);
      each<kKeysFirst>(s, at, [&](float& x, int, int, int, int i, int j) {
        x = add_rn(x, static_cast<float>(data[offset(i, j)]));
      });
    }
  }
};

// Bit 4n + e of bits[m]: element e of block (m, n) is visible. `map_plain`: mask and ids hide
// nothing here. Bit 2n + e%2 of *seen tells whether a row of this thread sees that column.
template <bool kKeysFirst, int kM, int kN>
JFT_DEV void visibility(u32 (&bits)[kM], const Params& params, const Control& control, int h,
                        const Place<kKeysFirst>& at, bool map_plain, u32* seen) {
  static_assert(kN <= 8, "the bits of a row of blocks are one word");
  const Problem& p = params.p;
  const bool ids = !map_plain && p.in[kQSegmentIds].data != nullptr;
  const bool masked = !map_plain && p.in[kMask].data != nullptr;
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    u32 word = 0;
    JFT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int outer = kKeysFirst ? at.j(m, 0, 2 * half) : at.i(m, 0, 2 * half);
      // Of the other index.
      const Span span =
          Span::of(kKeysFirst ? visible_queries_any(control.pos, outer, static_cast<i64>(outer) + 1)
                              : visible_keys(control.pos, outer));
      JFT_UNROLL
      for (int n = 0; n < kN; ++n) {
        JFT_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const int inner = kKeysFirst ? at.i(m, n, e) : at.j(m, n, e);
          if (inner >= span.begin && inner < span.end) word |= 1u << (4 * n + e);
        }
      }
    }
    bits[m] = word;
  }
  // Only elements inside the matrix are read; all loads of a tile are in flight together.
  if (ids) {
    const int* q_ids = control.operand<const int>(p, kQSegmentIds, 0);
    const int* k_ids = control.operand<const int>(p, kKvSegmentIds, 0);
    const int* outer_ids = kKeysFirst ? k_ids : q_ids;
    const int* inner_ids = kKeysFirst ? q_ids : k_ids;
    const int outer_end = static_cast<int>(kKeysFirst ? p.Sk : p.Sq);
    const int inner_end = static_cast<int>(kKeysFirst ? p.Sq : p.Sk);
    int inner_id[kN][2];
    JFT_UNROLL
    for (int n = 0; n < kN; ++n) {
      JFT_UNROLL
      for (int c = 0; c < 2; ++c) {
        const int inner = kKeysFirst ? at.i(0, n, c) : at.j(0, n, c);
        inner_id[n][c] = inner < inner_end ? inner_ids[inner] : 0;
      }
    }
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      u32 equal = 0;
      JFT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int outer = kKeysFirst ? at.j(m, 0, 2 * half) : at.i(m, 0, 2 * half);
        const int outer_id = outer < outer_end ? outer_ids[outer] : 0;
        JFT_UNROLL
        for (int n = 0; n < kN; ++n) {
          JFT_UNROLL
          for (int c = 0; c < 2; ++c) {
            if (inner_id[n][c] == outer_id) equal |= 1u << (4 * n + 2 * half + c);
          }
        }
      }
      bits[m] &= equal;
    }
  }
  if (masked) {
    const Tensor& t = p.in[kMask];
    const unsigned char* mask = control.operand<const unsigned char>(p, kMask, h);
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      u32 set = 0;
      JFT_UNROLL
      for (int n = 0; n < kN; ++n) {
        JFT_UNROLL
        for (int e = 0; e < 4; ++e) {
          if (bits[m] >> (4 * n + e) & 1) {
            const i64 from =
                static_cast<i64>(at.i(m, n, e)) * t.row + static_cast<i64>(at.j(m, n, e)) * t.col;
            if (mask[from] != 0) set |= 1u << (4 * n + e);
          }
        }
      }
      bits[m] &= set;
    }
  }
  u32 columns = 0;
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    JFT_UNROLL
    for (int n = 0; n < kN; ++n) {
      const u32 four = bits[m] >> (4 * n);
      columns |= ((four | four >> 2) & 3u) << (2 * n);
    }
  }
  *seen = columns;
}

// Column flags of the block: each warp writes the OR of its rows, four words (lanes with equal lane
// % 4 hold the same columns); after a barrier column_seen ORs the warps'.
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
