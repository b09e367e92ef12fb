// The pass before the backward: delta of every row, dsinks, and dq of rows that no key tile meets.
#pragma once

#include "backward.h"

namespace jft::cpu::JFT_ISA {

// sums[r] = sum_j P_rj Z_rj dP_rj, which is rowsum(o * do) without the rounding of o, for a query
// tile whose keys all lie in the tile at j0; totals[r] = sum_j P_rj.
template <typename T>
static void delta_from_weights(const BackwardJob& job, const Head& f, int64_t i0, int nq,
                               int64_t j0, const BackwardScratch<T>& w, VectorBackward<T>& products,
                               T* sums, T* totals) {
  const Problem& p = *job.p;
  const int nk = static_cast<int>(p.Sk - j0 < kTile ? p.Sk - j0 : kTile);
  const int lanes = (nk + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  for (int r = 0; r < nq; ++r) sums[r] = totals[r] = 0;
  RowFacts<T> rows;
  load_row_facts(job, f, i0, nq, rows);
  Tile t;
  t.i0 = i0;
  t.j0 = j0;
  t.nq = nq;
  t.nk = nk;
  const Seen seen = look(f, t, rows.empty, 0);
  if (seen == Seen::kNone) return;
  if (seen == Seen::kAll) {
    for (int r = 0; r < nq; ++r) t.row[r] = low_bits(nk);
  }
  products.load_keys(piece(p, p.in[kK], f.b, f.h / p.G, j0, nk, 0, p.D),
                     piece(p, p.in[kV], f.b, f.h / p.G, j0, nk, 0, p.Dv));
  products.load_queries(piece(p, p.in[kQ], f.b, f.h, i0, nq, 0, p.D),
                        piece(p, p.in[kDO], f.b, f.h, i0, nq, 0, p.Dv), ~uint64_t{0});
  Rows<T> bias{w.bias, kTile};
  if (f.bias) load_rows(piece(p, p.in[kBias], f.b, f.h, i0, nq, j0, nk), w.bias, kTile);
  uint64_t keep[kTile];
  if (f.threshold) dropout_bits(f, t, keep);

  const Block whole{0, nq, 0, lanes};
  products.scores(whole, StoreScaled<T>{w.p, kTile, static_cast<T>(p.attrs.scale)});
  weights_general(p, f, t, rows, f.threshold ? keep : nullptr, whole, bias, w);
  products.dweights(whole, StoreScaled<T>{w.ds, kTile, T(1)});
  const T* weights = f.threshold ? w.pz : w.p;
  for (int r = 0; r < nq; ++r) {
    Vec<T> sum{}, total{};
    for (int n = 0; n < lanes; n += kLanes<T>) {
      const int at = r * kTile + n;
      const auto seen_lanes = lane_mask(t.row[r] >> n, w.p);
      sum += select(seen_lanes, load(weights + at) * load(w.ds + at), Vec<T>{});
      total += select(seen_lanes, load(w.p + at), Vec<T>{});
    }
    sums[r] = sum_lanes<T>(sum);
    totals[r] = sum_lanes<T>(total);
  }
}

// delta = rowsum(o * do) - dL of one query tile, its share of dsinks, and zeros for the dq of
// queries that no key tile will meet.
template <typename T>
static void delta_tile(const BackwardJob& job, int64_t task, void* memory) {
  const Problem& p = *job.p;
  Arena<T> arena{static_cast<T*>(memory)};
  const BackwardScratch<T> w(arena, p.D, p.Dv);
  VectorBackward<T> products(arena, p.D, p.Dv);
  T* const o_rows = arena.take(kTile * w.ldv);
  const int64_t i = task % job.q_tiles, head = task / job.q_tiles;
  const int64_t h = head % p.Hq, b = head / p.Hq, i0 = i * kTile;
  const int nq = static_cast<int>(p.Sq - i0 < kTile ? p.Sq - i0 : kTile);
  const Head f = head_of(p, b, h);
  const auto row_values = [&](Operand op) {
    return static_cast<const T*>(piece(p, p.in[op], b, h, i0, nq, 0, 1).data);
  };
  const T *m = row_values(kRowMax), *c = row_values(kRowLogSum);
  const T* dl = p.in[kDLse].data ? row_values(kDLse) : nullptr;
  T* delta = static_cast<T*>(job.delta) + head * p.Sq + i0;

  load_rows(piece(p, p.in[kO], b, h, i0, nq, 0, p.Dv), o_rows, w.ldv);
  load_rows(piece(p, p.in[kDO], b, h, i0, nq, 0, p.Dv), products.do_scratch, w.ldv);
  const Range meets = key_tiles_of(f, i0, nq);
  // o came back rounded. Where few keys share a row, that error in delta shows in 16-bit gradients
  // (causal: 1.10 x the rounding floor of dk, 1.03 x with this), and it is cheap to do better.
  const bool exact = byte_width(p.dtype) == 2 && meets.end - meets.begin == 1;
  T sums[kTile], totals[kTile];
  if (exact) delta_from_weights(job, f, i0, nq, meets.begin * kTile, w, products, sums, totals);

  T dsink = 0;
  for (int r = 0; r < nq; ++r) {
    Vec<T> sum{};
    IVec<T> nonzero{};
    for (int64_t d = 0; d < p.Dv; d += kLanes<T>) {
      const Vec<T> o = load(o_rows + r * w.ldv + d);
      nonzero |= o != Vec<T>{};
      sum = fma(o, load(products.do_scratch + r * w.ldv + d), sum);
    }
    // A row that sees nothing (its L is the sink) has o = 0: its do must not count, even if NaN.
    bool zero_row = true;
    for (int n = 0; n < kLanes<T>; ++n) zero_row &= nonzero[n] == 0;
    const bool skip = c[r] >= static_cast<T>(kEmptyRow / 2) || !(exact || job.dsink_part);
    const double sink_weight =
        skip ? 0 : __builtin_exp((f.sink - static_cast<double>(m[r])) - static_cast<double>(c[r]));
    // A ring hands over the residual of more keys than this call has: the weights then sum to less.
    const double missing = 1 - sink_weight - static_cast<double>(exact ? totals[r] : T(0));
    const bool whole = exact && missing < 1e-3;
    const T dot = whole ? sums[r] : zero_row ? T(0) : sum_lanes<T>(sum);
    delta[r] = dot - (dl ? dl[r] : T(0));
    if (job.dsink_part && sink_weight > 0) dsink -= static_cast<T>(sink_weight) * delta[r];
  }
  if (job.dsink_part) static_cast<T*>(job.dsink_part)[task] = dsink;

  if (meets.begin == meets.end && !job.dq_across_units) {
    __builtin_memset(w.dq, 0, sizeof(T) * static_cast<size_t>(kTile * w.ldk));
    store_rows(w.dq, w.ldk, piece(p, p.out[kResDQ], b, h, i0, nq, 0, p.D));
  }
}

}  // namespace jft::cpu::JFT_ISA
