// What a bool mask and segment ids hide, as the kernels use it: which tiles are walked, and which
// elements of a mixed tile are visible.
#pragma once

#include "params.h"

namespace jft::hopper {

// How the producer describes a tile to the consumers of the general road (it alone looks at the
// map, so that both sides walk alike).
struct TileInfo {
  int index;  // of the walked tile
  int flags;
};
enum TileFlag : int {
  kTileEdge = 1,   // causal, window or lengths cut through it
  kTileMixed = 2,  // mask or ids may hide a part of it
  kTileDead = 4,   // it holds keys that no query sees
  kTileHead = 8,   // flags / kTileHead: query head inside the group (dk, dv)
};

// The map's words of one tile of lines.
struct MapRow {
  const uint2* words;  // nullptr: every tile is visible
  int mixed_always;

  __device__ __forceinline__ MapRow(const Hidden& hidden, int b0, int b1, int h, int tile)
      : words(hidden.present && hidden.map.data ? hidden.map.at(b0, b1, h) + tile * hidden.map.row
                                                : nullptr),
        mixed_always(hidden.present) {}

  // First visible tile from j on, `end` if there is none before it.
  __device__ __forceinline__ int next(int j, int end) const {
    if (words == nullptr) return j;
    while (j < end) {
      const uint32_t left = words[j >> 5].x >> (j & 31);
      if (left != 0) return min(j + __ffs(static_cast<int>(left)) - 1, end);
      j = (j | 31) + 1;
    }
    return end;
  }
  // Last visible tile up to j, begin - 1 if there is none from `begin` on.
  __device__ __forceinline__ int previous(int j, int begin) const {
    if (words == nullptr) return j;
    while (j >= begin) {
      const uint32_t left = words[j >> 5].x << (31 - (j & 31));
      if (left != 0) return max(j - __clz(static_cast<int>(left)), begin - 1);
      j = (j & ~31) - 1;
    }
    return begin - 1;
  }
  // Visible tiles in [begin, end).
  __device__ __forceinline__ int count(int begin, int end) const {
    if (words == nullptr) return end - begin;
    int n = 0;
    for (int j = next(begin, end); j < end; j = next(j + 1, end)) ++n;
    return n;
  }
  __device__ __forceinline__ bool mixed(int j) const {
    return words ? (words[j >> 5].y >> (j & 31)) & 1 : mixed_always;
  }
};

// Keys that some query of the batch element (and the group of heads) sees. The others may hold NaN.
struct LiveKeys {
  int begin, end;         // as far as positions tell
  const uint32_t* words;  // nullptr: positions tell all

  __device__ __forceinline__ bool has(int j) const {
    return j >= begin && j < end && (words == nullptr || (words[j >> 5] >> (j & 31) & 1));
  }
  // All of [first, first + kKeys), by whole words: may say no of a tile that is alive.
  template <int kKeys>
  __device__ __forceinline__ bool has_all(int first) const {
    if (first < begin || first + kKeys > end) return false;
    if (words == nullptr) return true;
    uint32_t alive = 0xffffffffu;
    for (int n = first >> 5; n <= (first + kKeys - 1) >> 5; ++n) alive &= words[n];
    return alive == 0xffffffffu;
  }
};

__device__ __forceinline__ const uint32_t* live_words(const Hidden& hidden, int b0, int b1,
                                                      int kv_head) {
  return hidden.present ? hidden.live.at(b0, b1, kv_head) : nullptr;
}

// Bits of this thread's two lines in a tile of columns.
__device__ __forceinline__ void load_visible(uint32_t (&visible)[2], const Hidden& hidden, int b0,
                                             int b1, int h, const int (&line)[2], int lines,
                                             int tile) {
  const uint32_t* from =
      hidden.bits.at(b0, b1, h) + int64_t(tile) * hidden.column_words + (threadIdx.x & 3);
#pragma unroll
  for (int r = 0; r < 2; ++r) visible[r] = from[min(line[r], lines - 1) * hidden.bits.row];
}

template <int kAcc>
__device__ __forceinline__ void hide_masked(float (&s)[kAcc], const uint32_t (&visible)[2]) {
#pragma unroll
  for (int i = 0; i < kAcc; ++i)
    if (!(visible[i >> 1 & 1] >> (2 * (i / 4) + (i & 1)) & 1)) s[i] = -INFINITY;
}

// Elements whose line and column lie in different segments; `first`: first column of the tile.
template <int kAcc>
__device__ __forceinline__ void hide_other_segments(float (&s)[kAcc], const Hidden& hidden, int b0,
                                                    int b1, const int (&line)[2], int lines,
                                                    int first, int columns) {
  const int32_t* of_lines = hidden.line_ids.at(b0, b1);
  const int32_t* of_columns = hidden.column_ids.at(b0, b1);
  const int id0 = of_lines[min(line[0], lines - 1)], id1 = of_lines[min(line[1], lines - 1)];
  first += 2 * (threadIdx.x & 3);
#pragma unroll
  for (int g = 0; g < kAcc / 4; ++g)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int id = of_columns[min(first + 8 * g + c, columns - 1)];
      if (id != id0) s[4 * g + c] = -INFINITY;
      if (id != id1) s[4 * g + 2 + c] = -INFINITY;
    }
}

}  // namespace jft::hopper
