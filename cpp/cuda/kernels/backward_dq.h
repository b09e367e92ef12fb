// dq_i = scale sum_j ds_ij k_j, and the ALiBi slopes' partial sums. One block per (batch element of the
// result, head, query tile); walks the key tiles. No atomics: bitwise the same on every run.
#pragma once

#include "../tiles.h"
#include "gradients.h"
#include "rows.h"

namespace jft::cuda {

template <class T_, int kHead>
struct DqTraits {
  using T = T_;
  static constexpr TileShape kShape = dq_tile(T::kBytes, kHead);
  static constexpr int kBlockQ = kShape.rows, kBlockK = kShape.cols, kStages = kShape.stages;
  static constexpr int kThreads = kShape.threads(), kM = kShape.m();
  static constexpr int kN = kBlockK / 8, kD = kHead / 8;
  using L = Tile<T, kHead>;
  static_assert(L::kPitch == padded_row_bytes(T::kBytes, kHead));
  // Shared memory: control, Q, dO, then per stage K, V.
  static constexpr u32 kSeen = 0;
  static constexpr u32 kQTile = kControlBytes;
  static constexpr u32 kDoTile = kQTile + L::bytes(kBlockQ);
  static constexpr u32 kKvTiles = kDoTile + L::bytes(kBlockQ);
  static constexpr u32 kStageBytes = 2 * L::bytes(kBlockK);
};

template <class T, int kHead, bool kGeneral>
JFT_DEV void dq_block(const Params& params) {
  using X = DqTraits<T, kHead>;
  using E = typename T::Storage;
  const Problem& p = params.p;
  const int warp_row = (thread_index() >> 5) * 16 * X::kM;
  const int lane_row = warp_row + ((thread_index() & 31) >> 2);

  const int tile = params.q_tiles - 1 - static_cast<int>(block_index() % params.q_tiles);
  const i64 kept_head = block_index() / params.q_tiles;
  const i64 kept = kept_head / p.Hq, h = kept_head % p.Hq, hk = h / p.G;
  const int i0 = tile * X::kBlockQ;
  const int i1 = min_int(i0 + X::kBlockQ, static_cast<int>(p.Sq));

  float dq[X::kM][X::kD][4];
  clear(dq);
  i64 b = kept;
  JFT_NO_UNROLL
  for (i64 summed = 0; summed < params.batches_summed; ++summed) {
    if (params.batches_summed > 1) b = batch_of_result(p, p.out[kResDQ], kept, summed);
    const Positions pos = load_positions(p, b);
    const Range any = visible_keys_any(pos, i0, i1), all = visible_keys_all(pos, i0, i1);
    const int key_lo = static_cast<int>(any.begin), key_hi = static_cast<int>(any.end);
    const E* k = head_pointer<const E>(p, p.in[kK], b, hk);
    const E* v = head_pointer<const E>(p, p.in[kV], b, hk);
    const auto load_kv = [&](int n, int stage) {
      const u32 at = X::kKvTiles + stage * X::kStageBytes;
      load_tile<T, kHead, X::kBlockK, X::kThreads>(at, k, p.in[kK].row, n * X::kBlockK, key_lo,
                                                   key_hi, static_cast<int>(p.D),
                                                   params.vector >> kK & 1);
      load_tile<T, kHead, X::kBlockK, X::kThreads>(at + X::L::bytes(X::kBlockK), v, p.in[kV].row,
                                                   n * X::kBlockK, key_lo, key_hi,
                                                   static_cast<int>(p.Dv), params.vector >> kV & 1);
    };
    const bool has_map = params.map.data != nullptr;
    TileWalker walker;
    walker.start(key_lo / X::kBlockK,
                 key_lo < key_hi ? (key_hi + X::kBlockK - 1) / X::kBlockK : key_lo / X::kBlockK);
    const auto state = [&](int n) {
      return map_state(p, params.map, b, h, i0, i1, n * X::kBlockK,
                       min_int((n + 1) * X::kBlockK, static_cast<int>(p.Sk)));
    };

    // The rows' facts in registers; dead rows (and rows past the end) have log_sum = kDeadLogSum.
    RowFacts facts[X::kM][2];
    bool dead = false;
    JFT_UNROLL
    for (int m = 0; m < X::kM; ++m) {
      JFT_UNROLL
      for (int half = 0; half < 2; ++half) {
        facts[m][half] = params.rows[(b * p.Hq + h) * params.rows_pitch + i0 + lane_row + 16 * m +
                                     8 * half];
        dead |= facts[m][half].log_sum >= kDeadLogSum / 2;
      }
    }

    bool map_plain;
    int n = walker.pop(has_map, state, &map_plain), stage = 0;
    if (n < 0) {
      if (params.alibi_parts && thread_index() == 0) {
        params.alibi_parts[(b * p.Hq + h) * params.q_tiles + tile] = 0.0f;
      }
      continue;
    }
    sync_block();  // the tiles of the batch element before are done with
    const E* q = head_pointer<const E>(p, p.in[kQ], b, h);
    const E* d = head_pointer<const E>(p, p.in[kDO], b, h);
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, q, p.in[kQ].row, i0, i0, i1,
                                                 static_cast<int>(p.D), params.vector >> kQ & 1);
    load_tile<T, kHead, X::kBlockQ, X::kThreads>(X::kDoTile, d, p.in[kDO].row, i0, i0, i1,
                                                 static_cast<int>(p.Dv), params.vector >> kDO & 1);
    load_kv(n, 0);
    copy_async_commit();
    // do of a dead row may be NaN, and so would be 0 * (do . v).
    copy_async_wait<0>();
    if (sync_block_or(dead)) {
      const RowFacts* rows = params.rows + (b * p.Hq + h) * params.rows_pitch + i0;
      const auto is_dead = [&](int r) { return rows[r].log_sum >= kDeadLogSum / 2; };
      scrub_rows<T, kHead, X::kBlockQ, X::kThreads>(X::kQTile, is_dead);
      scrub_rows<T, kHead, X::kBlockQ, X::kThreads>(X::kDoTile, is_dead);
    }

    const LogitMath logit(params, pos, b, h);
    const Dropout dropout(p, b, h);
    float alibi = 0.0f;
    JFT_NO_UNROLL
    while (n >= 0) {
      const int j0 = n * X::kBlockK;
      const bool this_plain = map_plain;
      const u32 k_tile = X::kKvTiles + stage * X::kStageBytes;
      const u32 v_tile = k_tile + X::L::bytes(X::kBlockK);
      n = walker.pop(has_map, state, &map_plain);
      if constexpr (X::kStages == 2) {
        if (n >= 0) load_kv(n, stage ^ 1);
        copy_async_commit();
        copy_async_wait<1>();
      } else {
        copy_async_wait<0>();
      }
      if (thread_index() < 4) shared<u32>(X::kSeen + 4 * thread_index()) = 0;
      sync_block();

      // S = Q K^T, dP = dO V^T
      float s[X::kM][X::kN][4], dp[X::kM][X::kN][4];
      clear(s);
      clear(dp);
      multiply_abt<T, kHead>(s, X::kQTile, warp_row, k_tile);
      multiply_abt<T, kHead>(dp, X::kDoTile, warp_row, v_tile);

      const Place<false> at(i0 + warp_row, j0);
      const bool masked = !(this_plain && j0 >= all.begin && j0 + X::kBlockK <= all.end);
      u32 bits[X::kM];
      if (masked) {
        u32 seen;
        visibility<false, X::kM, X::kN>(bits, params, pos, b, h, at, this_plain, &seen);
        if (!this_plain) {
          publish_seen(seen, X::kSeen);
          sync_block();
          scrub_rows<T, kHead, X::kBlockK, X::kThreads>(
              k_tile, [&](int r) { return !column_seen(X::kSeen, r); });
          sync_block();
        }
      }
      // dS = P (Z dP - delta)
      gradient_tile<kGeneral, false, X::kM, X::kN>(
          s, dp, params, logit, dropout, at, bits, masked,
          [&](int m, int, int e) { return facts[m][e >> 1]; },
          [&](int m, int c, int e, float ds) {
            if constexpr (kGeneral) {
              if (params.alibi_parts) {
                alibi = fma_rn(-ds, logit.distance(at.i(m, c, e), at.j(m, c, e)), alibi);
              }
            }
          });
      // dQ += dS K
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
          shared<float>(X::kSeen + 64 + 4 * (thread_index() >> 5)) = alibi;
        }
        sync_block();
        if (thread_index() == 0) {
          float sum = 0.0f;
          for (int w = 0; w < X::kThreads / 32; ++w) sum += shared<float>(X::kSeen + 64 + 4 * w);
          params.alibi_parts[(b * p.Hq + h) * params.q_tiles + tile] = sum;
        }
      }
    }
  }
  store_rows<T>(dq, head_pointer<E>(p, p.out[kResDQ], b, h), p.out[kResDQ].row, i0 + warp_row, i1,
                static_cast<int>(p.D), params.vector_out >> kResDQ & 1,
                [&](int, int) { return params.scale; });
}

template <class T, int kHead, bool kGeneral>
JFT_KERNEL((DqTraits<T, kHead>::kThreads), (DqTraits<T, kHead>::kShape.blocks))
dq_kernel(JFT_PARAMS params) {
  dq_block<T, kHead, kGeneral>(params);
}

}  // namespace jft::cuda
