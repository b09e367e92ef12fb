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
  int64_t ld;  // of pairs
};

// R x C tiles of sum_n A[n] B[n], n < kParts, into registers 0.., and from there to `c`.
template <int R, int C, int kParts>
JFT_INLINE void tile_block(int64_t terms, const Left (&a)[kParts], const Right (&b)[kParts], int m,
                           int n, float* c, int64_t ldc) {
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && C > 1) _tile_zero(3);
  for (int64_t k = 0; k < terms; k += kTerms) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const uint16_t* left = a[part].data + m * a[part].ld + k;
      const uint32_t* right = b[part].data + k / 2 * b[part].ld + n;
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
  _tile_stored(0, c, ldc * 4);
  if (C > 1) _tile_stored(1, c + kTileSide, ldc * 4);
  if (R > 1) _tile_stored(2, c + kTileSide * ldc, ldc * 4);
  if (R > 1 && C > 1) _tile_stored(3, c + kTileSide * ldc + kTileSide, ldc * 4);
}

// The sums of one block go to a stage of float32 and from there through the epilogue.
template <int R, int C, int kParts, typename Epilogue>
JFT_INLINE void staged_block(int rows, int64_t terms, const Left (&a)[kParts],
                             const Right (&b)[kParts], int m, int n, const Epilogue& epilogue) {
  constexpr int kStageRow = C * kTileSide;
  alignas(64) float stage[R * kTileSide * kStageRow];
  tile_block<R, C, kParts>(terms, a, b, m, n, stage, kStageRow);
  TileRegisters::compiler_fence();
  constexpr int kGroup = 8;
  int r = 0;
  for (; r + kGroup <= rows; r += kGroup) {
    Vec<float> acc[kGroup][C];
#pragma GCC unroll 8
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < C; ++v) acc[i][v] = load(stage + (r + i) * kStageRow + v * kTileSide);
    }
    epilogue.template apply<kGroup, C>(acc, m + r, n);
  }
  for (; r < rows; ++r) {
    Vec<float> acc[1][C];
#pragma GCC unroll 2
    for (int v = 0; v < C; ++v) acc[0][v] = load(stage + r * kStageRow + v * kTileSide);
    epilogue.template apply<1, C>(acc, m + r, n);
  }
}

