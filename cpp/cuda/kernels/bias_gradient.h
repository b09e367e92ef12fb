// dbias = ds summed over every dimension in which the bias has size 1. One block per (tile of
// dbias, split): it walks the batch elements, heads and tiles that fall on its tile, forms S and dP
// again and adds ds in registers; no S x S temporary. With several splits each writes f32 partial
// sums, which bias_sum_kernel adds in a fixed order.
#pragma once

#include "backward_dq.h"

namespace jft::cuda {

JFT_DEV void store_float(void* data, DType dtype, i64 at, float x) {
  switch (dtype) {
    case DType::kF16:
      static_cast<unsigned short*>(data)[at] = static_cast<unsigned short>(pack_f16(x, 0.0f));
      break;
    case DType::kBF16:
      static_cast<unsigned short*>(data)[at] = static_cast<unsigned short>(pack_bf16(x, 0.0f));
      break;
    case DType::kF64:
      static_cast<double*>(data)[at] = x;
      break;
    default:
      static_cast<float*>(data)[at] = x;
  }
}

template <class T, int kHead>
JFT_DEV void bias_gradient_block(const Params& params) {
  using X = DqTraits<T, kHead, true>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const Tensor& result = p.out[kResDBias];
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;
  const u32 k_tile = X::kKvTiles, v_tile = X::kKvTiles + X::kTileBytes;

  // A dimension of the tile grid is 1 where the bias is summed over it.
  const int out_q = result.row ? params.q_tiles : 1, out_k = result.col ? params.k_tiles : 1;
  const int out_h = result.head ? static_cast<int>(p.Hq) : 1;
  const int in_q = params.q_tiles / out_q, in_k = params.k_tiles / out_k;
  const int in_h = static_cast<int>(p.Hq) / out_h;
  i64 rest = block_index();
  const int split = static_cast<int>(rest % params.splits);
  rest /= params.splits;
  const int tile_k = static_cast<int>(rest % out_k);
  rest /= out_k;
  const int tile_q = static_cast<int>(rest % out_q);
  rest /= out_q;
  const int tile_h = static_cast<int>(rest % out_h);
  const i64 kept = rest / out_h;
  const i64 steps = params.batches_summed * in_h * in_q * in_k;
  const i64 step_end = steps * (split + 1) / params.splits;

  const Control& control = shared<Control>(X::kControl);
  float sum[X::kM][X::kN][4];
  clear(sum);
  i64 out_b = kept;
  if (params.batches_summed > 1) out_b = batch_of_result(p, result, kept, 0);
  JFT_NO_UNROLL
  for (i64 step = steps * split / params.splits; step < step_end; ++step) {
    i64 at_step = step;
    const int kt = result.col ? tile_k : static_cast<int>(at_step % in_k);
    at_step /= in_k;
    const int qt = result.row ? tile_q : static_cast<int>(at_step % in_q);
    at_step /= in_q;
    const int h = result.head ? tile_h : static_cast<int>(at_step % in_h);
    at_step /= in_h;
    const i64 b = params.batches_summed > 1 ? batch_of_result(p, result, kept, at_step) : kept;
    const int hk = h / static_cast<int>(p.G);
    const int i0 = qt * X::kBlockQ, j0 = kt * X::kBlockK;
    const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));
    const int j1 = min_int(j0 + X::kBlockK, static_cast<int>(p.Sk));

