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
      const u32 to = L::chunk(tile, r, c);
      shared<Chunk>(to) = Chunk{{0, 0, 0, 0}};
      const int end = inside ? min_int(L::kPerChunk, features - c * L::kPerChunk) : 0;
      JFT_NO_UNROLL
      for (int e = 0; e < end; ++e) {
        shared<typename T::Storage>(to + e * T::kBytes) = from[c * L::kPerChunk + e];
      }
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

// 16 * kM rows of a warp's accumulators to global memory, rounded once. They go through `tile`, in
// the rows that only this warp reads (its A operand, no longer needed): global stores are whole
// chunks then. `scale(m, half)` multiplies a row; `vector` as in load_tile.
template <class T, int kHead, int kM, int kD, class Scale>
JFT_DEV void store_rows(const float (&c)[kM][kD][4], u32 tile, int warp_row,
                        typename T::Storage* base, i64 row_stride, int row0, int rows_end,
                        int features, bool vector, Scale scale) {
  using L = Tile<T, kHead>;
  const int lane = thread_index() & 31, g = lane >> 2, t = lane & 3;
  sync_warp();
  JFT_UNROLL
  for (int m = 0; m < kM; ++m) {
    JFT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + m * 16 + g + 8 * half;
      const float f = scale(m, half);
      JFT_UNROLL
      for (int d = 0; d < kD; ++d) {
        const float x0 = c[m][d][2 * half] * f, x1 = c[m][d][2 * half + 1] * f;
        const u32 at = L::element(tile, row, d * 8 + 2 * t);
        if constexpr (T::kBytes == 2) {
          shared<u32>(at) = T::pack(x0, x1);
        } else {
          shared<float>(at) = x0;
          shared<float>(at + 4) = x1;
        }
      }
    }
  }
  sync_warp();
  JFT_NO_UNROLL
  for (int at = lane; at < 16 * kM * L::kChunks; at += 32) {
    const int r = at / L::kChunks, chunk = at % L::kChunks, col = chunk * L::kPerChunk;
    if (row0 + r >= rows_end || col >= features) continue;
    const u32 from = L::chunk(tile, warp_row + r, chunk);
    typename T::Storage* to = base + static_cast<i64>(row0 + r) * row_stride + col;
    if (vector) {
      *reinterpret_cast<Chunk*>(to) = shared<Chunk>(from);
    } else {
      JFT_NO_UNROLL
      for (int e = 0; e < L::kPerChunk && col + e < features; ++e) {
        to[e] = shared<typename T::Storage>(from + e * T::kBytes);
      }
    }
  }
}

}  // namespace jft::cuda
