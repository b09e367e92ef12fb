// Backward pass: traits, what a CTA works on, and the producer thread.
#pragma once

#include "../../core/attrs.h"
#include "backward_params.h"
#include "device/fragment.cuh"
#include "device/mbarrier.cuh"
#include "device/sync.cuh"
#include "device/tma.cuh"
#include "hidden.cuh"
#include "pipeline.cuh"
#include "tile_ops.cuh"
#include "tiles.h"

namespace jft::hopper {

template <class T_, int kDim_, Road kRoad, bool kOrdered_>
struct BackwardTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kRoad != Road::kPlain, kBias = kRoad == Road::kBias;
  static constexpr bool kOrdered = kOrdered_;  // deterministic
  // Two loops. The plain one overlaps most and adds dQ by bulk reductions; the rotated one leaves
  // registers for the general road, and its register reductions are complete after a fence, as the
  // ordered additions need.
  static constexpr bool kRotated = kGeneral || kOrdered;
  static constexpr int kRows = BackwardTile<kDim>::kRows, kKeys = BackwardTile<kDim>::kKeys;
  static constexpr int kStages = BackwardTile<kDim>::kStages;
  static constexpr int kConsumers = 2, kThreads = 384;
  static constexpr int kPanels = panels(kDim), kRowPanels = kRows / 64;
  static_assert(kKeys == 64 * kConsumers && kRows * kDim == 2 * 64 * 64,
                "each warpgroup makes 64 x 64 of dQ");

  static constexpr uint32_t kKvPanel = kKeys * 128, kQPanel = kRows * 128;
  static constexpr uint32_t kKvBytes = kKvPanel * kPanels, kQBytes = kQPanel * kPanels;
  static constexpr uint32_t kDsPanel = kKeys * 128,
                            kDsBytes = kDsPanel * kRowPanels;  // [key][64 queries]
  static constexpr uint32_t kGaugeBytes = kRows * 8, kDeltaBytes = kRows * 4;

  static constexpr uint32_t kK = 0, kV = kK + kKvBytes, kQ = kV + kKvBytes;
  static constexpr uint32_t kDO = kQ + kStages * kQBytes, kDs = kDO + kStages * kQBytes;
  static constexpr uint32_t kDq = kDs + 2 * kDsBytes,
                            kDqBytes = kRotated ? 0 : 64 * 64 * 4;  // per warpgroup
  static constexpr uint32_t kGauge = kDq + kConsumers * kDqBytes,
                            kDelta = kGauge + kStages * kGaugeBytes;
  static constexpr uint32_t kKvFull = kDelta + kStages * kDeltaBytes;
  static constexpr uint32_t kQFull = kKvFull + 8, kQEmpty = kQFull + 8 * kStages;
  static constexpr uint32_t kDOFull = kQEmpty + 8 * kStages, kDOEmpty = kDOFull + 8 * kStages;
  static constexpr uint32_t kInfo = kDOEmpty + 8 * kStages;              // a TileInfo per Q stage
  static constexpr uint32_t kWork = kInfo + kStages * sizeof(TileInfo);  // BackwardWork
  static constexpr uint32_t kSharedBytes = kWork + kWorkBytes + 1024;    // 1024: alignment by hand
  static_assert(kSharedBytes <= kSharedLimit, "backward tile does not fit shared memory");

  // 24 + 2 x 240 = 3 x 168, what 384 threads get at launch.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kGroupBarrier = 1, kPairBarrier = 3;  // named barriers: a warpgroup, both
};

// What a CTA works on (the grid has one CTA per tile): made by one thread, read from shared memory.
template <class Traits>
struct BackwardWork {
  int b0, b1, kv_head, k0;
  int n, m_begin, m_end;  // key tile; query tiles that see some key of it
  int m_start;            // the walk starts here and wraps inside [m_begin, m_end)
  int total;              // steps of the walk, over the heads of the group
  int q_length;
  int live_begin, live_end;  // keys that some query sees
  int row_begin, row_end;    // queries that see some key; others may hold NaN
  RowLimits rows;

  __device__ __forceinline__ void make(const BackwardParams& p) {
    const Tile tile = decode_tile(p.schedule, blockIdx.x);
    const int heads = p.shape.Hq / p.shape.G;
    const int b = tile.head / heads;
    kv_head = tile.head - b * heads;
    b0 = b / p.shape.B1;
    b1 = b - b0 * p.shape.B1;
    n = tile.index;
    k0 = n * Traits::kKeys;
    const Positions pos = load_positions(p.positions, p.shape, b0, b1);
    const Range queries = visible_queries_any(pos, k0, k0 + Traits::kKeys);
    m_begin = static_cast<int>(queries.begin) / Traits::kRows;
    m_end = queries.begin < queries.end
                ? (static_cast<int>(queries.end) + Traits::kRows - 1) / Traits::kRows
                : m_begin;
    const Range keys = visible_keys_any(pos, 0, pos.Sq);
    live_begin = static_cast<int>(keys.begin);
    live_end = static_cast<int>(keys.end);
    const Range all = visible_queries_any(pos, 0, pos.Sk);
    row_begin = static_cast<int>(all.begin);
    row_end = static_cast<int>(all.end);
    rows = row_limits(pos);
    q_length = static_cast<int>(pos.q_length);
    m_start = m_begin;
    if (p.rotate) m_start = static_cast<int>(int64_t(n) * p.q_tiles / p.schedule.tiles);
    total = (m_end - m_begin) * p.shape.G;
    if constexpr (Traits::kGeneral) {
      total = 0;
      for (int g = 0; g < p.shape.G; ++g)
        total += MapRow(p.hidden, b0, b1, kv_head * p.shape.G + g, n).count(m_begin, m_end);
    }
  }

