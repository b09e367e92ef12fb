// The products of bf16 calls in AMX tiles: sums of 16 x 16 float32, 32 terms at a time. The classes
// stand in for those of products.h.
//
// A product is C = A B. A has rows of bf16, terms side by side. B has a row of pairs per two terms:
// a 32-bit word holds both terms of a column (low half: the first). Which two terms share a word is
// free as long as A and B agree:
//   over features (S, dP)      2 n and 2 n + 1, as they lie in memory
//   over queries or keys       n and n + 16 of every 32: words are then put together from two
//                              vectors of float32 without any shuffle
// All operands are copies in scratch, padded with zeros to whole tiles: what lies beyond the end of
// a tensor must not reach a sum, and rows of a head may lie so far apart that they would meet in
// few sets of the L1 cache.
//
// float32 factors (P and dS) are split into two bf16 parts by truncation, x = high + low with an
// error below 2^-15 |x|: rounded once, they would cost results a second rounding to bf16. (An inf
// splits into inf + NaN.) AMX takes subnormal numbers as zero.
#pragma once

#include "products.h"

namespace jft::cpu::JFT_ISA {

constexpr int kTerms = 32;     // terms of one tile product
constexpr int kTileSide = 16;  // rows and columns of one tile

JFT_INLINE int64_t whole_terms(int64_t n) { return (n + kTerms - 1) / kTerms * kTerms; }
JFT_INLINE int whole_sides(int n) { return (n + kTileSide - 1) / kTileSide * kTileSide; }

// The tile registers of this thread, while a task runs: 16 rows of 64 bytes each.
struct TileRegisters {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  TileRegisters() {
    Config config{};
    config.palette = 1;
    for (int n = 0; n < 8; ++n) {
      config.row_bytes[n] = 64;
      config.rows[n] = kTileSide;
    }
    compiler_fence();
    _tile_loadconfig(&config);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  // GCC does not know that a tile load reads memory.
  static JFT_SELF void compiler_fence() { asm volatile("" ::: "memory"); }
};

// ---- Products

struct Left {
  const uint16_t* data;
  int64_t ld;  // of bf16
};
struct Right {
  const uint32_t* data;
  int64_t ld;    // of pairs
  int64_t next;  // from the pairs of one kTerms to those of the next
};

// R x C tiles of sum_n A[n] B[n], n < kParts, into registers 0 to 3; they start from what `c`
// holds, or from zero where it is null.
template <int R, int C, int kParts>
JFT_INLINE void multiply(int64_t terms, const Left (&a)[kParts], const Right (&b)[kParts], int m,
                         int n, const float* c, int64_t ldc) {
  if (c) {
    _tile_loadd(0, c, ldc * 4);
    if (C > 1) _tile_loadd(1, c + kTileSide, ldc * 4);
    if (R > 1) _tile_loadd(2, c + kTileSide * ldc, ldc * 4);
    if (R > 1 && C > 1) _tile_loadd(3, c + kTileSide * ldc + kTileSide, ldc * 4);
  } else {
    _tile_zero(0);
    if (C > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && C > 1) _tile_zero(3);
  }
  for (int64_t k = 0; k < terms; k += kTerms) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const uint16_t* left = a[part].data + m * a[part].ld + k;
      const uint32_t* right = b[part].data + k / kTerms * b[part].next + n;
      _tile_loadd(6, right, b[part].ld * 4);
      _tile_loadd(4, left, a[part].ld * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (R > 1) {
        _tile_loadd(5, left + kTileSide * a[part].ld, a[part].ld * 2);
        _tile_dpbf16ps(2, 5, 6);
      }
      if (C > 1) {
        _tile_loadd(7, right + kTileSide, b[part].ld * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (R > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
}

template <int R, int C>
JFT_INLINE void put(float* c, int64_t ldc) {
  _tile_stored(0, c, ldc * 4);
  if (C > 1) _tile_stored(1, c + kTileSide, ldc * 4);
  if (R > 1) _tile_stored(2, c + kTileSide * ldc, ldc * 4);
  if (R > 1 && C > 1) _tile_stored(3, c + kTileSide * ldc + kTileSide, ldc * 4);
}

// f.run<R, C>(m, n) for the blocks of up to 2 x 2 tiles that cover M x N values.
template <typename F>
JFT_INLINE void for_blocks(int M, int N, const F& f) {
  for (int n = 0; n < N; n += 2 * kTileSide) {
    for (int m = 0; m < M; m += 2 * kTileSide) {
      const bool wide = n + kTileSide < N, tall = m + kTileSide < M;
      if (tall && wide) {
        f.template run<2, 2>(m, n);
      } else if (tall) {
        f.template run<2, 1>(m, n);
      } else if (wide) {
        f.template run<1, 2>(m, n);
      } else {
        f.template run<1, 1>(m, n);
      }
    }
  }
}

template <int kParts>
struct Blocks {
  int64_t terms;
  const Left (&a)[kParts];
  const Right (&b)[kParts];
  bool add;
  float* c;
  int64_t ldc;

  template <int R, int C>
  JFT_SELF void run(int m, int n) const {
    float* const at = c + m * ldc + n;
    multiply<R, C, kParts>(terms, a, b, m, n, add ? at : nullptr, ldc);
    put<R, C>(at, ldc);
  }
};

// C = or += sum of A[n] B[n], M x N of it (N in whole vectors). `terms` is a multiple of kTerms; A,
// B and C are there in whole tiles.
template <int kParts>
static __attribute__((noinline)) void tile_product(int M, int N, int64_t terms,
                                                   const Left (&a)[kParts],
                                                   const Right (&b)[kParts], bool add, float* c,
                                                   int64_t ldc) {
  TileRegisters::compiler_fence();
  for_blocks(M, N, Blocks<kParts>{terms, a, b, add, c, ldc});
  TileRegisters::compiler_fence();
}

// Sends what a product left at c through an epilogue that stores to the same place. (Vectors loaded
// right behind a tile store wait for it, so this comes after the whole product.)
template <int C, typename Epilogue>
JFT_INLINE void finish_columns(int M, int n, const float* c, int64_t ldc,
                               const Epilogue& epilogue) {
  constexpr int kGroup = 8;
  int m = 0;
  for (; m + kGroup <= M; m += kGroup) {
    Vec<float> acc[kGroup][C];
#pragma GCC unroll 8
    for (int r = 0; r < kGroup; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < C; ++v) acc[r][v] = load(c + (m + r) * ldc + n + v * kTileSide);
    }
    epilogue.template apply<kGroup, C>(acc, m, n);
  }
  for (; m < M; ++m) {
    Vec<float> acc[1][C];
#pragma GCC unroll 2
    for (int v = 0; v < C; ++v) acc[0][v] = load(c + m * ldc + n + v * kTileSide);
    epilogue.template apply<1, C>(acc, m, n);
  }
}
template <typename Epilogue>
static __attribute__((noinline)) void finish(int M, int N, const float* c, int64_t ldc,
                                             const Epilogue& epilogue) {
  int n = 0;
  for (; n + kTileSide < N; n += 2 * kTileSide) finish_columns<2>(M, n, c, ldc, epilogue);
  if (n < N) finish_columns<1>(M, n, c, ldc, epilogue);
}

// ---- Operands

typedef uint32_t Pairs __attribute__((vector_size(64)));

JFT_INLINE Pairs load_pairs(const uint32_t* p) {
  Pairs x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
JFT_INLINE void store_pairs(void* p, Pairs x) { __builtin_memcpy(p, &x, sizeof x); }

// Low halves of x and y, or their high halves, as pairs.
JFT_INLINE Pairs low_halves(Pairs x, Pairs y) { return (x & 0xffffu) | (y << 16); }
JFT_INLINE Pairs high_halves(Pairs x, Pairs y) { return (x >> 16) | (y & 0xffff0000u); }

JFT_INLINE void transpose_pairs(Pairs (&x)[kTileSide]) {
  Vec<float> v[kTileSide];
#pragma GCC unroll 16
  for (int n = 0; n < kTileSide; ++n) v[n] = (Vec<float>)x[n];
  transpose<float>(v);
#pragma GCC unroll 16
  for (int n = 0; n < kTileSide; ++n) x[n] = (Pairs)v[n];
}

// dst[r][c] = src(r, c), r < kTile: zero where the tensor ends, in rows whose bit in `keep` is off,
// and up to whole terms in c.
static __attribute__((noinline)) void copy_bf16(const Piece& src, uint64_t keep, uint16_t* dst) {
  const auto* row = static_cast<const uint16_t*>(src.data);
  const int64_t ld = whole_terms(src.cols), whole = src.cols / kTerms * kTerms;
  const auto tail = static_cast<__mmask32>(low_bits(src.cols - whole));
  for (int r = 0; r < kTile; ++r, row += src.row, dst += ld) {
    if (r >= src.rows || !((keep >> r) & 1)) {
      __builtin_memset(dst, 0, static_cast<size_t>(ld) * sizeof *dst);
      continue;
    }
    for (int64_t c = 0; c < whole; c += kTerms) {
      _mm512_storeu_si512(dst + c, _mm512_loadu_si512(row + c));
    }
    if (tail) _mm512_storeu_si512(dst + whole, _mm512_maskz_loadu_epi16(tail, row + whole));
  }
}

// From such a copy, rows = kTile, ld in bf16 (whole terms):
// B over features: dst[c / 2][r] = (src[r][c], src[r][c + 1]).
static __attribute__((noinline)) void pairs_of_features(const uint16_t* src, int64_t ld,
                                                        uint32_t* dst) {
  for (int64_t c = 0; c < ld; c += kTerms) {
    for (int r = 0; r < kTile; r += kTileSide) {
      Pairs x[kTileSide];
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        x[i] = load_pairs(reinterpret_cast<const uint32_t*>(src + (r + i) * ld + c));
      }
      transpose_pairs(x);
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) store_pairs(dst + (c / 2 + i) * kTile + r, x[i]);
    }
  }
}

// A over rows: dst[c][rows], the rows of every 32 in the order 0, 16, 1, 17, ...
static __attribute__((noinline)) void rows_as_terms(const uint16_t* src, int64_t ld,
                                                    uint16_t* dst) {
  for (int64_t c = 0; c < ld; c += kTerms) {
    for (int r = 0; r < kTile; r += kTerms) {
      Pairs even[kTileSide], odd[kTileSide];
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        const auto* x = reinterpret_cast<const uint32_t*>(src + (r + i) * ld + c);
        const Pairs first = load_pairs(x), second = load_pairs(x + kTileSide * ld / 2);
        even[i] = low_halves(first, second);
        odd[i] = high_halves(first, second);
      }
      transpose_pairs(even);
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) store_pairs(dst + (c + 2 * i) * kTile + r, even[i]);
      transpose_pairs(odd);
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) store_pairs(dst + (c + 2 * i + 1) * kTile + r, odd[i]);
    }
  }
}

// B over rows: dst[r][c] = (src[r][c], src[r + 16][c]) for the first half of every 32 rows.
static __attribute__((noinline)) void pairs_of_rows(const uint16_t* src, int64_t ld,
                                                    uint32_t* dst) {
  for (int r = 0; r < kTile; r += kTerms) {
    for (int i = 0; i < kTileSide; ++i) {
      const uint16_t* x = src + (r + i) * ld;
      for (int64_t c = 0; c < ld; c += kTileSide) {
        const auto wide = [](const uint16_t* p) {
          return (Pairs)_mm512_cvtepu16_epi32(
              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        };
        const Pairs both = low_halves(wide(x + c), wide(x + kTileSide * ld + c));
        store_pairs(dst + (r / 2 + i) * ld + c, both);
      }
    }
  }
}

// Two bf16 parts of x and y, paired.
JFT_INLINE void split(Vec<float> x, Vec<float> y, Pairs& high, Pairs& low) {
  const Pairs u = (Pairs)x, v = (Pairs)y;
  high = high_halves(u, v);
  const Vec<float> x_rest = x - (Vec<float>)(u & 0xffff0000u);
  const Vec<float> y_rest = y - (Vec<float>)(v & 0xffff0000u);
  low = high_halves((Pairs)x_rest, (Pairs)y_rest);
}

// B over the rows of a block of a logit tile (row0 a multiple of kTerms), zero from row1 to whole
// terms: the high parts of rows n and n + 16 go to row n of `dst`, the low parts to row n + 16.
// `dst` may be `src`.
static __attribute__((noinline)) void split_pairs_of_rows(const float* src, const Block& b,
                                                          float* dst) {
  for (int r = b.row0; r < b.row1; r += kTerms) {
    for (int first = r; first < r + kTileSide; ++first) {
      const int second = first + kTileSide;
      for (int n = b.lane0; n < b.lane1; n += kTileSide) {
        const Vec<float> x = first < b.row1 ? load(src + first * kTile + n) : Vec<float>{};
        const Vec<float> y = second < b.row1 ? load(src + second * kTile + n) : Vec<float>{};
        Pairs high, low;
        split(x, y, high, low);
        store_pairs(dst + first * kTile + n, high);
        store_pairs(dst + second * kTile + n, low);
      }
    }
  }
}

// C += A (high + low), with both parts as above, over the rows of a block.
JFT_INLINE void add_product_of_pairs(int64_t features, const uint16_t* rows, const float* parts,
                                     const Block& b, float* sum) {
  const Left a{rows + b.row0, kTile}, left[2] = {a, a};
  const auto* pairs = reinterpret_cast<const uint32_t*>(parts + b.row0 * kTile + b.lane0);
  constexpr int64_t kNext = int64_t{kTerms} * kTile;
  const Right right[2] = {{pairs, kTile, kNext}, {pairs + kTileSide * kTile, kTile, kNext}};
  tile_product<2>(static_cast<int>(features), b.lane1 - b.lane0, whole_terms(b.row1 - b.row0), left,
                  right, true, sum + b.lane0, kTile);
}

// A over the lanes of a logit tile: rows of words (n, n + 16), both parts; zero from lane nk on and
// in the rows from nq to a whole tile.
static __attribute__((noinline)) void split_rows(const float* src, int nq, int nk, uint32_t* high,
                                                 uint32_t* low) {
  constexpr int kWords = kTile / 2;
  const auto lanes = [&](const float* row, int n) {
    return select(lane_mask(low_bits(nk - n), row), load(row + n), Vec<float>{});
  };
  for (int r = 0; r < whole_sides(nq); ++r) {
    const float* row = src + r * kTile;
    for (int n = 0; n < kTile; n += kTerms) {
      Pairs h{}, l{};
      if (r < nq) split(lanes(row, n), lanes(row, n + kTileSide), h, l);
      store_pairs(high + r * kWords + n / 2, h);
      store_pairs(low + r * kWords + n / 2, l);
    }
  }
}

// ---- The passes

static inline uint16_t* take_bf16(Arena<float>& a, int64_t n) {
  return reinterpret_cast<uint16_t*>(a.take((n + 1) / 2));
}
static inline uint32_t* take_pairs(Arena<float>& a, int64_t n) {
  return reinterpret_cast<uint32_t*>(a.take(n));
}

// The product of rows with pairs of features, on a block.
template <typename Epilogue>
JFT_INLINE void product_over_features(const uint16_t* rows, int64_t features, const uint32_t* pairs,
                                      const Block& b, const Epilogue& epilogue) {
  const int M = b.row1 - b.row0, N = b.lane1 - b.lane0;
  const Left left[1] = {{rows + b.row0 * features, features}};
  const Right right[1] = {{pairs + b.lane0, kTile, kTileSide * kTile}};
  tile_product<1>(M, N, features, left, right, false, epilogue.c, kTile);
  finish(M, N, epilogue.c, kTile, epilogue);
}

// Weights are exp(s - shift). The shift of a query follows its running maximum only when that has
// grown by kSlack since: as long as it stays, the sums O need no pass of their own that rescales
// them, and tiles add to them where they lie. finish() brings o and l to the maximum itself.
template <typename T>
struct AmxForward {
  using Registers = TileRegisters;
  static constexpr int kRowStep = kTerms;
  static constexpr bool kOwnSoftmax = true;
  static constexpr T kSlack = 8;
  int64_t D, Dv, Dt, Dvt;    // Dt, Dvt: in whole terms
  uint32_t* q[kQueryTiles];  // pairs of features [Dt / 2][kTile]
  T* shift[kQueryTiles];     // [kTile]
  uint16_t *k, *vt;          // [kTile][Dt]; rows as terms [Dvt][kTile]
  uint16_t* copy;
  bool rescaled, split;  // by the last softmax step

  AmxForward(Arena<T>& a, int64_t d, int64_t dv)
      : D(d), Dv(dv), Dt(whole_terms(d)), Dvt(whole_terms(dv)), rescaled(false), split(false) {
    for (uint32_t*& tile : q) tile = take_pairs(a, Dt / 2 * kTile);
    for (T*& tile : shift) tile = a.take(kTile);
    k = take_bf16(a, kTile * Dt);
    vt = take_bf16(a, Dvt * kTile);
    copy = take_bf16(a, kTile * (Dt > Dvt ? Dt : Dvt));
  }
  void load_q(int tile, const Piece& src) {
    copy_bf16(src, ~uint64_t{0}, copy);
    pairs_of_features(copy, Dt, q[tile]);
    for (int n = 0; n < kTile; ++n) shift[tile][n] = static_cast<T>(-__builtin_inf());
  }
  void load_k(const Piece& src) { copy_bf16(src, ~uint64_t{0}, k); }
  void load_v(const Piece& src, uint64_t keep) {
    copy_bf16(src, keep, copy);
    rows_as_terms(copy, Dvt, vt);
  }
  template <typename Epilogue>
  void scores(int tile, const Block& b, const Epilogue& epilogue) const {
    product_over_features(k, Dt, q[tile], b, epilogue);
  }

  // As softmax_step() in forward.h. Without dropout the weights are left in their two parts.
  void softmax(int tile, const QueryState<T>& w, T* s, const Block& b, bool dropout) {
    rescaled = false;
    split = !dropout;
    for (int n = b.lane0; n < b.lane1; n += kLanes<T>) {
      const Vec<T> old_shift = load(shift[tile] + n);
      const Vec<T> top = max(load(w.tile_max + n), load(w.m + n));
      store(w.m + n, top);
      const IVec<T> far = top > old_shift + kSlack;
      const Vec<T> new_shift = (Vec<T>)(((IVec<T>)top & far) | ((IVec<T>)old_shift & ~far));
      store(shift[tile] + n, new_shift);
      const IVec<T> nothing = new_shift == splat<T>(-__builtin_inf());
      const Vec<T> base = (Vec<T>)((IVec<T>)new_shift & ~nothing);
      const Vec<T> rescale = exp<T>(old_shift - base);
      store(w.rescale + n, rescale);
      rescaled |= _mm512_cmpneq_ps_mask(rescale, splat<T>(1)) != 0;
      const Vec<T> sum =
          dropout ? weights_of_lanes(s + n, b, base) : parts_of_weights_of_lanes(s + n, b, base);
      store(w.l + n, fma(load(w.l + n), rescale, sum));
    }
  }

  // O^T += V^T P^T
  void output(T* weights, const Block& b, const RescaleAccumulate<T>& sum) {
    if (!split) split_pairs_of_rows(weights, b, weights);
    if (rescaled) {
      for (int64_t d = 0; d < Dv; ++d) {
        for (int n = 0; n < b.lane1 - b.lane0; n += kLanes<T>) {
          T* const at = sum.c + d * kTile + n;
          store(at, load(at) * load(sum.column_factor + n));
        }
      }
    }
    add_product_of_pairs(Dv, vt, weights, b, sum.c - b.lane0);
  }

  void finish_sums(int tile, const QueryState<T>& w) const {
    for (int n = 0; n < kTile; n += kLanes<T>) {
      const Vec<T> base = load(shift[tile] + n);
      const IVec<T> nothing = base == splat<T>(-__builtin_inf());
      const Vec<T> factor = (Vec<T>)(((IVec<T>)exp<T>(base - load(w.m + n)) & ~nothing) |
                                     ((IVec<T>)splat<T>(1) & nothing));
      store(w.l + n, load(w.l + n) * factor);
      for (int64_t d = 0; d < Dv; ++d) {
        T* const at = w.o + d * kTile + n;
        store(at, load(at) * factor);
      }
    }
  }

 private:
  static JFT_SELF Vec<T> weights_of_lanes(T* s, const Block& b, Vec<T> base) {
    Vec<T> sum{};
    for (int k = b.row0; k < b.row1; ++k) {
      const Vec<T> p = exp<T>(load(s + k * kTile) - base);
      sum += p;
      store(s + k * kTile, p);
    }
    return sum;
  }
  static JFT_SELF Vec<T> parts_of_weights_of_lanes(T* s, const Block& b, Vec<T> base) {
    Vec<T> sum{};
    for (int r = b.row0; r < b.row1; r += kTerms) {
      for (int k = r; k < r + kTileSide; ++k) {
        T *const first = s + k * kTile, *const second = first + kTileSide * kTile;
        const Vec<T> p = k < b.row1 ? exp<T>(load(first) - base) : Vec<T>{};
        const Vec<T> p2 = k + kTileSide < b.row1 ? exp<T>(load(second) - base) : Vec<T>{};
        sum += p + p2;
        Pairs high, low;
        jft::cpu::JFT_ISA::split(p, p2, high, low);
        store_pairs(first, high);
        store_pairs(second, low);
      }
    }
    return sum;
  }
};

template <typename T>
struct AmxBackward {
  using Registers = TileRegisters;
  static constexpr int kRowStep = kTerms;
  int64_t D, Dv, Dt, Dvt, ldk;
  uint32_t *kt, *vt, *k;    // pairs of features [Dt / 2][kTile]; pairs of rows [kTile / 2][Dt]
  uint32_t* k_clean;        // k without the non-finite rows that a tile does not see
  uint16_t *k_rows, *copy;  // as they lie in memory: k, and anything on its way
  uint16_t *q, *d_o;        // [kTile][Dt], [kTile][Dvt]
  uint16_t *qt, *dot;       // rows as terms [Dt][kTile], [Dvt][kTile]
  T* parts;                 // of dS
  int nk;
  bool k_nonfinite;

  AmxBackward(Arena<T>& a, int64_t d, int64_t dv)
      : D(d),
        Dv(dv),
        Dt(whole_terms(d)),
        Dvt(whole_terms(dv)),
        ldk(padded(d)),
        nk(0),
        k_nonfinite(false) {
    kt = take_pairs(a, Dt / 2 * kTile);
    vt = take_pairs(a, Dvt / 2 * kTile);
    k = take_pairs(a, kTile / 2 * Dt);
    k_clean = take_pairs(a, kTile / 2 * Dt);
    k_rows = take_bf16(a, kTile * Dt);
    copy = take_bf16(a, kTile * (Dt > Dvt ? Dt : Dvt));
    q = take_bf16(a, kTile * Dt);
    d_o = take_bf16(a, kTile * Dvt);
    qt = take_bf16(a, Dt * kTile);
    dot = take_bf16(a, Dvt * kTile);
    parts = a.take(kLogitTile);
  }
  void load_keys(const Piece& keys, const Piece& values) {
    copy_bf16(values, ~uint64_t{0}, copy);
    pairs_of_features(copy, Dvt, vt);
    copy_bf16(keys, ~uint64_t{0}, k_rows);
    pairs_of_features(k_rows, Dt, kt);
    pairs_of_rows(k_rows, Dt, k);
    nk = keys.rows;
    k_nonfinite = false;
    for (int64_t n = 0; n < kTile * Dt; ++n) k_nonfinite |= (k_rows[n] & 0x7f80u) == 0x7f80u;
  }
  void load_queries(const Piece& queries, const Piece& cotangents, uint64_t keep) {
    copy_bf16(queries, keep, q);
    copy_bf16(cotangents, keep, d_o);
    rows_as_terms(q, Dt, qt);
    rows_as_terms(d_o, Dvt, dot);
  }
  template <typename Epilogue>
  void scores(const Block& b, const Epilogue& epilogue) const {
    product_over_features(q, Dt, kt, b, epilogue);
  }
  template <typename Epilogue>
  void dweights(const Block& b, const Epilogue& epilogue) const {
    product_over_features(d_o, Dvt, vt, b, epilogue);
  }
  // Destroys the weights.
  void add_dv(T* weights, const Block& b, T* dvt) const {
    split_pairs_of_rows(weights, b, weights);
    add_product_of_pairs(Dv, dot, weights, b, dvt);
  }
  void add_dk(const T* ds, const Block& b, T* dkt) const {
    split_pairs_of_rows(ds, b, parts);
    add_product_of_pairs(D, qt, parts, b, dkt);
  }

  void dq(const T* ds, int nq, uint64_t keep, T factor, T* out) const {
    const uint32_t* keys = k;
    if (k_nonfinite && (~keep & low_bits(nk))) {
      __builtin_memcpy(copy, k_rows, static_cast<size_t>(kTile * Dt) * sizeof *copy);
      clear_rows(copy, Dt, nk, keep);
      pairs_of_rows(copy, Dt, k_clean);
      keys = k_clean;
    }
    auto* const high = reinterpret_cast<uint32_t*>(parts);
    auto* const low = high + kLogitTile / 2;
    split_rows(ds, nq, nk, high, low);
    const Left left[2] = {{reinterpret_cast<const uint16_t*>(high), kTile},
                          {reinterpret_cast<const uint16_t*>(low), kTile}};
    const Right b{keys, Dt, kTileSide * Dt}, right[2] = {b, b};
    const int N = static_cast<int>((D + kTileSide - 1) / kTileSide * kTileSide);
    tile_product<2>(nq, N, whole_terms(nk), left, right, false, out, ldk);
    finish(nq, N, out, ldk, StoreScaled<T>{out, ldk, factor});
  }
};

}  // namespace jft::cpu::JFT_ISA
