// Global memory to tiles in shared memory.
#pragma once

#include "fragment.h"

namespace jft::cuda {

struct alignas(16) Chunk {
  u32 w[4];
};

// Rows [row0, row0 + kRows) of a [rows][features] matrix into a tile. Rows outside [lo, hi) and
// features at or beyond `features` become zero without being read: what lies there may be NaN or
// unmapped. `vector`: base, row stride and features allow 16-byte copies (asynchronous; the caller
// commits and waits).
template <class T, int kHeadDim, int kRows, int kThreads>
JFT_DEV void load_tile(u32 tile, const typename T::Storage* base, i64 row_stride, int row0, int lo,
                       int hi, int features, bool vector) {
  using L = Tile<T, kHeadDim>;
  constexpr int kAll = kRows * L::kChunks;
  if (vector) {
    if constexpr (kThreads % L::kChunks == 0 && kAll % kThreads == 0) {
      // A thread keeps its chunk column and walks down the rows.
      constexpr int kStep = kThreads / L::kChunks;
      const int r0 = opaque(thread_index()) / L::kChunks, c = thread_index() % L::kChunks;
      const typename T::Storage* from =
          opaque(base) + static_cast<i64>(row0 + r0) * row_stride + c * L::kPerChunk;
      const bool column = c * L::kPerChunk < features;
      JFT_UNROLL
      for (int n = 0; n < kAll / kThreads; ++n) {
        const int r = r0 + n * kStep, row = row0 + r;
        copy_async(L::chunk(tile, r, c), from, column && row >= lo && row < hi ? 16 : 0);
        from += kStep * row_stride;
      }
    } else {
      JFT_NO_UNROLL
      for (int at = thread_index(); at < kAll; at += kThreads) {
        const int r = at / L::kChunks, c = at % L::kChunks;
        const int row = row0 + r;
        const bool inside = row >= lo && row < hi && c * L::kPerChunk < features;
        copy_async(L::chunk(tile, r, c),
                   base + (inside ? static_cast<i64>(row) * row_stride + c * L::kPerChunk : 0),
                   inside ? 16 : 0);
      }
    }
  } else {
    JFT_NO_UNROLL
    for (int at = thread_index(); at < kAll; at += kThreads) {
      const int r = at / L::kChunks, c = at % L::kChunks;
      const int row = row0 + r;
      const bool inside = row >= lo && row < hi;
      const typename T::Storage* from = base + (inside ? static_cast<i64>(row) * row_stride : 0);
      Chunk chunk = {{0, 0, 0, 0}};
      JFT_UNROLL
      for (int e = 0; e < L::kPerChunk; ++e) {
        const int col = c * L::kPerChunk + e;
        if (inside && col < features) {
          if constexpr (T::kBytes == 2) {
            chunk.w[e / 2] |= static_cast<u32>(from[col]) << (16 * (e & 1));
          } else {
            chunk.w[e] = float_bits(from[col]);
          }
        }
      }
      shared<Chunk>(L::chunk(tile, r, c)) = chunk;
    }
  }
}

// Rows of a tile for which `dead(row)` become zero. The caller synchronises before and after.
template <class T, int kHeadDim, int kRows, int kThreads, class Dead>
JFT_DEV void scrub_rows(u32 tile, Dead dead) {
  using L = Tile<T, kHeadDim>;
  JFT_NO_UNROLL
  for (int at = thread_index(); at < kRows * L::kChunks; at += kThreads) {
    const int r = at / L::kChunks, c = at % L::kChunks;
    if (dead(r)) shared<Chunk>(L::chunk(tile, r, c)) = Chunk{{0, 0, 0, 0}};
  }
}

// Two neighbouring features of one row, rounded once. `pair`: both exist and one store is aligned.
template <class T>
JFT_DEV void store_pair(typename T::Storage* to, float x0, float x1, int left, bool pair) {
  if constexpr (T::kBytes == 2) {
    const u32 bits = T::pack(x0, x1);
    if (pair) {
      *reinterpret_cast<u32*>(to) = bits;
    } else {
      if (left > 0) to[0] = static_cast<unsigned short>(bits);
      if (left > 1) to[1] = static_cast<unsigned short>(bits >> 16);
    }
  } else {
    if (left > 0) to[0] = x0;
    if (left > 1) to[1] = x1;
  }
}

// 16 * kM rows of accumulators to global memory; `scale(m, half)` multiplies a row.
template <class T, int kM, int kD, class Scale>
JFT_DEV void store_rows(const float (&c)[kM][kD][4], typename T::Storage* base, i64 row_stride,
                        int row0, int rows_end, int features, bool pairs, Scale scale) {
  const int lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    JFT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * 16 + g + 8 * half;
      if (row >= rows_end) continue;
      typename T::Storage* to = base + static_cast<i64>(row) * row_stride;
      const float f = scale(m, half);
      JFT_UNROLL
      for (int d = 0; d < kD; ++d) {
        const int col = d * 8 + 2 * t;
        if (col < features) {
          store_pair<T>(to + col, c[m][d][2 * half] * f, c[m][d][2 * half + 1] * f, features - col,
                        pairs && col + 1 < features);
        }
      }
    }
  }
}

}  // namespace jft::cuda