    share_control(X::kControl, params, b, i0, i1);
    const Span any = control.any, all = control.all;
    if (any.begin >= any.end || j1 <= any.begin || j0 >= any.end) continue;
    const int state =
        params.map.data ? map_state(params.map, control, h, i0, i1, j0, j1) : int(kCellVisible);
    if (state == kCellHidden) continue;

    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, control.operand<const E>(p, kQ, h),
                                                 p.in[kQ].row, i0, i0, i1, static_cast<int>(p.D),
                                                 params.vector >> kQ & 1);
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kDoTile, control.operand<const E>(p, kDO, h),
                                                 p.in[kDO].row, i0, i0, i1, static_cast<int>(p.Dv),
                                                 params.vector >> kDO & 1);
    load_tile<T, kHead, X::kBlockK, X::kThreads>(k_tile, control.operand<const E>(p, kK, hk),
                                                 p.in[kK].row, j0, any.begin, any.end,
                                                 static_cast<int>(p.D), params.vector >> kK & 1);
    load_tile<T, kHead, X::kBlockK, X::kThreads>(v_tile, control.operand<const E>(p, kV, hk),
                                                 p.in[kV].row, j0, any.begin, any.end,
                                                 static_cast<int>(p.Dv), params.vector >> kV & 1);
    const RowFacts* rows = params.rows + (b * p.Hq + h) * params.rows_pitch + i0;
    for (int r = thread_index(); r < X::kBlockQ; r += X::kThreads) {
      copy_async(X::kFacts + r * sizeof(RowFacts), rows + r, 16);
    }
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    scrub_dead_queries<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, X::kDoTile, X::kFacts);
    // S = Q K^T, dP = dO V^T
    float s[X::kM][X::kN][4], dp[X::kM][X::kN][4];
    clear(s);
    clear(dp);
    multiply_abt<T, kHead>(s, X::kQTile, warp_row, k_tile);
    multiply_abt<T, kHead>(dp, X::kDoTile, warp_row, v_tile);
    const Place<false> at(i0 + warp_row, j0);
    const bool plain = state == kCellVisible;
    const bool masked = !(plain && j0 >= all.begin && j0 + X::kBlockK <= all.end) ||
                        i0 + X::kBlockQ > p.Sq;  // rows past the end must not enter column sums
    u32 bits[X::kM];
    if (masked) {
      u32 seen;
      visibility<false, X::kM, X::kN>(bits, params, control, h, at, plain, &seen);
    }
    u32 keep[X::kM];
    const Dropout dropout(p, control, h);
    const bool dropped = dropout.threshold != 0;
    if (dropped) dropout.template keep<false, X::kM, X::kN>(keep, at);
    gradient_tile<true, false, X::kM, X::kN>(
        s, dp, params, LogitMath(params, control, h), at, bits, masked, keep, dropped,
        [&](int m, int, int e) {
          return shared<RowFacts>(X::kFacts + (warp_row + at.r(m, e)) * sizeof(RowFacts));
        },
        [&](int m, int c, int e, float ds) { sum[m][c][e] += ds; });
  }

  // Sums over keys stay in a warp's rows; sums over queries cross the warps.
  if (!result.col) {
    JFT_UNROLL
    for (int m = 0; m < X::kM; ++m) {
      JFT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float x = 0.0f;
        JFT_UNROLL
        for (int c = 0; c < X::kN; ++c) x += sum[m][c][2 * half] + sum[m][c][2 * half + 1];
        x += shuffle_xor(x, 1);
        x += shuffle_xor(x, 2);
        JFT_UNROLL
        for (int c = 0; c < X::kN; ++c) sum[m][c][2 * half] = sum[m][c][2 * half + 1] = 0.0f;
        sum[m][0][2 * half] =
            x;  // column 0 of the lane with t = 0; the other lanes' copies are not read
      }
    }
  }
  if (!result.row) {
    sync_block();
    JFT_UNROLL
    for (int c = 0; c < X::kN; ++c) {
      JFT_UNROLL
      for (int e = 0; e < 2; ++e) {
        float x = 0.0f;
        JFT_UNROLL
        for (int m = 0; m < X::kM; ++m) x += sum[m][c][e] + sum[m][c][2 + e];
        x += shuffle_xor(x, 4);
        x += shuffle_xor(x, 8);
        x += shuffle_xor(x, 16);
        const int lane = thread_index() & 31;
        if (lane < 4) {
          shared<float>(X::kQTile +
                        ((thread_index() >> 5) * X::kBlockK + 8 * c + 2 * lane + e) * 4) = x;
        }
      }
    }
    sync_block();
  }

  // Where a dimension is summed only index 0 of it is written.
  float* parts = params.bias_parts ? params.bias_parts + split * params.bias_elements : nullptr;
  const i64 out_at = batch_at(p, result, out_b);
  const auto put = [&](i64 i, i64 j, float x) {
    const i64 at = out_at + tile_h * result.head + i * result.row + j * result.col;
    if (parts) {
      parts[at] = x;
    } else {
      store_float(result.data, result.dtype, at, x);
    }
  };
  const int keys = result.col ? X::kBlockK : 1;
  const int j0 = tile_k * X::kBlockK;
  const Place<false> at(tile_q * X::kBlockQ + warp_row, j0);
  if (!result.row) {
    for (int c = thread_index(); c < keys; c += X::kThreads) {
      float x = 0.0f;
      for (int w = 0; w < X::kThreads / 32; ++w)
        x += shared<float>(X::kQTile + (w * X::kBlockK + c) * 4);
      if (!result.col || j0 + c < p.Sk) put(0, j0 + c, x);
    }
  } else {
    JFT_UNROLL
    for (int m = 0; m < X::kM; ++m) {
      JFT_UNROLL
      for (int c = 0; c < X::kN; ++c) {
        JFT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool writes =
              result.col ? at.j(m, c, e) < p.Sk : (c == 0 && (e & 1) == 0 && at.t == 0);
          if (writes && at.i(m, c, e) < p.Sq) put(at.i(m, c, e), at.j(m, c, e), sum[m][c][e]);
        }
      }
    }
  }
}

template <class T, int kHead>
JFT_KERNEL((DqTraits<T, kHead, true>::kThreads), (DqTraits<T, kHead, true>::kShape.blocks))
bias_gradient_kernel(JFT_PARAMS params) {
  bias_gradient_block<T, kHead>(params);
}

}  // namespace jft::cuda
