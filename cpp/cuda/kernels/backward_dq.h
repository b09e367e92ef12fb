// dq_i = scale sum_j ds_ij k_j, and the ALiBi slopes' partial sums. One block per (batch element of
// the result, head, query tile); walks the key tiles. No atomics: bitwise the same on every run.
#pragma once

#include "../tiles.h"
#include "gradients.h"
#include "rows.h"

namespace jft::cuda {

template <class T_, int kHead, bool kGeneral>
struct DqTraits {
  using T = T_;
  static constexpr TileShape kShape = dq_tile(T::kBytes, kHead, kGeneral);
  static constexpr int kBlockQ = kShape.rows, kBlockK = kShape.cols, kStages = kShape.stages;
  static constexpr int kWarps = kShape.warps, kThreads = kShape.threads(), kM = kShape.m();
  static constexpr int kN = kBlockK / 8, kD = kHead / 8;
  using L = Tile<T, kHead>;
  static_assert(L::kPitch == padded_row_bytes(T::kBytes, kHead));
  // Shared memory: control, Q, dO, then per stage K, V, then the rows' facts.
  static constexpr u32 kControl = 0, kSeen = kSeenBytes;
  static constexpr u32 kQTile = kControlBytes;
  static constexpr u32 kAlibi = kSeen;  // a word per warp, after the loop
  static constexpr u32 kDoTile = kQTile + L::bytes(kBlockQ);
  static constexpr u32 kKvTiles = kDoTile + L::bytes(kBlockQ);
  static constexpr u32 kTileBytes = L::bytes(kBlockK), kStageBytes = 2 * kTileBytes;
  static constexpr u32 kFacts = kKvTiles + kStages * kStageBytes;
};

template <class T, int kHead, bool kGeneral>
JFT_DEV void dq_block(const Params& params) {
  using X = DqTraits<T, kHead, kGeneral>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;

  const int tile =
      params.q_tiles - 1 - static_cast<int>(static_cast<u32>(block_index()) % params.q_tiles);
  const u32 kept_head = static_cast<u32>(block_index()) / params.q_tiles;
  const u32 heads = static_cast<u32>(p.Hq);
  const int h = static_cast<int>(kept_head % heads), hk = h / static_cast<int>(p.G);
  const int i0 = tile * X::kBlockQ;
  const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));

  float dq[X::kM][X::kD][4];
  clear(dq);
  const Control& control = shared<Control>(X::kControl);
  JFT_NO_UNROLL
  for (i64 summed = 0; summed < params.batches_summed; ++summed) {
    i64 b = kept_head / heads;
    if (params.batches_summed > 1) b = batch_of_result(p, p.out[kResDQ], b, summed);
    share_control(X::kControl, params, b, i0, i1);
    const auto load_kv = [&](int n, int stage) {
      const u32 at = X::kKvTiles + stage * X::kStageBytes;
      load_tile<T, kHead, X::kBlockK, X::kThreads>(
          at, control.operand<const E>(p, kK, hk), p.in[kK].row, n * X::kBlockK, control.any.begin,
          control.any.end, static_cast<int>(p.D), params.vector >> kK & 1);
      load_tile<T, kHead, X::kBlockK, X::kThreads>(
          at + X::kTileBytes, control.operand<const E>(p, kV, hk), p.in[kV].row, n * X::kBlockK,
          control.any.begin, control.any.end, static_cast<int>(p.Dv), params.vector >> kV & 1);
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
    int n = walker.pop(has_map, state, &map_plain), stage = 0;
    if (n < 0) {
      if (params.alibi_parts && thread_index() == 0) {
        params.alibi_parts[(control.b * p.Hq + h) * params.q_tiles + tile] = 0.0f;
      }
      continue;
    }
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, control.operand<const E>(p, kQ, h),
                                                 p.in[kQ].row, i0, i0, i1, static_cast<int>(p.D),
                                                 params.vector >> kQ & 1);
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kDoTile, control.operand<const E>(p, kDO, h),
                                                 p.in[kDO].row, i0, i0, i1, static_cast<int>(p.Dv),
                                                 params.vector >> kDO & 1);
    load_kv(n, 0);
    const RowFacts* rows = params.rows + (control.b * p.Hq + h) * params.rows_pitch + i0;
    for (int r = thread_index(); r < X::kBlockQ; r += X::kThreads) {
      copy_async(X::kFacts + r * sizeof(RowFacts), rows + r, 16);
    }
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    // do of a dead row may be NaN, and so would be 0 * (do . v).
    scrub_dead_queries<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, X::kDoTile, X::kFacts);

    float alibi = 0.0f;
    JFT_NO_UNROLL
    while (n >= 0) {
      const int j0 = n * X::kBlockK;
      const bool this_plain = map_plain;
      const u32 k_tile = X::kKvTiles + stage * X::kStageBytes;
      const u32 v_tile = k_tile + X::kTileBytes;
      n = walker.pop(has_map, state, &map_plain);
      if constexpr (X::kStages == 2) {
        if (n >= 0) load_kv(n, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      // Settled while no logits occupy registers.
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
      sync_block();

      // S = Q K^T, dP = dO V^T
      float s[X::kM][X::kN][4], dp[X::kM][X::kN][4];
      clear(s);
      clear(dp);
      multiply_abt<T, kHead>(s, X::kQTile, warp_row, k_tile);
      multiply_abt<T, kHead>(dp, X::kDoTile, warp_row, v_tile);

      if (!this_plain) {
        sync_block();  // S is formed: hidden rows of K may be zeroed for dS K
        scrub_rows<T, kHead, X::kBlockK, X::kThreads>(
            k_tile, [&](int r) { return !column_seen<X::kWarps>(X::kSeen, r); });
        sync_block();
      }
      // dS = P (Z dP - delta)
      const LogitMath logit(params, control, h);
      gradient_tile<kGeneral, false, X::kM, X::kN>(
          s, dp, params, logit, at, bits, masked, keep, dropped,
          [&](int m, int, int e) {
            return shared<RowFacts>(X::kFacts + (warp_row + at.r(m, e)) * sizeof(RowFacts));
          },
          [&](int m, int c, int e, float ds) {
            if constexpr (kGeneral) {
              if (params.alibi_parts) {
                alibi = fma_rn(-ds, logit.distance(at.i(m, c, e), at.j(m, c, e)), alibi);
              }
            }
          });
      // dQ += dS K
      fence_loads<T>();
      multiply_pb<T, kHead>(dq, dp, k_tile);
      sync_block();  // the stage may be overwritten
      if constexpr (X::kStages == 2) {
        stage ^= 1;
      } else {
        if (n >= 0) load_kv(n, 0);
        copy_async_commit();
      }
    }
    if constexpr (kGeneral) {
      if (params.alibi_parts) {
        JFT_UNROLL
        for (int mask = 16; mask > 0; mask /= 2) alibi += shuffle_xor(alibi, mask);
        if ((thread_index() & 31) == 0) {
          shared<float>(X::kAlibi + 4 * (thread_index() >> 5)) = alibi;
        }
        sync_block();
        if (thread_index() == 0) {
          float sum = 0.0f;
          for (int w = 0; w < X::kThreads / 32; ++w) sum += shared<float>(X::kAlibi + 4 * w);
          params.alibi_parts[(control.b * p.Hq + h) * params.q_tiles + tile] = sum;
        }
      }
    }
  }
  store_rows<T, kHead>(dq, X::kQTile, warp_row, control.result<E>(p, kResDQ, h), p.out[kResDQ].row,
                       i0 + warp_row, i1, static_cast<int>(p.D), params.vector_out >> kResDQ & 1,
                       [&](int, int) { return params.scale; });
}

template <class T, int kHead, bool kGeneral>
JFT_KERNEL((DqTraits<T, kHead, kGeneral>::kThreads), (DqTraits<T, kHead, kGeneral>::kShape.blocks))
dq_kernel(JFT_PARAMS params) {
  dq_block<T, kHead, kGeneral>(params);
}

}  // namespace jft::cuda
