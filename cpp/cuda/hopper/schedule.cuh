// Which tile a CTA works on next. One order for static and dynamic distribution.
#pragma once

#include "params.h"

namespace jft::hopper {

struct Schedule {
  int tiles;          // tiles of one head: query tiles (forward), key tiles (backward)
  int heads;          // B0 * B1 * (heads of the walk)
  int total;          // tiles * heads
  int section_heads;  // heads whose operands stay in L2 together; inside a section the longest
                      // tiles first
  int longest_first;  // 0: head by head; 1: last tile first (forward); 2: first tile first
                      // (backward)
  int* counter;       // dynamic: tiles handed out beyond the first wave; nullptr: static stride
};

struct Tile {
  int index, head;  // head counts over (b0, b1, h)
};

__device__ __forceinline__ Tile decode_tile(const Schedule& s, int t) {
  Tile tile;
  if (s.longest_first == 0) {
    tile.head = t / s.tiles;
    tile.index = t - tile.head * s.tiles;
    return tile;
  }
  const int per_section = s.section_heads * s.tiles;
  const int section = t / per_section, rest = t - section * per_section;
  const int first = section * s.section_heads;
  const int here = min(s.section_heads, s.heads - first);
  const int step = rest / here;
  tile.head = first + rest - step * here;
  tile.index = s.longest_first == 1 ? s.tiles - 1 - step : step;
  return tile;
}

__device__ __forceinline__ int next_tile(const Schedule& s, int t) {
  return s.counter ? static_cast<int>(gridDim.x) + atomicAdd(s.counter, 1)
                   : t + static_cast<int>(gridDim.x);
}

}  // namespace jft::hopper