  __device__ __forceinline__ LiveKeys live(const BackwardParams& p) const {
    return {live_begin, live_end,
            Traits::kGeneral ? live_words(p.hidden, b0, b1, kv_head) : nullptr};
  }

  __device__ __forceinline__ int next(int m) const { return m + 1 == m_end ? m_begin : m + 1; }

  // Deterministic order of the additions to query tile m: key tiles in descending order, with
  // rotation (full masks) those that start at or before m first. A CTA reaches m before its
  // successors do, so nobody waits long: causal walks start at their diagonals, rotated ones at
  // staggered tiles.
  __device__ __forceinline__ int rank(const BackwardParams& p, int m) const {
    if (p.rotate) {
      const int last = static_cast<int>((int64_t(m + 1) * p.schedule.tiles - 1) / p.q_tiles);
      return n <= last ? last - n : p.schedule.tiles + last - n;
    }
    const int i = min(m * Traits::kRows + Traits::kRows, q_length) - 1;
    return (rows.end(i) + Traits::kKeys - 1) / Traits::kKeys - 1 - n;
  }
};

// ---- Producer: one thread ----

template <class Traits>
__device__ __forceinline__ void backward_producer(const BackwardParams& p,
                                                  const BackwardWork<Traits>& w, TileInfo* infos,
                                                  uint32_t smem) {
  tma_prefetch_map(&p.k.map);
  tma_prefetch_map(&p.v.map);
  tma_prefetch_map(&p.q.map);
  tma_prefetch_map(&p.d_o.map);
  const int b0 = w.b0, b1 = w.b1, kv_head = w.kv_head, k0 = w.k0, m_begin = w.m_begin,
            m_end = w.m_end;
  if (w.total == 0) return;
  const uint32_t kv_full = smem + Traits::kKvFull;
  mbarrier_arrive_expect(kv_full, 2 * Traits::kKvBytes);
  load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kK, p.k, kv_full, k0, kv_head, b0,
                                               b1);

  Ring<Traits::kStages> q(smem + Traits::kQFull, smem + Traits::kQEmpty);
  Ring<Traits::kStages> d_o(smem + Traits::kDOFull, smem + Traits::kDOEmpty);
  bool first = true;
  for (int g = 0; g < p.shape.G; ++g) {
    const int h = kv_head * p.shape.G + g;
    const int64_t head = int64_t(b0 * p.shape.B1 + b1) * p.shape.Hq + h;
    const MapRow map(p.hidden, b0, b1, h, w.n);
    const auto visible = [&](int x) { return Traits::kGeneral ? map.next(x, m_end) : x; };
    for (int x = visible(m_begin); x < m_end; x = visible(x + 1)) {
      int m = x + w.m_start - m_begin;
      if (m >= m_end) m -= m_end - m_begin;
      const int64_t row = (head * p.q_tiles + m) * Traits::kRows;  // in the padded per-row scratch
      const TileInfo tile{m, g * kTileHead + (Traits::kGeneral && map.mixed(m) ? kTileMixed : 0)};
      q.wait_empty();
      if (Traits::kGeneral) infos[q.stage] = tile;
      q.expect(Traits::kQBytes + Traits::kGaugeBytes);
      load_tile<Traits::kPanels, Traits::kQPanel>(smem + Traits::kQ + q.stage * Traits::kQBytes,
                                                  p.q, q.full_barrier(), m * Traits::kRows, h, b0,
                                                  b1);
      bulk_load(smem + Traits::kGauge + q.stage * Traits::kGaugeBytes, p.gauge + 2 * row,
                Traits::kGaugeBytes, q.full_barrier());
      q.advance();
      if (first) {  // after the first q: the first product needs only k and q
        load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kV, p.v, kv_full, k0, kv_head,
                                                     b0, b1);
        first = false;
      }
      d_o.wait_empty();
      d_o.expect(Traits::kQBytes + Traits::kDeltaBytes);
      load_tile<Traits::kPanels, Traits::kQPanel>(smem + Traits::kDO + d_o.stage * Traits::kQBytes,
                                                  p.d_o, d_o.full_barrier(), m * Traits::kRows, h,
                                                  b0, b1);
      bulk_load(smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes, p.delta + row,
                Traits::kDeltaBytes, d_o.full_barrier());
      d_o.advance();
    }
  }
}

}  // namespace jft::hopper
