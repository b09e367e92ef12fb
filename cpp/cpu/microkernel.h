// The one matrix product behind all five products of attention:
//     C[m][n] = sum_k A(m, k) * B[k][n]
// A is read as scalars (broadcast), B as vectors along n, and C stays in registers until the whole
// sum is done; then `epilogue.apply<R, N>(acc, m, n)` sees rows m..m+R and vectors at columns n...
// . Sums run over k in ascending order from zero with one fused multiply-add per term, so two
// products of the same numbers agree to the bit whatever their orientation: forward and backward
// logits do.
#pragma once

#include "simd.h"

namespace jft::cpu::JFT_ISA {

// A(m, k) is a[m * lda + k] (kRowMajor) or a[k * lda + m] (kColMajor).
enum class Order { kRowMajor, kColMajor };

template <Order order, int R, int N, typename T, typename Epilogue>
JFT_INLINE void block(int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, int m, int n,
                      const Epilogue& epilogue) {
  Vec<T> acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < N; ++c) acc[r][c] = Vec<T>{};
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < K; ++k) {
    Vec<T> row[N];
#pragma GCC unroll 8
    for (int c = 0; c < N; ++c) row[c] = load(b + c * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> x = splat<T>(order == Order::kRowMajor ? a[r * lda] : a[r]);
#pragma GCC unroll 8
      for (int c = 0; c < N; ++c) acc[r][c] = fma(x, row[c], acc[r][c]);
    }
    a += order == Order::kRowMajor ? 1 : lda;
    b += ldb;
  }
  epilogue.template apply<R, N>(acc, m, n);
}

template <Order order, int N, typename T, typename Epilogue>
JFT_INLINE void panel(int M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, int n,
                      const Epilogue& epilogue) {
  const int64_t step = order == Order::kRowMajor ? lda : 1;
  int m = 0;
  for (; m + kRows <= M; m += kRows) {
    block<order, kRows, N>(K, a + m * step, lda, b, ldb, m, n, epilogue);
  }
  if constexpr (kRows > 4) {
    if (m + 4 <= M) {
      block<order, 4, N>(K, a + m * step, lda, b, ldb, m, n, epilogue);
      m += 4;
    }
  }
  if (m + 2 <= M) {
    block<order, 2, N>(K, a + m * step, lda, b, ldb, m, n, epilogue);
    m += 2;
  }
  if (m < M) block<order, 1, N>(K, a + m * step, lda, b, ldb, m, n, epilogue);
}

// N counts elements and is a multiple of the lanes; B and C rows are readable up to N.
template <Order order, typename T, typename Epilogue>
__attribute__((noinline)) void product(int M, int N, int64_t K, const T* a, int64_t lda, const T* b,
                                       int64_t ldb, const Epilogue& epilogue) {
  constexpr int L = kLanes<T>;
  int n = 0;
  for (; n + kVectors * L <= N; n += kVectors * L) {
    panel<order, kVectors>(M, K, a, lda, b + n, ldb, n, epilogue);
  }
  if constexpr (kVectors > 2) {
    if (n + 2 * L <= N) {
      panel<order, 2>(M, K, a, lda, b + n, ldb, n, epilogue);
      n += 2 * L;
    }
  }
  if (n < N) panel<order, 1>(M, K, a, lda, b + n, ldb, n, epilogue);
}

// ---- Epilogues
// -------------------------------------------------------------------------------------

// C = factor * AB
template <typename T>
struct StoreScaled {
  T* c;
  int64_t ldc;
  T factor;

  template <int R, int N>
  JFT_SELF void apply(Vec<T> (&acc)[R][N], int m, int n) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        store(c + (m + r) * ldc + n + v * kLanes<T>, acc[r][v] * factor);
      }
    }
  }
};

// C += AB
template <typename T>
struct Accumulate {
  T* c;
  int64_t ldc;

  template <int R, int N>
  JFT_SELF void apply(Vec<T> (&acc)[R][N], int m, int n) const {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        T* p = c + (m + r) * ldc + n + v * kLanes<T>;
        store(p, load(p) + acc[r][v]);
      }
    }
  }
};

// C = C * column_factor + AB: rescales what earlier key tiles left.
template <typename T>
struct RescaleAccumulate {
  T* c;
  int64_t ldc;
  const T* column_factor;

  template <int R, int N>
  JFT_SELF void apply(Vec<T> (&acc)[R][N], int m, int n) const {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const Vec<T> factor = load(column_factor + n + v * kLanes<T>);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        T* p = c + (m + r) * ldc + n + v * kLanes<T>;
        store(p, fma(load(p), factor, acc[r][v]));
      }
    }
  }
};

}  // namespace jft::cpu::JFT_ISA
