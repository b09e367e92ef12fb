// dv_j = sum_i p_ij Z_ij do_i and dk_j = scale sum_i ds_ij q_i. One block per (batch element of the
// result, kv head, key tile); walks the query tiles of the G query heads of its group, so GQA needs no
// buffers and no atomics. The products are formed transposed (keys first): their accumulators are the
// A operands of dV and dK as they stand.
#pragma once

#include "../tiles.h"
#include "gradients.h"
#include "rows.h"

namespace jft::cuda {

template <class T_, int kHead>
struct DkDvTraits {
  using T = T_;
  static constexpr TileShape kShape = dkdv_tile(T::kBytes, kHead);
  static constexpr int kBlockK = kShape.rows, kBlockQ = kShape.cols, kStages = kShape.stages;
  static constexpr int kThreads = kShape.threads(), kM = kShape.m();
  static constexpr int kN = kBlockQ / 8, kD = kHead / 8;
  using L = Tile<T, kHead>;
  static_assert(L::kPitch == padded_row_bytes(T::kBytes, kHead));
  static_assert(kRowsMultiple % kBlockQ == 0, "facts are loaded by whole tiles");
  // Shared memory: control, K, V, then per stage Q, dO, then per stage the queries' facts.
  static constexpr u32 kKTile = kControlBytes;
  static constexpr u32 kVTile = kKTile + L::bytes(kBlockK);
  static constexpr u32 kQdoTiles = kVTile + L::bytes(kBlockK);
  static constexpr u32 kStageBytes = 2 * L::bytes(kBlockQ);
  static constexpr u32 kFacts = kQdoTiles + kStages * kStageBytes;
  static constexpr u32 kFactsBytes = kBlockQ * sizeof(RowFacts);
};

// kDk, kDv: which of the two is computed (both, unless their accumulators do not fit together).
template <class T, int kHead, bool kGeneral, bool kDk, bool kDv>
JFT_DEV void dkdv_block(const Params& params) {
  using X = DkDvTraits<T, kHead>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;

  const int tile = static_cast<int>(block_index() % params.k_tiles);
  const i64 kept_head = block_index() / params.k_tiles;
  const i64 kept = kept_head / p.Hkv, hk = kept_head % p.Hkv;
  const int j0 = tile * X::kBlockK;
  const int j1 = min_int(j0 + X::kBlockK, static_cast<int>(p.Sk));
  const Tensor& result = params.write_dk ? p.out[kResDK] : p.out[kResDV];

  float dk[kDk ? X::kM : 1][kDk ? X::kD : 1][4], dv[kDv ? X::kM : 1][kDv ? X::kD : 1][4];
  clear(dk);
  clear(dv);
  i64 b = kept;
  JFT_NO_UNROLL
  for (i64 summed = 0; summed < params.batches_summed; ++summed) {
    if (params.batches_summed > 1) b = batch_of_result(p, result, kept, summed);
    const Positions pos = load_positions(p, b);
    const Range any = visible_queries_any(pos, j0, j1);
    const int row_lo = static_cast<int>(any.begin), row_hi = static_cast<int>(any.end);
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
        const i64 h = hk * p.G + g;
        const int i = walker.pop(
            has_map,
            [&](int n) {
              return map_state(p, params.map, b, h, n * X::kBlockQ,
                               min_int((n + 1) * X::kBlockQ, static_cast<int>(p.Sq)), j0, j1);
            },
            &map_plain);
        if (i >= 0 || g + 1 >= p.G) return i;
        ++g;
        walker.start(first, stop);
      }
    };
    const auto load_q = [&](int n, i64 h, int stage) {
      const u32 at = X::kQdoTiles + stage * X::kStageBytes;
      const int i0 = n * X::kBlockQ;
      load_tile<T, kHead, X::kBlockQ, X::kThreads>(
          at, head_pointer<const E>(p, p.in[kQ], b, h), p.in[kQ].row, i0, row_lo, row_hi,
          static_cast<int>(p.D), params.vector >> kQ & 1);
      load_tile<T, kHead, X::kBlockQ, X::kThreads>(
          at + X::L::bytes(X::kBlockQ), head_pointer<const E>(p, p.in[kDO], b, h), p.in[kDO].row,
          i0, row_lo, row_hi, static_cast<int>(p.Dv), params.vector >> kDO & 1);
      const RowFacts* rows = params.rows + (b * p.Hq + h) * params.rows_pitch + i0;
      for (int r = thread_index(); r < X::kBlockQ; r += X::kThreads) {
        copy_async(X::kFacts + stage * X::kFactsBytes + r * sizeof(RowFacts), rows + r, 16);
      }
    };

