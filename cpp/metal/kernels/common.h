// Shared by all attention kernels: compile-time sizes, operands, 8x8 fragments, staging.
//
// The host compiles one library per (element type, padded head sizes) with these macros:
//   JFT_T    half, bfloat or float: type of q, k, v, o, do and their gradients
//   JFT_DP   head size of q and k, padded (tiles.h);  JFT_DVP: of v and o
// Everything else is a function constant or a parameter.
#pragma once

#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "../params.h"
#include "../tiles.h"

using namespace metal;
using namespace jft;

constant bool kHasBias [[function_constant(kFlagBias)]];
constant uint kBiasType [[function_constant(kFlagBiasType)]];
constant bool kHasMask [[function_constant(kFlagMask)]];
constant bool kHasSegments [[function_constant(kFlagSegments)]];
constant bool kHasSoftcap [[function_constant(kFlagSoftcap)]];
constant bool kHasAlibi [[function_constant(kFlagAlibi)]];
constant bool kHasSinks [[function_constant(kFlagSinks)]];
constant bool kHasDropout [[function_constant(kFlagDropout)]];

constant constexpr int kDP = JFT_DP;
constant constexpr int kDVP = JFT_DVP;
constant constexpr int kBytes = sizeof(JFT_T);
constant constexpr int kSplit = metal_split(kDP, kDVP);
constant constexpr int kLdK = metal_ld(kDP, kBytes);
constant constexpr int kLdV = metal_ld(kDVP, kBytes);
// Fragments of one half (split) or of the whole head.
constant constexpr int kDF = kDP / 8 / kSplit;
constant constexpr int kDVF = kDVP / 8 / kSplit;

// Operands that every attention kernel reads. Those behind a function constant stay unbound when it
// is false; the small integer ones are bound to anything when absent, and `present` says so.
#define JFT_OPTION_ARGUMENTS                                                                       \
  device const int *q_offset [[buffer(kBufQOffset)]],                                              \
      device const int *window_left [[buffer(kBufWindowLeft)]],                                    \
      device const int *window_right [[buffer(kBufWindowRight)]],                                  \
      device const int *q_segments [[buffer(kBufQSegmentIds), function_constant(kHasSegments)]],   \
      device const int *kv_segments [[buffer(kBufKvSegmentIds), function_constant(kHasSegments)]], \
      device const int *q_lengths [[buffer(kBufQLengths)]],                                        \
      device const int *kv_lengths [[buffer(kBufKvLengths)]],                                      \
      device const uchar *mask [[buffer(kBufMask), function_constant(kHasMask)]],                  \
      device const uchar *bias [[buffer(kBufBias), function_constant(kHasBias)]],                  \
      device const float *slopes [[buffer(kBufAlibiSlopes), function_constant(kHasAlibi)]],        \
      device const uint *seed [[buffer(kBufDropoutSeed), function_constant(kHasDropout)]],         \
      device const uint *origin [[buffer(kBufDropoutOrigin), function_constant(kHasDropout)]]

#define JFT_OPTIONS                                                           \
  {q_offset,   window_left, window_right, q_segments, kv_segments, q_lengths, \
   kv_lengths, mask,        bias,         slopes,     seed,        origin}

#define JFT_THREAD_ARGUMENTS                                                                  \
  threadgroup JFT_T *shared [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]], \
      uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],      \
      uint simd [[simdgroup_index_in_threadgroup]]

struct Options {
  device const int* q_offset;
  device const int* window_left;
  device const int* window_right;
  device const int* q_segments;
  device const int* kv_segments;
  device const int* q_lengths;
  device const int* kv_lengths;
  device const uchar* mask;
  device const uchar* bias;
  device const float* slopes;
  device const uint* seed;
  device const uint* origin;
};

// ---- Batch elements ----

struct BatchIndex {
  i64 at[kMetalBatchDims];
};

// Element number `kept` of the result and number `reduced` of those that are summed into it.
inline BatchIndex batch_index(constant MetalParams& p, i64 kept, i64 reduced) {
  BatchIndex b;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    i64 size = p.batch_size[d];
    if ((p.kept >> d) & 1) {
      b.at[d] = kept % size;
      kept /= size;
    } else {
      b.at[d] = reduced % size;
      reduced /= size;
    }
  }
  return b;
}

inline i64 batch_offset(constant MetalParams& p, constant MetalStrides& s, BatchIndex b) {
  i64 offset = 0;
  for (int d = 0; d < p.batch_dims; ++d) offset += b.at[d] * s.batch[d];
  return offset;
}

inline bool came(constant MetalParams& p, int operand) { return (p.present >> operand) & 1; }

// ---- 8x8 fragments ----

typedef simdgroup_float8x8 Fragment;

// Row x, and first of the two columns y, that a lane holds.
struct At {
  ushort x, y;
};

inline At fragment_position(uint lane) {
  At at;
  at.x = ushort((lane >> 4) * 4 + ((lane >> 1) & 3));
  at.y = ushort(((lane >> 3) & 1) * 4 + (lane & 1) * 2);
  return at;
}

