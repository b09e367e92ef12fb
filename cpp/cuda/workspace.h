// Scratch of a call: what lies where in the workspace result. The lowering asks for the bytes
// through module.cc (`workspace_bytes`), the handler lays them out with the same function.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "tiles.h"

namespace jft::cuda {

struct WorkspaceSizes {
  bool backward = false;
  bool ids = false, mask = false;  // segment ids, bool mask
  bool dbias = false, dalibi = false;
  int element_bytes = 2, head = 64;  // head bucket
  int64_t B = 0, Sq = 0, Sk = 0, Hq = 0;
};

struct Workspace {
  int64_t map = 0, rows = 0, alibi_parts = 0, bias_parts = 0;  // offsets
  int64_t bias_part_bytes = 0;
  int64_t bytes = 0;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Blocks that keep a large GPU busy; partial sums of dbias are split until there are that many.
constexpr int64_t kBusyBlocks = 512;
constexpr int64_t kWorkspaceAlign = 256;

inline Workspace workspace_layout(const WorkspaceSizes& s) {
  Workspace w;
  const auto take = [&w](int64_t bytes) {
    const int64_t at = w.bytes;
    w.bytes += round_up(bytes, kWorkspaceAlign);
    return at;
  };
  // One byte per 64 x 64 logits; ids alone are the same for all heads.
  if (s.ids || s.mask) {
    w.map = take(s.B * (s.mask ? s.Hq : 1) * ceil_div(s.Sq, kCell) * ceil_div(s.Sk, kCell));
  }
  if (!s.backward) return w;
  const TileShape dq = dq_tile(s.element_bytes, s.head, /*general=*/true);
  w.rows =
      take(s.B * s.Hq * round_up(s.Sq, kRowsMultiple) * static_cast<int64_t>(sizeof(RowFacts)));
  if (s.dalibi) w.alibi_parts = take(s.B * s.Hq * ceil_div(s.Sq, dq.rows) * 4);
  if (s.dbias) {
    // splits * tiles of dbias <= kBusyBlocks, and a split has at least one tile of logits to sum.
    const int64_t tiles = s.B * s.Hq * ceil_div(s.Sq, dq.rows) * ceil_div(s.Sk, dq.cols);
    w.bias_part_bytes = std::min(kBusyBlocks, tiles) * dq.rows * dq.cols * 4;
    w.bias_parts = take(w.bias_part_bytes);
  }
  return w;
}

}  // namespace jft::cuda
