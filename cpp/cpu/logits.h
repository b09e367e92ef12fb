// The terms of the logits beyond scale * q.k, and the weights' visibility and dropout, on one tile.
// Only tiles that need them come here. The forward holds a tile as [key][query], the backward as
// [query][key]; `rows` below is the first index, the lanes run over the second.
#pragma once

#include "convert.h"
#include "visibility.h"
#include "vmath.h"
#include "workspace.h"

namespace jft::cpu::JFT_ISA {

// s = softcap * tanh(s / softcap). factor = d s_capped / d s.
template <typename T>
struct Softcap {
  T cap, inverse;
  explicit Softcap(const Problem& p)
      : cap(static_cast<T>(p.attrs.softcap)), inverse(static_cast<T>(1.0 / p.attrs.softcap)) {}
  JFT_SELF Vec<T> operator()(Vec<T> s, Vec<T>& factor) const {
    const Vec<T> t = tanh<T>(s * inverse);
    factor = T(1) - t * t;
    return t * cap;
  }
};

// - slope * |i + offset - j|, with the distance of lane n of row r at `first + sign * (n - r)`.
template <typename T>
struct Alibi {
  T slope, first;
  Vec<T> lane;
  Alibi(const Head& f, const Tile& t) {
    slope = static_cast<T>(f.slope);
    first = static_cast<T>(t.i0 + f.pos.offset - t.j0);  // i + offset - j of the tile's corner
    for (int n = 0; n < kLanes<T>; ++n) lane[n] = static_cast<T>(n);
  }
  // Row and lane count from the tile's corner; d_query and d_key are the query and key of lane 0.
  JFT_SELF Vec<T> distance_over_queries(int key, int query) const {
    return absolute(lane + (first + static_cast<T>(query - key)));
  }
  JFT_SELF Vec<T> distance_over_keys(int query, int key) const {
    return absolute((first + static_cast<T>(query - key)) - lane);
  }
  JFT_SELF static Vec<T> absolute(Vec<T> x) { return max(x, -x); }
};

// Finishes the logits [key][query] of one block; `visible` (null: all) and w.bias are the tile's.
template <typename T>
static __attribute__((noinline)) void finish_logits_forward(const Problem& p, const Head& f,
                                                            const Tile& t, const uint64_t* visible,
                                                            const Block& block,
                                                            const ForwardScratch<T>& w,
                                                            T* tile_max) {
  const Softcap<T> softcap(p);
  const Alibi<T> alibi(f, t);
  const Vec<T> hidden = splat<T>(-__builtin_inf());
  Prefetch next_bias;
  if (f.bias)
    next_bias = Prefetch(piece(p, p.in[kBias], f.b, f.h, t.i0, t.nq, t.j0 + kTile, kTile));
  for (int n = block.lane0; n < block.lane1; n += kLanes<T>) {
    Vec<T> top = load(tile_max + n);
    for (int k = block.row0; k < block.row1; ++k) {
      T* at = w.s + k * kTile + n;
      Vec<T> s = load(at), unused;
      if (f.softcap) s = softcap(s, unused);
      if (f.bias) s += load(w.bias + k * kTile + n);
      if (f.alibi) s = fma(splat<T>(-alibi.slope), alibi.distance_over_queries(k, n), s);
      if (visible) s = select(lane_mask(visible[k] >> n, at), s, hidden);
      store(at, s);
      top = max(s, top);
      if (n == 0) next_bias(k);
    }
    store(tile_max + n, top);
  }
}

// Drops weights after they entered the row sums: P^T * Z^T.
template <typename T>
static __attribute__((noinline)) void drop_forward(const Problem& p, const uint64_t* keep,
                                                   const Block& block, T* weights) {
  const T z = static_cast<T>(dropout_scale(p));
  for (int k = block.row0; k < block.row1; ++k) {
    for (int n = block.lane0; n < block.lane1; n += kLanes<T>) {
      T* at = weights + k * kTile + n;
      store(at, select(lane_mask(keep[k] >> n, at), load(at) * z, Vec<T>{}));
    }
  }
}

}  // namespace jft::cpu::JFT_ISA
