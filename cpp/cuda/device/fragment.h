// Tiles in shared memory and their fragments in registers.
//
// A tile is [rows][kHeadDim]. Rows are made of 16-byte chunks; where a row has a multiple of 8
// chunks they are permuted by chunk ^ (row % 8), else rows are padded by one chunk. Either way
// eight consecutive rows of one chunk column lie in eight different bank groups: ldmatrix, cp.async
// and the scalar loads of TF32 are free of conflicts.
#pragma once

#include "element.h"

namespace jft::cuda {

template <class T, int kHeadDim>
struct Tile {
  static constexpr int kChunks = kHeadDim * T::kBytes / 16;
  static constexpr bool kSwizzle = kChunks % 8 == 0;
  static constexpr int kPitch = kHeadDim * T::kBytes + (kSwizzle ? 0 : 16);  // bytes
  static constexpr int kPerChunk = 16 / T::kBytes;
  static constexpr int kSteps = kHeadDim / T::kStep;
  static_assert(kHeadDim * T::kBytes % 32 == 0, "whole k-steps");

  static constexpr int bytes(int rows) { return rows * kPitch; }

  JFT_DEV static u32 chunk(u32 base, int row, int c) {
    return base + row * kPitch + ((kSwizzle ? (c ^ (row & 7)) : c) << 4);
  }
  JFT_DEV static u32 element(u32 base, int row, int col) {
    return chunk(base, row, col / kPerChunk) + (col % kPerChunk) * T::kBytes;
  }
  // Address of chunk `2 * step + (0 or 1)` given the lane's address of chunk (0 or 1) of its row:
  // tile bases are multiples of 128 bytes, so the permutation is an xor of the low 7 bits.
  JFT_DEV static u32 at_step(u32 lane_base, int step) {
    const int bytes = step * 32;
    if constexpr (kSwizzle) return (lane_base ^ (bytes & 127)) + (bytes & ~127);
    return lane_base + bytes;
  }
};

// Lane addresses for ldmatrix.x4; matrices m0..m3 are addressed by lanes 0-7, 8-15, 16-23, 24-31.
template <class L>
struct LaneAddress {
  // A from [m][k] (and B from [k][n] transposed): m0, m1 = rows 0-7, 8-15 of chunk 0; m2, m3 of
  // chunk 1.
  JFT_DEV static u32 rows_first(u32 tile, int row) {
    const int lane = thread_index() & 31;
    return L::chunk(tile, row + (lane & 15), lane >> 4);
  }
  // B from [n][k] (and A from [k][m] transposed): m0, m1 = chunks 0, 1 of rows 0-7; m2, m3 of rows
  // 8-15.
  JFT_DEV static u32 chunks_first(u32 tile, int row) {
    const int lane = thread_index() & 31;
    return L::chunk(tile, row + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  }
};

// TF32 reads B word by word; ptxas would read whole tiles ahead of the product and spill. Loads do
// not cross this.
template <class T>
JFT_DEV void fence_loads() {
  if constexpr (T::kBytes == 4) sync_warp();
}

// c[kM][kN] += A B^T over the head dimension. A: 16 * kM rows from row `a_row` of tile a; B: 8 * kN
// rows of tile b. Both are K-major.
template <class T, int kHeadDim, int kM, int kN>
JFT_DEV void multiply_abt(float (&c)[kM][kN][4], u32 a, int a_row, u32 b) {
  using L = Tile<T, kHeadDim>;
  static_assert(kN % 2 == 0, "B fragments come in pairs");
  const u32 a_lane = LaneAddress<L>::rows_first(a, a_row);
  const u32 b_lane = LaneAddress<L>::chunks_first(b, 0);
  JFT_UNROLL_BY(2)  // all of it lets ptxas load so far ahead that it spills
  for (int step = 0; step < L::kSteps; ++step) {
    FragmentA fa[kM];
    JFT_UNROLL
    for (int m = 0; m < kM; ++m) {
      ldmatrix_x4(fa[m].r, L::at_step(a_lane, step) + m * 16 * L::kPitch);
    }
    JFT_UNROLL
    for (int n = 0; n < kN; n += 2) {
      FragmentB fb;
      ldmatrix_x4(fb.r, L::at_step(b_lane, step) + n * 8 * L::kPitch);
      JFT_UNROLL
      for (int m = 0; m < kM; ++m) {
        T::mma(c[m][n], fa[m], fb.r[0], fb.r[1]);
        T::mma(c[m][n + 1], fa[m], fb.r[2], fb.r[3]);
      }
    }
  }
}

// A product's result tile as the A operand of the next product. 16-bit types: two neighbouring
// n-blocks make one k-step. TF32: an n-block holds columns 2t, 2t+1 where A wants k = t, t+4, so
// the contraction index is permuted (k = t is column 2t, k = t + 4 is column 2t + 1); load_b_rows
// applies the same permutation to the rows of B.
template <class T, int kN>
JFT_DEV FragmentA accumulators_as_a(const float (&c)[kN][4], int step) {
  FragmentA a;
  if constexpr (T::kBytes == 2) {
    const float (&lo)[4] = c[2 * step];
    const float (&hi)[4] = c[2 * step + 1];
    a.r[0] = T::pack(lo[0], lo[1]);
    a.r[1] = T::pack(lo[2], lo[3]);
    a.r[2] = T::pack(hi[0], hi[1]);
    a.r[3] = T::pack(hi[2], hi[3]);
  } else {
    const float (&x)[4] = c[step];
    a.r[0] = float_bits(x[0]);
    a.r[1] = float_bits(x[2]);
    a.r[2] = float_bits(x[1]);
    a.r[3] = float_bits(x[3]);
  }
  return a;
}

// c[kM][kD] += A B, A = `p` (16 * kM rows, kN n-blocks), B = the tile's rows (8 * kN of them), kD
// n-blocks of 8 features from feature 0 on.
template <class T, int kHeadDim, int kM, int kN, int kD>
JFT_DEV void multiply_pb(float (&c)[kM][kD][4], const float (&p)[kM][kN][4], u32 b) {
  using L = Tile<T, kHeadDim>;
  constexpr int kSteps = kN * 8 / T::kStep;
  if constexpr (T::kBytes == 2) {
    const u32 b_lane = LaneAddress<L>::rows_first(b, 0);
    JFT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      FragmentA fa[kM];
      JFT_UNROLL
      for (int m = 0; m < kM; ++m) fa[m] = accumulators_as_a<T>(p[m], step);
      JFT_UNROLL
      for (int d = 0; d < kD; d += 2) {  // two n-blocks = 16 features = 2 chunks
        FragmentB fb;
        ldmatrix_x4_trans(fb.r, L::at_step(b_lane, d / 2) + step * 16 * L::kPitch);
        JFT_UNROLL
        for (int m = 0; m < kM; ++m) {
          T::mma(c[m][d], fa[m], fb.r[0], fb.r[1]);
          T::mma(c[m][d + 1], fa[m], fb.r[2], fb.r[3]);
        }
      }
    }
  } else {
    const int lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
    const u32 even = L::element(b, 2 * t, g), odd = L::element(b, 2 * t + 1, g);
    JFT_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      FragmentA fa[kM];
      JFT_UNROLL
      for (int m = 0; m < kM; ++m) fa[m] = accumulators_as_a<T>(p[m], step);
      JFT_UNROLL
      for (int d = 0; d < kD; ++d) {  // 8 features of 4 bytes = 2 chunks
        const u32 b0 = load_word(L::at_step(even, d) + step * 8 * L::kPitch);
        const u32 b1 = load_word(L::at_step(odd, d) + step * 8 * L::kPitch);
        JFT_UNROLL
        for (int m = 0; m < kM; ++m) T::mma(c[m][d], fa[m], b0, b1);
      }
    }
  }
}

template <int kM, int kN>
JFT_DEV void clear(float (&c)[kM][kN][4]) {
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    JFT_UNROLL
    for (int n = 0; n < kN; ++n) {
      JFT_UNROLL
      for (int e = 0; e < 4; ++e) c[m][n][e] = 0.0f;
    }
  }
}

}  // namespace jft::cuda
