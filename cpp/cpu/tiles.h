// Tile sizes of the CPU kernels. Measured in docs/tuning-cpu.md.
#pragma once

#include <cstdint>

namespace jft::cpu {

// Logit tiles are kTile queries x kTile keys; one row or column of one fits a 64-bit word of
// visibility bits.
constexpr int kTile = 64;

// Query tiles of one forward task: a key tile that was fetched (and converted) serves all of them.
constexpr int kQueryTiles = 2;

static inline int64_t tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// Row length of a tile of `features` columns in scratch: whole vectors of every instruction set,
// and off the powers of two that would map all 64 rows to a few sets of the L1 cache.
static inline int64_t padded(int64_t features) {
  const int64_t whole = (features + 15) / 16 * 16;
  return whole % 128 == 0 ? whole + 16 : whole;
}

}  // namespace jft::cpu
