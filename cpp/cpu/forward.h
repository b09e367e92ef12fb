// Forward pass of one tile of queries: FlashAttention-2 with the queries in the vector lanes.
//
//   for each tile of keys that some query of the tile sees:
//     S^T = scale * K Q^T               softcap, bias, alibi, visibility
//     m'  = max(m, colmax S^T)          per query, so per lane
//     P^T = exp(S^T - m')               l = l * exp(m - m') + colsum P^T
//     O^T = O^T * exp(m - m') + V^T P^T
//   o = (O^T / l)^T,  row_max = m,  row_log_sum = ln l
#pragma once

#include "convert.h"
#include "jobs.h"
#include "logits.h"
#include "microkernel.h"
#include "visibility.h"
#include "vmath.h"
#include "workspace.h"

namespace jft::cpu::JFT_ISA {

// c = factor * AB, and the running maximum of every column.
template <typename T>
struct StoreScaledMax {
  T* c;
  T* column_max;
  T factor;

  template <int R, int N>
  JFT_SELF void apply(Vec<T> (&acc)[R][N], int m, int n) const {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      const int at = n + v * kLanes<T>;
      Vec<T> top = load(column_max + at);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec<T> s = acc[r][v] * factor;
        store(c + (m + r) * kTile + at, s);
        top = max(s, top);
      }
      store(column_max + at, top);
    }
  }
};

// S^T [key][query] becomes P^T in place; updates m and l, fills `rescale` with exp(m - m').
template <typename T>
static __attribute__((noinline)) void softmax_step(const ForwardScratch<T>& w, int nk, int lanes) {
  for (int n = 0; n < lanes; n += kLanes<T>) {
    const Vec<T> old_max = load(w.m + n);
    const Vec<T> new_max = max(load(w.tile_max + n), old_max);
    // A query that has seen nothing keeps m = -inf; subtracting 0 instead keeps NaN out.
    const IVec<T> nothing = new_max == splat<T>(-__builtin_inf());
    const Vec<T> shift = (Vec<T>)((IVec<T>)new_max & ~nothing);
    const Vec<T> rescale = exp<T>(old_max - shift);
    Vec<T> sum{};
    T* s = w.s + n;
    for (int k = 0; k < nk; ++k, s += kTile) {
      const Vec<T> p = exp<T>(load(s) - shift);
      sum += p;
      store(s, p);
    }
    store(w.m + n, new_max);
    store(w.l + n, fma(load(w.l + n), rescale, sum));
    store(w.rescale + n, rescale);
  }
}

JFT_INLINE float natural_log(float x) { return __builtin_logf(x); }
JFT_INLINE double natural_log(double x) { return __builtin_log(x); }

// Turns m and l into the residual; leaves in `rescale` the factor of every row of O^T.
template <typename T>
static void finish_rows(const ForwardScratch<T>& w, const Head& f, T* row_max, T* row_log_sum,
                        int nq) {
  const T sink = static_cast<T>(f.sink);
  const T kInf = static_cast<T>(__builtin_inf());
  const bool has_sink = sink > -kInf;
  for (int r = 0; r < nq; ++r) {
    const T m = w.m[r] > sink ? w.m[r] : sink;
    T l = w.l[r], factor = 0;
    if (m > -kInf) {
      T shrink = 1;
      if (has_sink) {
        shrink = static_cast<T>(__builtin_exp(static_cast<double>(w.m[r] - m)));
        l = l * shrink + static_cast<T>(__builtin_exp(static_cast<double>(sink - m)));
      }
      factor = shrink / l;
    } else if (l != l) {  // every logit is NaN
      factor = l;
    }
    const bool empty = !(m > -kInf) && l == l;
    row_max[r] = m > -kInf ? m : T(0);
    row_log_sum[r] = empty ? static_cast<T>(kEmptyRow) : natural_log(l);
    w.rescale[r] = factor;
  }
}

template <typename T>
static void forward_tile(const ForwardJob& job, int64_t task, void* memory) {
  const Problem& p = *job.p;
  Arena<T> arena{static_cast<T*>(memory)};
  const ForwardScratch<T> w(arena, p.D, p.Dv);

  // Later query tiles see more keys under a causal rule: the heavy ones go first.
  const int64_t i0 = (job.q_tiles - 1 - task % job.q_tiles) * kTile;
  const int64_t h = task / job.q_tiles % p.Hq, b = task / job.q_tiles / p.Hq;
  const int nq = static_cast<int>(p.Sq - i0 < kTile ? p.Sq - i0 : kTile);
  const int lanes = (nq + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const Head f = head_of(p, b, h);
  const T scale = static_cast<T>(p.attrs.scale);

  load_transposed(piece(p, p.in[kQ], b, h, i0, nq, 0, p.D), w.q);
  for (int n = 0; n < kTile; ++n) {
    w.m[n] = static_cast<T>(-__builtin_inf());
    w.l[n] = 0;
  }
  __builtin_memset(w.o, 0, sizeof(T) * static_cast<size_t>(p.Dv * kTile));

  const Range keys = visible_keys_any(f.pos, i0, i0 + nq);
  Tile tile;
  tile.i0 = i0;
  tile.nq = nq;
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += kTile) {
    const int nk = static_cast<int>(keys.end - j0 < kTile ? keys.end - j0 : kTile);
    tile.j0 = j0;
    tile.nk = nk;
    const Seen seen = look(f, tile, 0);
    if (seen == Seen::kNone) continue;

    // S^T = scale * K Q^T
    load_rows(piece(p, p.in[kK], b, h / p.G, j0, nk, 0, p.D), w.k, w.ldk);
    for (int n = 0; n < kTile; ++n) w.tile_max[n] = static_cast<T>(-__builtin_inf());
    if (seen == Seen::kAll && f.plain()) {
      product<Order::kRowMajor>(nk, lanes, p.D, w.k, w.ldk, w.q, kTile,
                                StoreScaledMax<T>{w.s, w.tile_max, scale});
    } else {
      product<Order::kRowMajor>(nk, lanes, p.D, w.k, w.ldk, w.q, kTile,
                                StoreScaled<T>{w.s, kTile, scale});
      finish_logits_forward(p, f, tile, seen, lanes, w);
    }

    // P^T = exp(S^T - m')
    softmax_step(w, nk, lanes);
    if (f.threshold) drop_forward(p, f, tile, lanes, w.s);

    // O^T = O^T * exp(m - m') + V^T P^T
    load_rows(piece(p, p.in[kV], b, h / p.G, j0, nk, 0, p.Dv), w.v, w.ldv);
    if (seen == Seen::kSome) clear_rows(w.v, w.ldv, nk, tile.keys);
    product<Order::kColMajor>(static_cast<int>(p.Dv), lanes, nk, w.v, w.ldv, w.s, kTile,
                              RescaleAccumulate<T>{w.o, kTile, w.rescale});
  }

  const Tensor &row_max = p.out[kResRowMax], &row_log_sum = p.out[kResRowLogSum];
  finish_rows(w, f, static_cast<T*>(piece(p, row_max, b, h, i0, nq, 0, 1).data),
              static_cast<T*>(piece(p, row_log_sum, b, h, i0, nq, 0, 1).data), nq);
  store_transposed(w.o, w.rescale, piece(p, p.out[kResO], b, h, i0, nq, 0, p.Dv));
}

}  // namespace jft::cpu::JFT_ISA
