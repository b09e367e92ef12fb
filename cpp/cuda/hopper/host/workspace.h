// Where the backward's scratch lies, and how large it is.
#pragma once

#include "../tiles.h"
#include "hidden.h"

namespace jft::hopper {

inline int backward_bucket(const Problem& p) {
  const int64_t dim = p.D > p.Dv ? p.D : p.Dv;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;  // 256: the kernels of backward_wide.cuh
}

// Calls `visit` with the row of the tile table that the forward takes.
template <class Visit>
auto with_forward_tile(const Problem& p, Visit visit) {
  const int64_t dim = p.D > p.Dv ? p.D : p.Dv;
  // A bias needs registers that three warpgroups do not have.
  if (dim <= 64 && (p.Sq <= kShortRows || p.has(kBias))) return visit(ForwardTile64Short{});
  if (dim <= 64) return visit(ForwardTile64{});
  if (dim <= 96) return visit(ForwardTile96{});
  if (dim <= 128) return visit(ForwardTile128{});
  if (dim <= 192) return visit(ForwardTile192{});
  return visit(ForwardTile256{});
}

template <class Tile>
constexpr HiddenSide forward_side(Tile) {
  return {false, 64 * Tile::kConsumers, Tile::kKeys};
}

struct ForwardScratch {
  HiddenScratch hidden;  // behind the tile counter
  explicit ForwardScratch(const Problem& p)
      : hidden(p, 128, {with_forward_tile(p, [](auto tile) { return forward_side(tile); })}) {}
};

// The kernels of a backward: one, or dk with dv and dq apart.
constexpr HiddenSide kKeySide64{true, BackwardTile<64>::kKeys, BackwardTile<64>::kRows};
constexpr HiddenSide kKeySide128{true, BackwardTile<128>::kKeys, BackwardTile<128>::kRows};
constexpr HiddenSide kWideKeySide{true, WideTile::kKeys, WideTile::kRows};
constexpr HiddenSide kWideQuerySide{false, WideTile::kQueryRows, WideTile::kKeys};
constexpr HiddenSide bias_side(int dim) { return {false, kBiasRows, bias_keys(dim)}; }
static_assert(WideTile::kQueryRows == kBiasRows, "dq and dbias beyond head size 128 share a side");

struct BackwardScratch {
  int64_t q_tiles, rows;
  int64_t dq, gauge, delta, semaphore;  // offsets from the aligned start
  HiddenScratch hidden;                 // ends the scratch

  explicit BackwardScratch(const Problem& p) : hidden(p, 0, {}) {
    const int dim = backward_bucket(p);
    rows = dim == 64 ? BackwardTile<64>::kRows : 64;
    static_assert(BackwardTile<128>::kRows == 64, "rows above");
    q_tiles = (p.Sq + rows - 1) / rows;
    const int64_t padded = p.B * p.Hq * q_tiles * rows;
    dq = 0;
    gauge = dq + (dim <= 128 ? padded * dim * 4 : 0);
    delta = gauge + padded * 8;
    semaphore = delta + padded * 4;
    const int64_t end = semaphore + padded / rows * 4;
    const HiddenSide keys = dim == 64 ? kKeySide64 : dim == 128 ? kKeySide128 : kWideKeySide;
    if (dim > 128 || (p.attrs.grads & kGradBias))
      hidden = HiddenScratch(p, end, {keys, bias_side(dim)});
    else
      hidden = HiddenScratch(p, end, {keys});
  }
};

}  // namespace jft::hopper