inline float get(thread Fragment& f, int e) { return f.thread_elements()[e]; }
inline void put(thread Fragment& f, int e, float x) { f.thread_elements()[e] = x; }

template <int N>
inline void clear(thread Fragment (&f)[N]) {
  for (int n = 0; n < N; ++n) {
    put(f[n], 0, 0.0f);
    put(f[n], 1, 0.0f);
  }
}

// f(r, c) = x[r * ld + c]
inline Fragment load(threadgroup const JFT_T* x, int ld, At at) {
  Fragment f;
  put(f, 0, float(x[at.x * ld + at.y]));
  put(f, 1, float(x[at.x * ld + at.y + 1]));
  return f;
}

// f(r, c) = x[c * ld + r]
inline Fragment load_transposed(threadgroup const JFT_T* x, int ld, At at) {
  Fragment f;
  put(f, 0, float(x[at.y * ld + at.x]));
  put(f, 1, float(x[(at.y + 1) * ld + at.x]));
  return f;
}

// N fragments of 8 rows of a [rows, features] array: row `row0 + r` below `rows`, features from
// `col0` below `cols`; zero elsewhere.
template <int N>
inline void load_rows(thread Fragment (&f)[N], device const JFT_T* x, i64 stride, i64 row0,
                      i64 rows, int col0, i64 cols, At at) {
  i64 row = row0 + at.x;
  for (int n = 0; n < N; ++n) {
    for (int e = 0; e < 2; ++e) {
      int col = col0 + n * 8 + at.y + e;
      put(f[n], e, row < rows && col < cols ? float(x[row * stride + col]) : 0.0f);
    }
  }
}

// The inverse: x = f * factor(row), rounded once.
template <int N>
inline void store_rows(thread Fragment (&f)[N], float factor, device JFT_T* x, i64 stride, i64 row0,
                       i64 rows, int col0, i64 cols, At at) {
  i64 row = row0 + at.x;
  for (int n = 0; n < N; ++n) {
    for (int e = 0; e < 2; ++e) {
      int col = col0 + n * 8 + at.y + e;
      if (row < rows && col < cols) x[row * stride + col] = JFT_T(get(f[n], e) * factor);
    }
  }
}

// acc[n] += a x b^T for fragments first .. first + C - 1 of a, which has 8 rows, and the staged b
// [8*N, 8*C]
template <int C, int D, int N>
inline void multiply_transposed(thread Fragment (&acc)[N], thread Fragment (&a)[D], int first,
                                threadgroup const JFT_T* b, int ld, At at) {
  for (int n = 0; n < N; ++n) {
    for (int d = 0; d < C; ++d) {
      Fragment x = load_transposed(b + n * 8 * ld + d * 8, ld, at);
      simdgroup_multiply_accumulate(acc[n], a[first + d], x, acc[n]);
    }
  }
}

// acc[d] += a x b for a [8, 8*N] and the staged b [8*N, 8*D]. Rows of b whose bit in `keep` is
// clear count as zero: they may hold NaN, and 0 * NaN would spoil the product.
template <int D, int N>
inline void multiply(thread Fragment (&acc)[D], thread Fragment (&a)[N], threadgroup const JFT_T* b,
                     int ld, uint keep, At at) {
  for (int n = 0; n < N; ++n) {
    bool kept = (keep >> (2 * n + (at.x & 1))) & 1u;
    for (int d = 0; d < D; ++d) {
      Fragment x = load(b + n * 8 * ld + d * 8, ld, at);
      if (!kept) {
        put(x, 0, 0.0f);
        put(x, 1, 0.0f);
      }
      simdgroup_multiply_accumulate(acc[d], a[n], x, acc[d]);
    }
  }
}

// Sum and maximum over the 8 columns of a row (lanes that differ in bits 0 and 3).
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  return max(x, simd_shuffle_xor(x, 8));
}

// `bits` holds bit 2n + e for element e of fragment n of this lane. The answer has, for this lane's
// role as row at.x of a right-hand fragment, bit 2n + (at.x & 1): is any bit of column at.x of
// fragment n set?
inline uint any_in_column(uint bits, At at) {
  bits |= simd_shuffle_xor(bits, 2);
  bits |= simd_shuffle_xor(bits, 4);
  bits |= simd_shuffle_xor(bits, 16);
  return simd_shuffle(bits, ushort(((at.x >> 1) & 1) | (((at.x >> 2) & 1) << 3)));
}

// ---- Staging ----

// n rows of a [rows, features] array into threadgroup memory; zero beyond `rows` and `cols`.
inline void stage(threadgroup JFT_T* to, int ld, int n, int padded, device const JFT_T* x,
                  i64 stride, i64 row0, i64 rows, i64 cols, uint tid) {
  for (int i = int(tid); i < n * padded; i += kThreads) {
    int row = i / padded, col = i % padded;
    bool inside = row0 + row < rows && col < cols;
    to[row * ld + col] = inside ? x[(row0 + row) * stride + col] : JFT_T(0.0f);
  }
}
