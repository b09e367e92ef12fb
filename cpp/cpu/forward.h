// Forward pass of a few tiles of queries: FlashAttention-2 with the queries in the vector lanes.
//
//   for each tile of keys that some query of the task sees, for each of the task's query tiles:
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

// S^T [key][query] in `s` becomes P^T in place; updates m and l, fills `rescale` with exp(m - m').
template <typename T>
static __attribute__((noinline)) void softmax_step(const QueryState<T>& w, T* s, int nk,
                                                   int lanes) {
  for (int n = 0; n < lanes; n += kLanes<T>) {
    const Vec<T> old_max = load(w.m + n);
    const Vec<T> new_max = max(load(w.tile_max + n), old_max);
    // A query that has seen nothing keeps m = -inf; subtracting 0 instead keeps NaN out.
    const IVec<T> nothing = new_max == splat<T>(-__builtin_inf());
    const Vec<T> shift = (Vec<T>)((IVec<T>)new_max & ~nothing);
    const Vec<T> rescale = exp<T>(old_max - shift);
    Vec<T> sum{};
    T* at = s + n;
    for (int k = 0; k < nk; ++k, at += kTile) {
      const Vec<T> p = exp<T>(load(at) - shift);
      sum += p;
      store(at, p);
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
static void finish_rows(const QueryState<T>& w, const Head& f, T* row_max, T* row_log_sum, int nq) {
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
static void start_queries(const Problem& p, const Head& f, int64_t i0, int nq,
                          const QueryState<T>& w) {
  load_transposed(piece(p, p.in[kQ], f.b, f.h, i0, nq, 0, p.D), w.q);
  for (int n = 0; n < kTile; ++n) {
    w.m[n] = static_cast<T>(-__builtin_inf());
    w.l[n] = 0;
  }
  __builtin_memset(w.o, 0, sizeof(T) * static_cast<size_t>(p.Dv * kTile));
}

template <typename T>
static void finish_queries(const Problem& p, const Head& f, int64_t i0, int nq,
                           const QueryState<T>& w) {
  const auto row_values = [&](Result slot) {
    return static_cast<T*>(piece(p, p.out[slot], f.b, f.h, i0, nq, 0, 1).data);
  };
  finish_rows(w, f, row_values(kResRowMax), row_values(kResRowLogSum), nq);
  store_transposed(w.o, w.rescale, piece(p, p.out[kResO], f.b, f.h, i0, nq, 0, p.Dv));
}

template <typename T>
static void forward_tile(const ForwardJob& job, int64_t task, void* memory) {
  const Problem& p = *job.p;
  Arena<T> arena{static_cast<T*>(memory)};
  const ForwardScratch<T> w(arena, p.D, p.Dv);
  const T scale = static_cast<T>(p.attrs.scale);

  // Later queries see more keys under a causal rule: the heavy tasks go first.
  constexpr int64_t kQueries = int64_t{kQueryTiles} * kTile;
  const int64_t begin = (job.tasks_per_head - 1 - task % job.tasks_per_head) * kQueries;
  const int64_t end = begin + kQueries < p.Sq ? begin + kQueries : p.Sq;
  const int64_t head = task / job.tasks_per_head;
  const Head f = head_of(p, head / p.Hq, head % p.Hq);
  const auto rows_of = [&](int64_t i0) {
    return static_cast<int>(end - i0 < kTile ? end - i0 : kTile);
  };

  for (int64_t i0 = begin; i0 < end; i0 += kTile) {
    start_queries(p, f, i0, rows_of(i0), w.query[(i0 - begin) / kTile]);
  }
  const Range keys = visible_keys_any(f.pos, begin, end);
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += kTile) {
    const int nk = static_cast<int>(keys.end - j0 < kTile ? keys.end - j0 : kTile);
    Rows<T> k{nullptr, 0}, v{nullptr, 0};  // fetched for the first query tile that sees them
    for (int64_t i0 = begin; i0 < end; i0 += kTile) {
      const QueryState<T>& state = w.query[(i0 - begin) / kTile];
      Tile tile;
      tile.i0 = i0;
      tile.nq = rows_of(i0);
      tile.j0 = j0;
      tile.nk = nk;
      const int lanes = (tile.nq + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
      const Seen seen = look(f, tile, 0);
      if (seen == Seen::kNone) continue;

      // S^T = scale * K Q^T
      if (!k.data) {
        k = tile_rows(piece(p, p.in[kK], f.b, f.h / p.G, j0, nk, 0, p.D), w.k, w.ldk, false);
      }
      for (int n = 0; n < kTile; ++n) state.tile_max[n] = static_cast<T>(-__builtin_inf());
      if (seen == Seen::kAll && f.plain()) {
        product<Order::kRowMajor>(nk, lanes, p.D, k.data, k.ld, state.q, kTile,
                                  StoreScaledMax<T>{w.s, state.tile_max, scale});
      } else {
        product<Order::kRowMajor>(nk, lanes, p.D, k.data, k.ld, state.q, kTile,
                                  StoreScaled<T>{w.s, kTile, scale});
        finish_logits_forward(p, f, tile, seen, lanes, w, state.tile_max);
      }

      // P^T = exp(S^T - m')
      softmax_step(state, w.s, nk, lanes);
      if (f.threshold) drop_forward(p, f, tile, lanes, w.s);

      // O^T = O^T * exp(m - m') + V^T P^T
      const Piece v_piece = piece(p, p.in[kV], f.b, f.h / p.G, j0, nk, 0, p.Dv);
      Rows<T> visible_v = v;
      if (seen == Seen::kSome) {  // a value that nobody here sees may be NaN, and 0 * NaN is NaN
        load_rows(v_piece, w.v, w.ldv);
        clear_rows(w.v, w.ldv, nk, tile.keys);
        visible_v = {w.v, w.ldv};
        v = {nullptr, 0};
      } else if (!v.data) {
        visible_v = v = tile_rows(v_piece, w.v, w.ldv, false);
      }
      product<Order::kColMajor>(static_cast<int>(p.Dv), lanes, nk, visible_v.data, visible_v.ld,
                                w.s, kTile, RescaleAccumulate<T>{state.o, kTile, state.rescale});
    }
  }
  for (int64_t i0 = begin; i0 < end; i0 += kTile) {
    finish_queries(p, f, i0, rows_of(i0), w.query[(i0 - begin) / kTile]);
  }
}

}  // namespace jft::cpu::JFT_ISA
