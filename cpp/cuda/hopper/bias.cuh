// The additive bias, read straight from global memory by the threads that hold the logits. 16-bit
// biases with aligned rows take wide loads and exchange words inside a warp, everything else
// (float32, broadcast or unaligned keys) one load per element.
#pragma once

#include "device/fragment.cuh"
#include "params.h"

namespace jft::hopper {

template <int kKind>
__device__ __forceinline__ float bias_value(const void* data, int64_t at) {
  if constexpr (kKind == kBiasF32) {
    return static_cast<const float*>(data)[at];
  } else {
    const uint32_t bits = static_cast<const uint16_t*>(data)[at];
    return low_half<kKind == kBiasF16>(bits);
  }
}

// s = s * scale + bias for two lines of this thread and the columns 8 g + 2 t + c of a tile; lines
// and columns beyond the last one read the last one (they are hidden later).
template <int kKind, int kColumns, int kAcc>
__device__ __forceinline__ void add_bias_elements(float (&s)[kAcc], int from, float scale,
                                                  const void* data, int64_t line0, int64_t line1,
                                                  int first, int last, int64_t step) {
#pragma unroll
  for (int g = 0; g < kColumns / 8; ++g)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t column = min(first + 8 * g + c, last) * step;
      float& x0 = s[from + 4 * g + c];
      float& x1 = s[from + 4 * g + 2 + c];
      x0 = fmaf(x0, scale, bias_value<kKind>(data, line0 + column));
      x1 = fmaf(x1, scale, bias_value<kKind>(data, line1 + column));
    }
}

template <int kColumns, int kAcc>
__device__ __forceinline__ void add_bias_elements(float (&s)[kAcc], int from, float scale,
                                                  const BiasArgs& a, int64_t line0, int64_t line1,
                                                  int first, int last, int64_t step) {
  first += 2 * (threadIdx.x & 3);
  if (a.kind == kBiasF32)
    add_bias_elements<kBiasF32, kColumns>(s, from, scale, a.data, line0, line1, first, last, step);
  else if (a.kind == kBiasF16)
    add_bias_elements<kBiasF16, kColumns>(s, from, scale, a.data, line0, line1, first, last, step);
  else
    add_bias_elements<kBiasBF16, kColumns>(s, from, scale, a.data, line0, line1, first, last, step);
}

// This thread's two lines and the tile's first column. Made where it is needed, twice per tile: the
// registers between are the products'.
struct BiasPlace {
  int64_t head;  // element offset of (batch, head)
  int line[2], first;

  __device__ __forceinline__ BiasPlace(const BiasArgs& a, int b0, int b1, int h, int line0,
                                       int line1, int first_)
      : head(b0 * a.b0 + b1 * a.b1 + h * a.head), line{line0, line1}, first(first_) {}
  // Element offset of line r; lines beyond the last one read the last one.
  __device__ __forceinline__ int64_t at(int r, int last, int64_t step) const {
    return head + min(line[r], last) * step;
  }
};

// A 4 x 4 transpose of words among the four lanes of a quad.
__device__ __forceinline__ void exchange_words(uint32_t (&v)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? v[i] : v[i + bit], bit);
      if (upper)
        v[i] = got;
      else
        v[i + bit] = got;
    }
  }
}

// Lines are queries, columns keys. A lane loads 8 keys of a row at a time, four lanes 32; then they
// exchange words. In two parts, so that the first may be loaded while products run.
template <int kKeys>
struct QueryBias {
  static constexpr int kChunks = (kKeys / 8 + 3) / 4, kFirst = kChunks / 2;
  uint32_t words[2][kChunks][4];

  __device__ __forceinline__ void start(const BiasArgs& a, const BiasPlace& at,
                                        const Shape& shape) {
    if (a.chunks) load<0, kFirst>(a, at, shape);
  }

  __device__ __forceinline__ void add(float (&s)[kKeys / 2], float scale, const BiasArgs& a,
                                      const BiasPlace& at, const Shape& shape) {
    if (!a.chunks) {
      add_bias_elements<kKeys>(s, 0, scale, a, at.at(0, shape.Sq - 1, a.row),
                               at.at(1, shape.Sq - 1, a.row), at.first, shape.Sk - 1, a.col);
      return;
    }
    load<kFirst, kChunks>(a, at, shape);
    if (a.kind == kBiasF16)
      add_words<true>(s, scale);
    else
      add_words<false>(s, scale);
  }

 private:
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void load(const BiasArgs& a, const BiasPlace& at, const Shape& shape) {
    const int key = at.first + 8 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint16_t* row = static_cast<const uint16_t*>(a.data) + at.at(r, shape.Sq - 1, a.row);
#pragma unroll
      for (int n = kBegin; n < kEnd; ++n) {
        const uint4 x = *reinterpret_cast<const uint4*>(row + min(key + 32 * n, shape.Sk - 8));
        words[r][n][0] = x.x;
        words[r][n][1] = x.y;
        words[r][n][2] = x.z;
        words[r][n][3] = x.w;
      }
    }
  }

  template <bool kHalf>
  __device__ __forceinline__ void add_words(float (&s)[kKeys / 2], float scale) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t (&v)[4] = words[r][n];
        exchange_words(v);  // v[x]: columns 2 t and 2 t + 1 of lane x's chunk
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          const int g = 4 * n + x;
          if (g >= kKeys / 8) break;
          s[4 * g + 2 * r] = fmaf(s[4 * g + 2 * r], scale, low_half<kHalf>(v[x]));
          s[4 * g + 2 * r + 1] = fmaf(s[4 * g + 2 * r + 1], scale, low_half<kHalf>(v[x] >> 16));
        }
      }
  }
};

// Lines are keys, columns 64 queries: pairs of keys of 8 rows at a time, transposed inside the
// warp.
struct KeyBias {
  uint32_t words[8][2];

  __device__ __forceinline__ void start(const BiasArgs& a, const BiasPlace& at,
                                        const Shape& shape) {
    if (!a.pairs) return;
    const int lane = threadIdx.x & 31;
    const int pair = at.line[0] - lane / 4 + 2 * (lane & 3);  // of the 8 x 8 block's keys
    const uint16_t* data = static_cast<const uint16_t*>(a.data) + at.head;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      const uint16_t* row = data + min(at.first + 8 * g + lane / 4, shape.Sq - 1) * a.row;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        words[g][r] = *reinterpret_cast<const uint32_t*>(row + min(pair + 8 * r, shape.Sk - 2));
    }
  }

  // To the 32 elements of s from `from` on.
  template <int kAcc>
  __device__ __forceinline__ void add(float (&s)[kAcc], int from, float scale, const BiasArgs& a,
                                      const BiasPlace& at, const Shape& shape) {
    if (!a.pairs)
      add_bias_elements<64>(s, from, scale, a, at.at(0, shape.Sk - 1, a.col),
                            at.at(1, shape.Sk - 1, a.col), at.first, shape.Sq - 1, a.row);
    else if (a.kind == kBiasF16)
      add_words<true>(s, from, scale);
    else
      add_words<false>(s, from, scale);
  }

 private:
  template <bool kHalf, int kAcc>
  __device__ __forceinline__ void add_words(float (&s)[kAcc], int from, float scale) {
#pragma unroll
    for (int g = 0; g < 8; ++g)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t x = transpose_8x8(words[g][r]);
        const int i = from + 4 * g + 2 * r;
        s[i] = fmaf(s[i], scale, low_half<kHalf>(x));
        s[i + 1] = fmaf(s[i + 1], scale, low_half<kHalf>(x >> 16));
      }
  }
};

}  // namespace jft::hopper
