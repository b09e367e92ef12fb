// What a tile of query rows has to do: which keys it walks, and which of them need masks.
#pragma once

#include "hidden.cuh"
#include "params.h"
#include "schedule.cuh"
#include "tiles.h"

namespace jft::hopper {

// One unit of work, written to shared memory by the scheduler thread, read by producer and
// consumers: loop bounds and masks of both sides come from the same numbers.
struct ForwardWork {
  int valid;                 // 0: no more work
  int q0, h, b0, b1;         // first row, query head, batch
  int n_begin, n_end;        // key tiles that some row sees
  int full_begin, full_end;  // key tiles that every (non-empty) row sees in full
  int live_begin,
      live_end;  // keys that some query of the batch element sees; the others may hold NaN
  int q_length;
  RowLimits rows;
};
static_assert(sizeof(ForwardWork) <= kWorkBytes, "raise kWorkBytes");

// Queries from q0 on of head h. Params: shape and positions of a pass that walks key tiles.
template <class Traits, class Params>
__device__ __forceinline__ void fill_work(ForwardWork& w, const Params& p, int b0, int b1, int h,
                                          int q0) {
  constexpr int kKeys = Traits::kKeys, kRows = Traits::kRows;
  w.valid = 1;
  w.q0 = q0;
  w.h = h;
  w.b0 = b0;
  w.b1 = b1;
  const Positions pos = load_positions(p.positions, p.shape, b0, b1);
  const Range any = visible_keys_any(pos, q0, q0 + kRows);
  w.n_begin = static_cast<int>(any.begin) / kKeys;
  w.n_end = any.begin < any.end ? (static_cast<int>(any.end) + kKeys - 1) / kKeys : w.n_begin;
  const int64_t q1 = q0 + kRows < pos.q_length ? q0 + kRows : pos.q_length;
  const Range all = visible_keys_all(pos, q0, q1);
  w.full_begin = (static_cast<int>(all.begin) + kKeys - 1) / kKeys;
  w.full_end = static_cast<int>(all.end) / kKeys;
  const Range live = visible_keys_any(pos, 0, pos.Sq);
  w.live_begin = static_cast<int>(live.begin);
  w.live_end = static_cast<int>(live.end);
  w.q_length = static_cast<int>(pos.q_length);
  w.rows = row_limits(pos);
}

// Tile t of the schedule.
template <class Traits, class Params>
__device__ __forceinline__ void make_work(ForwardWork& w, const Params& p, int t) {
  const Tile tile = decode_tile(p.schedule, t);
  const int b = tile.head / p.shape.Hq, b0 = b / p.shape.B1;
  fill_work<Traits>(w, p, b0, b - b0 * p.shape.B1, tile.head - b * p.shape.Hq,
                    tile.index * Traits::kRows);
  if constexpr (Traits::kGeneral) {  // from the first to the last tile that is not hidden
    const MapRow map(p.hidden, w.b0, w.b1, w.h, tile.index);
    w.n_end = map.previous(w.n_end - 1, w.n_begin) + 1;
    w.n_begin = map.next(w.n_begin, w.n_end);
  }
}

// Key tile j of the general road, as its producer describes it.
template <class Traits, class Params>
__device__ __forceinline__ TileInfo describe_keys(const Params& p, const ForwardWork& w,
                                                  const MapRow& map, int j) {
  const LiveKeys live{w.live_begin, w.live_end, live_words(p.hidden, w.b0, w.b1, w.h / p.shape.G)};
  TileInfo tile{j, 0};
  if (j < w.full_begin || j >= w.full_end) tile.flags |= kTileEdge;
  if (map.mixed(j)) tile.flags |= kTileMixed;
  if (!live.template has_all<Traits::kKeys>(j * Traits::kKeys)) tile.flags |= kTileDead;
  return tile;
}

}  // namespace jft::hopper
