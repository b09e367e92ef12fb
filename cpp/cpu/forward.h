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
#include "products.h"
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
static __attribute__((noinline)) void softmax_step(const QueryState<T>& w, T* s,
                                                   const Block& block) {
  for (int n = block.lane0; n < block.lane1; n += kLanes<T>) {
    const Vec<T> old_max = load(w.m + n);
    const Vec<T> new_max = max(load(w.tile_max + n), old_max);
    // A query that has seen nothing keeps m = -inf; subtracting 0 instead keeps NaN out.
    const IVec<T> nothing = new_max == splat<T>(-__builtin_inf());
    const Vec<T> shift = (Vec<T>)((IVec<T>)new_max & ~nothing);
    const Vec<T> rescale = exp<T>(old_max - shift);
    Vec<T> sum{};
    T* at = s + block.row0 * kTile + n;
    for (int k = block.row0; k < block.row1; ++k, at += kTile) {
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
static void start_queries(const Problem& p, const QueryState<T>& w) {
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

// Which operands of the key tile at hand are loaded: the query tiles of a task share them.
struct KeyTile {
  bool k = false, v = false;
};

// One (query tile, key tile) pair.
template <typename T, typename Products>
static void forward_pair(const Problem& p, const Head& f, Tile& t, const ForwardScratch<T>& w,
                         Products& products, int query, KeyTile& keys) {
  const QueryState<T>& state = w.query[query];
  const Seen seen = look(f, t, 0, kTile * f.mask_col);
  if (seen == Seen::kNone) return;
  const int lanes = (t.nq + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const T scale = static_cast<T>(p.attrs.scale);

  Block blocks[4] = {{0, t.nk, 0, lanes}};
  int count = 1;
  uint64_t visible[kTile], keep[kTile];
  uint64_t unseen = 0;  // keys among the blocks' rows that no query of the tile sees
  if (seen == Seen::kSome) {
    __builtin_memcpy(visible, t.row, sizeof visible);
    transpose_bits(visible);
    count = plan_blocks<T, Products::kRowStep>(visible, t.nk, lanes, blocks);
    for (int n = 0; n < count; ++n) unseen |= low_bits(blocks[n].row1) & ~low_bits(blocks[n].row0);
    unseen &= ~t.keys;
  }
  if (f.threshold) {
    dropout_bits(f, t, keep);
    transpose_bits(keep);
  }
  if (f.bias) {
    load_transposed(piece(p, p.in[kBias], f.b, f.h, t.i0, t.nq, t.j0, t.nk), w.bias);
  }

  if (!keys.k) products.load_k(piece(p, p.in[kK], f.b, f.h / p.G, t.j0, t.nk, 0, p.D));
  keys.k = true;
  // Values that nobody sees may be NaN, and 0 * NaN is NaN. The next query tile may see them.
  if (unseen || !keys.v) {
    const Piece v = piece(p, p.in[kV], f.b, f.h / p.G, t.j0, t.nk, 0, p.Dv);
    products.load_v(v, unseen ? t.keys : ~uint64_t{0});
  }
  keys.v = unseen == 0;

  for (int n = 0; n < kTile; ++n) state.tile_max[n] = static_cast<T>(-__builtin_inf());
  for (int n = 0; n < count; ++n) {
    const Block& b = blocks[n];
    T* const s = w.s + b.row0 * kTile + b.lane0;

    // S^T = scale * K Q^T
    if (seen == Seen::kAll && f.plain()) {
      products.scores(query, b, StoreScaledMax<T>{s, state.tile_max, scale});
    } else {
      products.scores(query, b, StoreScaled<T>{s, kTile, scale});
      finish_logits_forward(p, f, t, seen == Seen::kSome ? visible : nullptr, b, w, state.tile_max);
    }

    // P^T = exp(S^T - m')
    if constexpr (Products::kOwnSoftmax) {
      products.softmax(query, state, w.s, b, f.threshold != 0);
    } else {
      softmax_step(state, w.s, b);
    }
    if (f.threshold) drop_forward(p, keep, b, w.s);

    // O^T = O^T * exp(m - m') + V^T P^T
    products.output(w.s, b,
                    RescaleAccumulate<T>{state.o + b.lane0, kTile, state.rescale + b.lane0});
  }
}

template <typename T, template <typename> class Products>
static void forward_tile(const ForwardJob& job, int64_t task, void* memory) {
  const Problem& p = *job.p;
  Arena<T> arena{static_cast<T*>(memory)};
  const ForwardScratch<T> w(arena, p.Dv);
  Products<T> products(arena, p.D, p.Dv);
  const typename Products<T>::Registers registers;

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
    const int query = static_cast<int>((i0 - begin) / kTile);
    products.load_q(query, piece(p, p.in[kQ], f.b, f.h, i0, rows_of(i0), 0, p.D));
    start_queries(p, w.query[query]);
  }
  const Range keys = visible_keys_any(f.pos, begin, end);
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += kTile) {
    KeyTile key_tile;
    for (int64_t i0 = begin; i0 < end; i0 += kTile) {
      Tile t;
      t.i0 = i0;
      t.nq = rows_of(i0);
      t.j0 = j0;
      t.nk = static_cast<int>(keys.end - j0 < kTile ? keys.end - j0 : kTile);
      forward_pair(p, f, t, w, products, static_cast<int>((i0 - begin) / kTile), key_tile);
    }
  }
  for (int64_t i0 = begin; i0 < end; i0 += kTile) {
    const int query = static_cast<int>((i0 - begin) / kTile);
    if constexpr (Products<T>::kOwnSoftmax) products.finish_sums(query, w.query[query]);
    finish_queries(p, f, i0, rows_of(i0), w.query[query]);
  }
}

}  // namespace jft::cpu::JFT_ISA