    int n = pop(), stage = 0;
    if (n < 0) continue;
    sync_block();  // the tiles of the batch element before are done with
    load_tile<T, kHead, X::kBlockK, X::kThreads>(
        X::kKTile, head_pointer<const E>(p, p.in[kK], b, hk), p.in[kK].row, j0, j0, j1,
        static_cast<int>(p.D), params.vector >> kK & 1);
    load_tile<T, kHead, X::kBlockK, X::kThreads>(
        X::kVTile, head_pointer<const E>(p, p.in[kV], b, hk), p.in[kV].row, j0, j0, j1,
        static_cast<int>(p.Dv), params.vector >> kV & 1);
    load_q(n, hk * p.G + g, 0);
    copy_async_commit();

    JFT_NO_UNROLL
    while (n >= 0) {
      const int i0 = n * X::kBlockQ;
      const i64 h = hk * p.G + g;
      const bool this_plain = map_plain;
      const u32 q_tile = X::kQdoTiles + stage * X::kStageBytes;
      const u32 do_tile = q_tile + X::L::bytes(X::kBlockQ);
      const u32 facts_at = X::kFacts + stage * X::kFactsBytes;
      n = pop();
      if constexpr (X::kStages == 2) {
        if (n >= 0) load_q(n, hk * p.G + g, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      sync_block();
      scrub_dead_queries<T, kHead, X::kBlockQ, X::kThreads>(q_tile, do_tile, facts_at);

      // S^T = K Q^T, dP^T = V dO^T
      float s[X::kM][X::kN][4], dp[X::kM][X::kN][4];
      clear(s);
      clear(dp);
      multiply_abt<T, kHead>(s, X::kKTile, warp_row, q_tile);
      multiply_abt<T, kHead>(dp, X::kVTile, warp_row, do_tile);

      const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));
      const Range all = visible_keys_all(pos, i0, i1);
      bool masked = !(this_plain && j0 >= all.begin && j0 + X::kBlockK <= all.end);
      if constexpr (kGeneral) masked |= i0 + X::kBlockQ > p.Sq;  // a bias is read for such rows
      const Place<true> at(i0, j0 + warp_row);
      u32 bits[X::kM];
      if (masked) {
        u32 seen;
        visibility<true, X::kM, X::kN>(bits, params, pos, b, h, at, this_plain, &seen);
      }
      const LogitMath logit(params, pos, b, h);
      const Dropout dropout(p, b, h);
      // dS^T = P^T (Z dP^T - delta)
      gradient_tile<kGeneral, true, X::kM, X::kN>(
          s, dp, params, logit, dropout, at, bits, masked,
          [&](int, int c, int e) {
            return shared<RowFacts>(facts_at + at.c(c, e) * sizeof(RowFacts));
          },
          [](int, int, int, float) {});
      // dV += (P Z)^T dO,  dK += dS^T Q
      if constexpr (kDv) multiply_pb<T, kHead>(dv, s, do_tile);
      if constexpr (kDk) multiply_pb<T, kHead>(dk, dp, q_tile);
      sync_block();  // the stage may be overwritten
      if constexpr (X::kStages == 2) {
        stage ^= 1;
      } else {
        if (n >= 0) load_q(n, hk * p.G + g, 0);
        copy_async_commit();
      }
    }
  }
  if constexpr (kDk) {
    if (params.write_dk) {
      store_rows<T>(dk, head_pointer<E>(p, p.out[kResDK], b, hk), p.out[kResDK].row, j0 + warp_row,
                    j1, static_cast<int>(p.D), params.vector_out >> kResDK & 1,
                    [&](int, int) { return params.scale; });
    }
  }
  if constexpr (kDv) {
    if (params.write_dv) {
      store_rows<T>(dv, head_pointer<E>(p, p.out[kResDV], b, hk), p.out[kResDV].row, j0 + warp_row,
                    j1, static_cast<int>(p.Dv), params.vector_out >> kResDV & 1,
                    [](int, int) { return 1.0f; });
    }
  }
}

template <class T, int kHead, bool kGeneral, bool kDk, bool kDv>
JFT_KERNEL((DkDvTraits<T, kHead>::kThreads), (DkDvTraits<T, kHead>::kShape.blocks))
dkdv_kernel(JFT_PARAMS params) {
  dkdv_block<T, kHead, kGeneral, kDk, kDv>(params);
}

}  // namespace jft::cuda
