// dv_j = sum_i p_ij Z_ij do_i and dk_j = scale sum_i ds_ij q_i. One block per (batch element of the
// result, kv head, key tile); walks the query tiles of the G query heads of its group, so GQA needs
// no buffers and no atomics. The products are formed transposed (keys first): their accumulators
// are the A operands of dV and dK as they stand.
#pragma once

#include "../tiles.h"
#include "gradients.h"
#include "rows.h"

namespace jft::cuda {

template <class T_, int kHead, bool kGeneral>
struct DkDvTraits {
  using T = T_;
  static constexpr TileShape kShape = dkdv_tile(T::kBytes, kHead, kGeneral);
  static constexpr int kBlockK = kShape.rows, kBlockQ = kShape.cols, kStages = kShape.stages;
  static constexpr int kThreads = kShape.threads(), kM = kShape.m();
  static constexpr int kN = kBlockQ / 8, kD = kHead / 8;
  using L = Tile<T, kHead>;
  static_assert(L::kPitch == padded_row_bytes(T::kBytes, kHead));
  static_assert(kRowsMultiple % kBlockQ == 0, "facts are loaded by whole tiles");
  // Shared memory: control, K, V, then per stage Q, dO, then per stage the queries' facts.
  static constexpr u32 kControl = 0;
  static constexpr u32 kKTile = kControlBytes;
  static constexpr u32 kVTile = kKTile + L::bytes(kBlockK);
  static constexpr u32 kQdoTiles = kVTile + L::bytes(kBlockK);
  static constexpr u32 kTileBytes = L::bytes(kBlockQ), kStageBytes = 2 * kTileBytes;
  static constexpr u32 kFacts = kQdoTiles + kStages * kStageBytes;
  static constexpr u32 kFactsBytes = kBlockQ * sizeof(RowFacts);
};

// kDk, kDv: which of the two is computed (both, unless their accumulators do not fit together).
template <class T, int kHead, bool kGeneral, bool kDk, bool kDv>
JFT_DEV void dkdv_block(const Params& params) {
  using X = DkDvTraits<T, kHead, kGeneral>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;

  const int tile = static_cast<int>(static_cast<u32>(block_index()) % params.k_tiles);
  const u32 kept_head = static_cast<u32>(block_index()) / params.k_tiles;
  const u32 kv_heads = static_cast<u32>(p.Hkv);
  const int hk = static_cast<int>(kept_head % kv_heads), group = static_cast<int>(p.G);
  const int first_head = hk * group;  // the group's first query head
  const int j0 = tile * X::kBlockK;
  const int j1 = min_int(j0 + X::kBlockK, static_cast<int>(p.Sk));

  float dk[kDk ? X::kM : 1][kDk ? X::kD : 1][4], dv[kDv ? X::kM : 1][kDv ? X::kD : 1][4];
  clear(dk);
  clear(dv);
  const Control& control = shared<Control>(X::kControl);
  JFT_NO_UNROLL
  for (i64 summed = 0; summed < params.batches_summed; ++summed) {
    i64 b = kept_head / kv_heads;
    if (params.batches_summed > 1) {
      b = batch_of_result(p, p.out[params.write_dk ? kResDK : kResDV], b, summed);
    }
    share_control(X::kControl, params, b, 0, 0);
    const Span any = Span::of(visible_queries_any(control.pos, j0, j1));
    const int row_lo = any.begin, row_hi = any.end;
    const int first = row_lo / X::kBlockQ;
    const int stop = row_lo < row_hi ? (row_hi + X::kBlockQ - 1) / X::kBlockQ : first;
    if (first >= stop) continue;

    const bool has_map = params.map.data != nullptr;
    TileWalker walker;
    int g = 0;  // query head within the group
    walker.start(first, stop);
    bool map_plain;
    // The next visible tile, over all heads of the group; -1 at the end.
    const auto pop = [&]() {
      for (;;) {
        const int h = first_head + g;
        const int i = walker.pop(
            has_map,
            [&](int n) {
              return map_state(params.map, control, h, n * X::kBlockQ,
                               min_int((n + 1) * X::kBlockQ, static_cast<int>(p.Sq)), j0, j1);
            },
            &map_plain);
        if (i >= 0 || g + 1 >= group) return i;
        ++g;
        walker.start(first, stop);
      }
    };
    const auto load_q = [&](int n, int h, int stage) {
      const u32 at = X::kQdoTiles + stage * X::kStageBytes;
      const int i0 = n * X::kBlockQ;
      load_tile<T, kHead, X::kBlockQ, X::kThreads>(at, control.operand<const E>(p, kQ, h),
                                                   p.in[kQ].row, i0, row_lo, row_hi,
                                                   static_cast<int>(p.D), params.vector >> kQ & 1);
      load_tile<T, kHead, X::kBlockQ, X::kThreads>(
          at + X::kTileBytes, control.operand<const E>(p, kDO, h), p.in[kDO].row, i0, row_lo,
          row_hi, static_cast<int>(p.Dv), params.vector >> kDO & 1);
      const RowFacts* rows = params.rows + (control.b * p.Hq + h) * params.rows_pitch + i0;
      for (int r = thread_index(); r < X::kBlockQ; r += X::kThreads) {
        copy_async(X::kFacts + stage * X::kFactsBytes + r * sizeof(RowFacts), rows + r, 16);
      }
    };

    int n = pop(), stage = 0;
    if (n < 0) continue;
    load_tile<T, kHead, X::kBlockK, X::kThreads>(X::kKTile, control.operand<const E>(p, kK, hk),
                                                 p.in[kK].row, j0, j0, j1, static_cast<int>(p.D),
                                                 params.vector >> kK & 1);
    load_tile<T, kHead, X::kBlockK, X::kThreads>(X::kVTile, control.operand<const E>(p, kV, hk),
                                                 p.in[kV].row, j0, j0, j1, static_cast<int>(p.Dv),
                                                 params.vector >> kV & 1);
    load_q(n, first_head + g, 0);
    copy_async_commit();

    JFT_NO_UNROLL
    while (n >= 0) {
      const int i0 = n * X::kBlockQ;
      const int h = first_head + g;
      const bool this_plain = map_plain;
      const u32 q_tile = X::kQdoTiles + stage * X::kStageBytes;
      const u32 do_tile = q_tile + X::kTileBytes;
      const u32 facts_at = X::kFacts + stage * X::kFactsBytes;
      n = pop();
      if constexpr (X::kStages == 2) {
        if (n >= 0) load_q(n, first_head + g, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      // Settled while no logits occupy registers.
      const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));
      const Span all = Span::of(visible_keys_all(control.pos, i0, i1));
      bool masked = !(this_plain && j0 >= all.begin && j0 + X::kBlockK <= all.end);
      if constexpr (kGeneral) masked |= i0 + X::kBlockQ > p.Sq;  // a bias is read for such rows
      const Place<true> at(i0, j0 + warp_row);
      u32 bits[X::kM];
      if (masked) {
        u32 seen;
        visibility<true, X::kM, X::kN>(bits, params, control, h, at, this_plain, &seen);
      }
      u32 keep[X::kM];
      bool dropped = false;
      if constexpr (kGeneral) {
        const Dropout dropout(p, control, h);
        dropped = dropout.threshold != 0;
        if (dropped) dropout.template keep<true, X::kM, X::kN>(keep, at);
      }
      sync_block();
      scrub_dead_queries<T, kHead, X::kBlockQ, X::kThreads>(q_tile, do_tile, facts_at);

      // S^T = K Q^T, dP^T = V dO^T
      float s[X::kM][X::kN][4], dp[X::kM][X::kN][4];
      clear(s);
      clear(dp);
      multiply_abt<T, kHead>(s, X::kKTile, warp_row, q_tile);
      if constexpr (kDk) multiply_abt<T, kHead>(dp, X::kVTile, warp_row, do_tile);

      const LogitMath logit(params, control, h);
      // dS^T = P^T (Z dP^T - delta)
      gradient_tile<kGeneral, true, X::kM, X::kN>(
          s, dp, params, logit, at, bits, masked, keep, dropped,
          [&](int, int c, int e) {
            return shared<RowFacts>(facts_at + at.c(c, e) * sizeof(RowFacts));
          },
          [](int, int, int, float) {});
      // dV += (P Z)^T dO,  dK += dS^T Q
      if constexpr (kDv) {
        fence_loads<T>();
        multiply_pb<T, kHead>(dv, s, do_tile);
      }
      fence_loads<T>();
      if constexpr (kDk) multiply_pb<T, kHead>(dk, dp, q_tile);
      sync_block();  // the stage may be overwritten
      if constexpr (X::kStages == 2) {
        stage ^= 1;
      } else {
        if (n >= 0) load_q(n, first_head + g, 0);
        copy_async_commit();
      }
    }
  }
  if constexpr (kDk) {
    if (params.write_dk) {
      store_rows<T, kHead>(dk, X::kKTile, warp_row, control.result<E>(p, kResDK, hk),
                           p.out[kResDK].row, j0 + warp_row, j1, static_cast<int>(p.D),
                           params.vector_out >> kResDK & 1, [&](int, int) { return params.scale; });
    }
  }
  if constexpr (kDv) {
    if (params.write_dv) {
      store_rows<T, kHead>(dv, X::kVTile, warp_row, control.result<E>(p, kResDV, hk),
                           p.out[kResDV].row, j0 + warp_row, j1, static_cast<int>(p.Dv),
                           params.vector_out >> kResDV & 1, [](int, int) { return 1.0f; });
    }
  }
}

template <class T, int kHead, bool kGeneral, bool kDk, bool kDv>
JFT_KERNEL((DkDvTraits<T, kHead, kGeneral>::kThreads),
           (DkDvTraits<T, kHead, kGeneral>::kShape.blocks))
dkdv_kernel(JFT_PARAMS params) {
  dkdv_block<T, kHead, kGeneral, kDk, kDv>(params);
}

}  // namespace jft::cuda
