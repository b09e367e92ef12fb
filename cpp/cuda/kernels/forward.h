// Forward: o_i = sum_j softmax(s)_ij Z_ij v_j and the row residual, one block per (batch, head,
// query tile), online softmax over key tiles (FlashAttention-2, arXiv:2307.08691, algorithm 1).
#pragma once

#include "../device/load.h"
#include "../device/logits.h"
#include "../tiles.h"

namespace jft::cuda {

template <class T_, int kHead, bool kGeneral>
struct ForwardTraits {
  using T = T_;
  static constexpr TileShape kShape = forward_tile(T::kBytes, kHead, kGeneral);
  static constexpr int kBlockQ = kShape.rows, kBlockK = kShape.cols;
  static constexpr int kWarps = kShape.warps, kThreads = kShape.threads(), kM = kShape.m();
  static constexpr int kN = kBlockK / 8, kD = kHead / 8;
  using L = Tile<T, kHead>;
  static_assert(L::kPitch == padded_row_bytes(T::kBytes, kHead));
  // Shared memory: control, Q, K, V.
  static constexpr u32 kControl = 0, kSeen = kSeenBytes;  // kSeen: four words per warp
  static constexpr u32 kQTile = kControlBytes;
  static constexpr u32 kKTile = kQTile + L::bytes(kBlockQ);
  static constexpr u32 kVTile = kKTile + L::bytes(kBlockK);
};

template <class T, int kHead, bool kGeneral>
JFT_DEV void forward_block(const Params& params) {
  using X = ForwardTraits<T, kHead, kGeneral>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;

  // Long rows first: under a causal mask the last query tiles see the most keys.
  const int tile =
      params.q_tiles - 1 - static_cast<int>(static_cast<u32>(block_index()) % params.q_tiles);
  const u32 bh = static_cast<u32>(block_index()) / params.q_tiles;
  const int h = static_cast<int>(bh % static_cast<u32>(p.Hq));
  const int i0 = tile * X::kBlockQ;
  const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));
  const int hk = h / static_cast<int>(p.G);
  share_control(X::kControl, params, bh / static_cast<u32>(p.Hq), i0, i1);
  const Control& control = shared<Control>(X::kControl);

  const auto load_k = [&](int j0) {
    load_tile<T, kHead, X::kBlockK, X::kThreads>(
        X::kKTile, control.operand<const E>(p, kK, hk), p.in[kK].row, j0, control.any.begin,
        control.any.end, static_cast<int>(p.D), params.vector >> kK & 1);
  };

  const bool has_map = params.map.data != nullptr;
  TileWalker walker;
  const int key_lo = control.any.begin, key_hi = control.any.end;
  walker.start(key_lo / X::kBlockK,
               key_lo < key_hi ? (key_hi + X::kBlockK - 1) / X::kBlockK : key_lo / X::kBlockK);
  const auto state = [&](int n) {
    return map_state(params.map, control, h, i0, i1, n * X::kBlockK,
                     min_int((n + 1) * X::kBlockK, static_cast<int>(p.Sk)));
  };
  bool map_plain;
  int n = walker.pop(has_map, state, &map_plain);

  float o[X::kM][X::kD][4];
  float row_max[X::kM][2], row_sum[X::kM][2];
  clear(o);
  JFT_UNROLL
  for (int m = 0; m < X::kM; ++m) {
    JFT_UNROLL
    for (int half = 0; half < 2; ++half) {
      row_max[m][half] = bits_float(0xff800000u);
      row_sum[m][half] = 0.0f;
    }
  }

  if (n >= 0) {
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, control.operand<const E>(p, kQ, h),
                                                 p.in[kQ].row, i0, i0, i1, static_cast<int>(p.D),
                                                 params.vector >> kQ & 1);
    load_k(n * X::kBlockK);
    copy_async_commit();
  }
  JFT_NO_UNROLL
  while (n >= 0) {
    const int j0 = n * X::kBlockK;
    copy_async_wait<0>();
    sync_block();  // K is there; every warp is done with V
    load_tile<T, kHead, X::kBlockK, X::kThreads>(
        X::kVTile, control.operand<const E>(p, kV, hk), p.in[kV].row, j0, control.any.begin,
        control.any.end, static_cast<int>(p.Dv), params.vector >> kV & 1);
    copy_async_commit();
    // The next tile, visibility and dropout are settled while no logits occupy registers.
    const bool this_plain = map_plain;
    n = walker.pop(has_map, state, &map_plain);
    const Place<false> at(i0 + warp_row, j0);
    const bool masked =
        !(this_plain && j0 >= control.all.begin && j0 + X::kBlockK <= control.all.end);
    u32 bits[X::kM], keep[X::kM];
    if (masked) {
      u32 seen;
      visibility<false, X::kM, X::kN>(bits, params, control, h, at, this_plain, &seen);
      if (!this_plain) publish_seen<X::kWarps>(seen, X::kSeen);
    }
    bool dropped = false;
    if constexpr (kGeneral) {
      const Dropout dropout(p, control, h);
      dropped = dropout.threshold != 0;
      if (dropped) dropout.template keep<false, X::kM, X::kN>(keep, at);
    }

    // S = Q K^T
    float s[X::kM][X::kN][4];
    clear(s);
    multiply_abt<T, kHead>(s, X::kQTile, warp_row, X::kKTile);

    copy_async_wait<0>();
    sync_block();  // V is there; every warp is done with K
    if (n >= 0) load_k(n * X::kBlockK);
    copy_async_commit();

    if constexpr (kGeneral) {
      float unused[X::kM][X::kN][4];
      LogitMath(params, control, h).form(s, unused, at);
    }
    if (masked) {
      JFT_UNROLL
      for (int m = 0; m < X::kM; ++m) {
        JFT_UNROLL
        for (int c = 0; c < X::kN; ++c) {
          JFT_UNROLL
          for (int e = 0; e < 4; ++e) {
            if (!(bits[m] >> (4 * c + e) & 1)) s[m][c][e] = bits_float(0xff800000u);
          }
        }
      }
      if (!this_plain) {
        // A key that mask or ids hide from every row here may hold NaN, and 0 * NaN is NaN.
        scrub_rows<T, kHead, X::kBlockK, X::kThreads>(
            X::kVTile, [&](int r) { return !column_seen<X::kWarps>(X::kSeen, r); });
        sync_block();
      }
    }

    // P = exp(S - max), in place; o and row_sum move to the new maximum
    JFT_UNROLL
    for (int m = 0; m < X::kM; ++m) {
      JFT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float top = row_max[m][half];
        JFT_UNROLL
        for (int c = 0; c < X::kN; ++c) {
          top = max_f(top, max_f(s[m][c][2 * half], s[m][c][2 * half + 1]));
        }
        top = max_f(top, shuffle_xor(top, 1));
        top = max_f(top, shuffle_xor(top, 2));
        const bool none = top == bits_float(0xff800000u);
        float alpha, sum = 0.0f;
        if constexpr (kGeneral) {
          // The maximum is subtracted before the change of base: finfo.min * log2 e overflows.
          const float base = none ? 0.0f : top;
          alpha = none ? 1.0f : exp2_fast((row_max[m][half] - base) * kLog2e);
          JFT_UNROLL
          for (int c = 0; c < X::kN; ++c) {
            JFT_UNROLL
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              s[m][c][e] = exp2_fast(mul_rn(add_rn(s[m][c][e], -base), kLog2e));
              sum += s[m][c][e];
            }
          }
        } else {
          // The backward forms the same number from the stored maximum, bit for bit.
          const float base = none ? 0.0f : mul_rn(mul_rn(top, params.scale), kLog2e);
          const float before = mul_rn(mul_rn(row_max[m][half], params.scale), kLog2e);
          alpha = none ? 1.0f : exp2_fast(before - base);
          JFT_UNROLL
          for (int c = 0; c < X::kN; ++c) {
            JFT_UNROLL
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              s[m][c][e] = exp2_fast(fma_rn(s[m][c][e], params.scale_log2, -base));
              sum += s[m][c][e];
            }
          }
        }
        row_max[m][half] = top;
        row_sum[m][half] = row_sum[m][half] * alpha + sum;
        JFT_UNROLL
        for (int d = 0; d < X::kD; ++d) {
          o[m][d][2 * half] *= alpha;
          o[m][d][2 * half + 1] *= alpha;
        }
      }
    }
    if constexpr (kGeneral) {
      if (dropped) {
        JFT_UNROLL
        for (int m = 0; m < X::kM; ++m) {
          JFT_UNROLL
          for (int c = 0; c < X::kN; ++c) {
            JFT_UNROLL
            for (int e = 0; e < 4; ++e) {
              s[m][c][e] = keep[m] >> (4 * c + e) & 1 ? s[m][c][e] * params.dropout_scale : 0.0f;
            }
          }
        }
      }
    }
    // O += P V
    fence_loads<T>();
    multiply_pb<T, kHead>(o, s, X::kVTile);
  }

  // Epilogue: the sink joins the sum, rows are normalised, the residual is written.
  const bool has_sink = p.in[kSinks].data != nullptr;
  const float sink = has_sink ? *control.operand<const float>(p, kSinks, h) : 0.0f;
  float* out_max = control.result<float>(p, kResRowMax, h);
  float* out_log_sum = control.result<float>(p, kResRowLogSum, h);
  const Place<false> at(i0 + warp_row, 0);
  float inverse[X::kM][2];
  JFT_UNROLL
  for (int m = 0; m < X::kM; ++m) {
    JFT_UNROLL
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[m][half];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      float top = row_max[m][half];
      if constexpr (!kGeneral) top = mul_rn(top, params.scale);
      const bool empty = sum == 0.0f;
      if (empty || row_max[m][half] == bits_float(0xff800000u)) top = 0.0f;
      float log_sum = log_accurate(sum);
      float factor = empty ? 0.0f : reciprocal(sum);
      if (empty) log_sum = static_cast<float>(kEmptyRow);
      if (has_sink && sink > bits_float(0xff800000u)) {
        if (empty) {
          top = sink;
          log_sum = 0.0f;
        } else if (sink <= top || (!kGeneral && abs_f(top) > 256.0f && sink - top < 60.0f)) {
          // The maximum is a gauge. Plain logits of a large one keep the keys' own, even below the
          // sink: the backward then repeats P exactly.
          const float total = sum + exp2_fast((sink - top) * kLog2e);
          log_sum = log_accurate(total);
          factor = reciprocal(total);
        } else {
          const float moved = exp2_fast((top - sink) * kLog2e);
          const float total = sum * moved + 1.0f;
          log_sum = log_accurate(total);
          factor = moved / total;
          top = sink;
        }
      }
      inverse[m][half] = factor;
      const int row = at.i(m, 0, 2 * half);
      if (at.t == 0 && row < i1) {
        out_max[row] = top;
        out_log_sum[row] = log_sum;
      }
    }
  }
  store_rows<T, kHead>(o, X::kQTile, warp_row, control.result<E>(p, kResO, h), p.out[kResO].row,
                       i0 + warp_row, i1, static_cast<int>(p.Dv), params.vector_out >> kResO & 1,
                       [&](int m, int half) { return inverse[m][half]; });
}

template <class T, int kHead, bool kGeneral>
JFT_KERNEL((ForwardTraits<T, kHead, kGeneral>::kThreads),
           (ForwardTraits<T, kHead, kGeneral>::kShape.blocks))
forward_kernel(JFT_PARAMS params) {
  forward_block<T, kHead, kGeneral>(params);
}

}  // namespace jft::cuda
