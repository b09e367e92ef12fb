// Where the backward's scratch lies, and how large it is.
#pragma once

#include "../../../core/problem.h"
#include "../tiles.h"

namespace jft::hopper {

inline int backward_bucket(const Problem& p) {
  const int64_t dim = p.D > p.Dv ? p.D : p.Dv;
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;  // 256: the kernels of backward_wide.cuh
}

struct BackwardScratch {
  int64_t q_tiles;
  int64_t dq, gauge, delta, semaphore, bytes;  // offsets from the aligned start, and the end

  explicit BackwardScratch(const Problem& p) {
    const int dim = backward_bucket(p), rows = dim == 64 ? BackwardTile<64>::kRows : 64;
    static_assert(BackwardTile<128>::kRows == 64, "rows above");
    q_tiles = (p.Sq + rows - 1) / rows;
    const int64_t padded = p.B * p.Hq * q_tiles * rows;
    dq = 0;
    gauge = dq + (dim <= 128 ? padded * dim * 4 : 0);
    delta = gauge + padded * 8;
    semaphore = delta + padded * 4;
    bytes = semaphore + padded / rows * 4;
  }
};

}  // namespace jft::hopper