// C = sum of A[n] B[n], M x N of it (N in whole vectors) through the epilogue. `terms` is a
// multiple of kTerms; A and B are readable in whole tiles.
template <int kParts, typename Epilogue>
__attribute__((noinline)) void tile_product(int M, int N, int64_t terms, const Left (&a)[kParts],
                                            const Right (&b)[kParts], const Epilogue& epilogue) {
  TileRegisters::compiler_fence();
  for (int n = 0; n < N; n += 2 * kTileSide) {
    const bool wide = n + kTileSide < N;
    for (int m = 0; m < M; m += 2 * kTileSide) {
      const int rows = M - m < 2 * kTileSide ? M - m : 2 * kTileSide;
      if (rows > kTileSide && wide) {
        staged_block<2, 2, kParts>(rows, terms, a, b, m, n, epilogue);
      } else if (rows > kTileSide) {
        staged_block<2, 1, kParts>(rows, terms, a, b, m, n, epilogue);
      } else if (wide) {
        staged_block<1, 2, kParts>(rows, terms, a, b, m, n, epilogue);
      } else {
        staged_block<1, 1, kParts>(rows, terms, a, b, m, n, epilogue);
      }
    }
  }
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
  const auto* base = static_cast<const uint16_t*>(src.data);
  const int64_t ld = whole_terms(src.cols);
  for (int r = 0; r < kTile; ++r) {
    const bool there = r < src.rows && ((keep >> r) & 1);
    for (int c = 0; c < ld; c += kTerms) {
      const auto mask = static_cast<__mmask32>(there ? low_bits(src.cols - c) : 0);
      const __m512i x = _mm512_maskz_loadu_epi16(mask, base + (there ? r * src.row : 0) + c);
      _mm512_storeu_si512(dst + r * ld + c, x);
    }
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

// B over the rows [row0, row1) of a logit tile (row0 a multiple of kTerms) and all of the block's
// lanes, both parts; zero from row1 to whole terms.
static __attribute__((noinline)) void split_pairs_of_rows(const float* src, const Block& b,
                                                          uint32_t* high, uint32_t* low) {
  for (int r = b.row0; r < b.row1; r += kTerms) {
    for (int i = 0; i < kTileSide; ++i) {
      const int first = r + i, second = first + kTileSide;
      for (int n = b.lane0; n < b.lane1; n += kTileSide) {
        const Vec<float> x = first < b.row1 ? load(src + first * kTile + n) : Vec<float>{};
        const Vec<float> y = second < b.row1 ? load(src + second * kTile + n) : Vec<float>{};
        Pairs h, l;
        split(x, y, h, l);
        store_pairs(high + (r / 2 + i) * kTile + n, h);
        store_pairs(low + (r / 2 + i) * kTile + n, l);
      }
    }
  }
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

template <typename T>
struct AmxForward {
  using Registers = TileRegisters;
  static constexpr int kRowStep = kTerms;
  int64_t D, Dv, Dt, Dvt;    // Dt, Dvt: in whole terms
  uint32_t* q[kQueryTiles];  // pairs of features [Dt / 2][kTile]
  uint16_t *k, *vt;          // [kTile][Dt]; rows as terms [Dvt][kTile]
  uint16_t* copy;
  uint32_t *high, *low;  // the parts of P^T: [kTile / 2][kTile]

  AmxForward(Arena<T>& a, int64_t d, int64_t dv)
      : D(d), Dv(dv), Dt(whole_terms(d)), Dvt(whole_terms(dv)) {
    for (uint32_t*& tile : q) tile = take_pairs(a, Dt / 2 * kTile);
    k = take_bf16(a, kTile * Dt);
    vt = take_bf16(a, Dvt * kTile);
    copy = take_bf16(a, kTile * (Dt > Dvt ? Dt : Dvt));
    high = take_pairs(a, kLogitTile / 2);
    low = take_pairs(a, kLogitTile / 2);
  }
  void load_q(int tile, const Piece& src) {
    copy_bf16(src, ~uint64_t{0}, copy);
    pairs_of_features(copy, Dt, q[tile]);
  }
  void load_k(const Piece& src) { copy_bf16(src, ~uint64_t{0}, k); }
  void load_v(const Piece& src, uint64_t keep) {
    copy_bf16(src, keep, copy);
    rows_as_terms(copy, Dvt, vt);
  }
  template <typename Epilogue>
  void scores(int tile, const Block& b, const Epilogue& epilogue) const {
    const Left left[1] = {{k + b.row0 * Dt, Dt}};
    const Right right[1] = {{q[tile] + b.lane0, kTile}};
    tile_product<1>(b.row1 - b.row0, b.lane1 - b.lane0, Dt, left, right, epilogue);
  }
  template <typename Epilogue>
  void output(const T* weights, const Block& b, const Epilogue& epilogue) const {
    split_pairs_of_rows(weights, b, high, low);
    const int64_t corner = b.row0 / 2 * kTile + b.lane0;
    const Left a{vt + b.row0, kTile}, left[2] = {a, a};
    const Right right[2] = {{high + corner, kTile}, {low + corner, kTile}};
    tile_product<2>(static_cast<int>(Dv), b.lane1 - b.lane0, whole_terms(b.row1 - b.row0), left,
                    right, epilogue);
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
  uint32_t *high, *low;     // the parts of P or dS
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
    high = take_pairs(a, kLogitTile / 2);
    low = take_pairs(a, kLogitTile / 2);
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
    over_features(q, Dt, kt, b, epilogue);
  }
  template <typename Epilogue>
  void dweights(const Block& b, const Epilogue& epilogue) const {
    over_features(d_o, Dvt, vt, b, epilogue);
  }
  void add_dv(const T* weights, const Block& b, T* dvt) const { add(Dv, dot, weights, b, dvt); }
  void add_dk(const T* ds, const Block& b, T* dkt) const { add(D, qt, ds, b, dkt); }

  void dq(const T* ds, int nq, uint64_t keep, T factor, T* out) const {
    const uint32_t* keys = k;
    if (k_nonfinite && (~keep & low_bits(nk))) {
      __builtin_memcpy(copy, k_rows, static_cast<size_t>(kTile * Dt) * sizeof *copy);
      clear_rows(copy, Dt, nk, keep);
      pairs_of_rows(copy, Dt, k_clean);
      keys = k_clean;
    }
    split_rows(ds, nq, nk, high, low);
    const Left left[2] = {{reinterpret_cast<const uint16_t*>(high), kTile},
                          {reinterpret_cast<const uint16_t*>(low), kTile}};
    const Right b{keys, Dt}, right[2] = {b, b};
    tile_product<2>(nq, static_cast<int>((D + kTileSide - 1) / kTileSide * kTileSide),
                    whole_terms(nk), left, right, StoreScaled<T>{out, ldk, factor});
  }

 private:
  template <typename Epilogue>
  static void over_features(const uint16_t* rows, int64_t features, const uint32_t* keys,
                            const Block& b, const Epilogue& epilogue) {
    const Left left[1] = {{rows + b.row0 * features, features}};
    const Right right[1] = {{keys + b.lane0, kTile}};
    tile_product<1>(b.row1 - b.row0, b.lane1 - b.lane0, features, left, right, epilogue);
  }
  void add(int64_t features, const uint16_t* rows, const T* tile, const Block& b, T* sum) const {
    split_pairs_of_rows(tile, b, high, low);
    const int64_t corner = b.row0 / 2 * kTile + b.lane0;
    const Left a{rows + b.row0, kTile}, left[2] = {a, a};
    const Right right[2] = {{high + corner, kTile}, {low + corner, kTile}};
    tile_product<2>(static_cast<int>(features), b.lane1 - b.lane0, whole_terms(b.row1 - b.row0),
                    left, right, Accumulate<T>{sum + b.lane0, kTile});
  }
};

}  // namespace jft::cpu::JFT_ISA
