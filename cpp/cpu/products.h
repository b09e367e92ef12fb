// The products of both passes on tiles, with their operands, in vectors of the accumulator's type.
// A level with matrix instructions puts its own classes with these members in their place for some
// dtypes (amx.h); everything else of a pass stays as it is.
#pragma once

#include "convert.h"
#include "microkernel.h"
#include "visibility.h"

namespace jft::cpu::JFT_ISA {

// Zeroes the rows of a loaded tile whose bit is off: what nobody sees may be NaN, and 0 * NaN is
// NaN.
template <typename T>
static void clear_rows(T* rows, int64_t ld, int n, uint64_t keep) {
  for (int r = 0; r < n; ++r) {
    if (!((keep >> r) & 1)) __builtin_memset(rows + r * ld, 0, sizeof(T) * static_cast<size_t>(ld));
  }
}

// Whether the loaded tile holds inf or NaN. Its rows are padded with zeros up to whole vectors.
template <typename T>
static bool any_nonfinite(const T* rows, int64_t ld, int n, int64_t features) {
  Vec<T> sum{};
  for (int r = 0; r < n; ++r) {
    for (int64_t d = 0; d < features; d += kLanes<T>) sum += load(rows + r * ld + d) * T(0);
  }
  bool bad = false;  // 0 * inf and 0 * NaN are NaN
  for (int k = 0; k < kLanes<T>; ++k) bad |= sum[k] != T(0);
  return bad;
}

// Rows of a tile as a product reads them; rows whose bit in `keep` is off become zero.
template <typename T>
static Rows<T> kept_rows(const Piece& src, T* scratch, int64_t ld, uint64_t keep) {
  const bool scrub = (~keep & low_bits(src.rows)) != 0;
  const Rows<T> rows = tile_rows(src, scratch, ld, scrub);
  if (scrub) clear_rows(scratch, ld, src.rows, keep);
  return rows;
}

// What a task must hold while it computes products: nothing.
struct NoRegisters {
  NoRegisters() {}
};

// Blocks count rows of keys and lanes of queries.
template <typename T>
struct VectorForward {
  using Registers = NoRegisters;
  static constexpr bool kOwnSoftmax = false;
  static constexpr int kRowStep = 1;  // blocks begin at multiples of this
  int64_t D, Dv, ldk, ldv;
  T* q[kQueryTiles];         // transposed: [D][kTile]
  T *k_scratch, *v_scratch;  // [kTile][padded(D)], [kTile][padded(Dv)]
  Rows<T> k, v;

  VectorForward(Arena<T>& a, int64_t d, int64_t dv)
      : D(d), Dv(dv), ldk(padded(d)), ldv(padded(dv)), k{}, v{} {
    for (T*& tile : q) tile = a.take(D * kTile);
    k_scratch = a.take(kTile * ldk);
    v_scratch = a.take(kTile * ldv);
  }
  void load_q(int tile, const Piece& src) { load_transposed(src, q[tile]); }
  void load_k(const Piece& src) { k = tile_rows(src, k_scratch, ldk, false); }
  void load_v(const Piece& src, uint64_t keep) { v = kept_rows(src, v_scratch, ldv, keep); }

  // K Q^T
  template <typename Epilogue>
  void scores(int tile, const Block& b, const Epilogue& epilogue) const {
    product<Order::kRowMajor>(b.row1 - b.row0, b.lane1 - b.lane0, D, k.data + b.row0 * k.ld, k.ld,
                              q[tile] + b.lane0, kTile, epilogue);
  }
  // V^T P^T
  template <typename Epilogue>
  void output(const T* weights, const Block& b, const Epilogue& epilogue) const {
    product<Order::kColMajor>(static_cast<int>(Dv), b.lane1 - b.lane0, b.row1 - b.row0,
                              v.data + b.row0 * v.ld, v.ld, weights + b.row0 * kTile + b.lane0,
                              kTile, epilogue);
  }
};

// Blocks count rows of queries and lanes of keys.
template <typename T>
struct VectorBackward {
  using Registers = NoRegisters;
  static constexpr int kRowStep = 1;
  int64_t D, Dv, ldk, ldv;
  T *kt, *vt, *k;             // k, v transposed [D][kTile]; k [kTile][padded(D)]
  T* k_clean;                 // k without the non-finite rows that a tile does not see
  T *q_scratch, *do_scratch;  // [kTile][padded(..)]
  Rows<T> q, d_o;
  int nk;
  bool k_nonfinite;

  VectorBackward(Arena<T>& a, int64_t d, int64_t dv)
      : D(d), Dv(dv), ldk(padded(d)), ldv(padded(dv)), q{}, d_o{}, nk(0), k_nonfinite(false) {
    kt = a.take(D * kTile);
    vt = a.take(Dv * kTile);
    k = a.take(kTile * ldk);
    k_clean = a.take(kTile * ldk);
    q_scratch = a.take(kTile * ldk);
    do_scratch = a.take(kTile * ldv);
  }
  void load_keys(const Piece& keys, const Piece& values) {
    load_transposed(keys, kt);
    load_transposed(values, vt);
    load_rows(keys, k, ldk);
    nk = keys.rows;
    k_nonfinite = any_nonfinite(k, ldk, nk, D);
  }
  void load_queries(const Piece& queries, const Piece& cotangents, uint64_t keep) {
    q = kept_rows(queries, q_scratch, ldk, keep);
    d_o = kept_rows(cotangents, do_scratch, ldv, keep);
  }

  // Q K^T
  template <typename Epilogue>
  void scores(const Block& b, const Epilogue& epilogue) const {
    product<Order::kRowMajor>(b.row1 - b.row0, b.lane1 - b.lane0, D, q.data + b.row0 * q.ld, q.ld,
                              kt + b.lane0, kTile, epilogue);
  }
  // dO V^T
  template <typename Epilogue>
  void dweights(const Block& b, const Epilogue& epilogue) const {
    product<Order::kRowMajor>(b.row1 - b.row0, b.lane1 - b.lane0, Dv, d_o.data + b.row0 * d_o.ld,
                              d_o.ld, vt + b.lane0, kTile, epilogue);
  }
  // dV^T += dO^T P (the weights may be destroyed), dK^T += Q^T dS
  void add_dv(const T* weights, const Block& b, T* dvt) const { add(Dv, d_o, weights, b, dvt); }
  void add_dk(const T* ds, const Block& b, T* dkt) const { add(D, q, ds, b, dkt); }

  // factor * dS K of whole tiles. Keys whose bit in `keep` is off have ds = 0, and it stays 0.
  void dq(const T* ds, int nq, uint64_t keep, T factor, T* out) const {
    const T* rows = k;
    if (k_nonfinite && (~keep & low_bits(nk))) {
      __builtin_memcpy(k_clean, k, sizeof(T) * static_cast<size_t>(kTile * ldk));
      clear_rows(k_clean, ldk, nk, keep);
      rows = k_clean;
    }
    product<Order::kRowMajor>(nq, static_cast<int>((D + kLanes<T> - 1) / kLanes<T> * kLanes<T>), nk,
                              ds, kTile, rows, ldk, StoreScaled<T>{out, ldk, factor});
  }

 private:
  static void add(int64_t features, const Rows<T>& rows, const T* tile, const Block& b, T* sum) {
    product<Order::kColMajor>(static_cast<int>(features), b.lane1 - b.lane0, b.row1 - b.row0,
                              rows.data + b.row0 * rows.ld, rows.ld,
                              tile + b.row0 * kTile + b.lane0, kTile,
                              Accumulate<T>{sum + b.lane0, kTile});
  }
};

}  // namespace jft::cpu::JFT_ISA
