// Backward pass of one tile of keys, keys in the vector lanes. delta = rowsum(o * do) - dL comes
// from a pass of its own before.
//
//   for each query head of the group, each tile of queries that sees some of the keys:
//     S  = scale * Q K^T                softcap, bias, alibi, visibility
//     P  = exp(S - m - c)               the forward's weights, exactly
//     dP = dO V^T
//     dS = P * (Z * dP - delta)         dbias, dalibi
//     dV^T += dO^T (P * Z)
//     dS = dS * d softcap
//     dK^T += Q^T dS                    times scale at the end
//     dQ   += scale * dS K              in the order of the key tiles
#pragma once

#include "convert.h"
#include "jobs.h"
#include "logits.h"
#include "ordered.h"
#include "products.h"
#include "visibility.h"
#include "vmath.h"
#include "workspace.h"

namespace jft::cpu::JFT_ISA {

// Row facts of one query tile.
template <typename T>
struct RowFacts {
  T m[kTile], c[kTile], delta[kTile];
  uint64_t empty;  // rows without a softmax: they contribute nothing, whatever do and dL hold
};

template <typename T>
static void load_row_facts(const BackwardJob& job, const Head& f, int64_t i0, int nq,
                           RowFacts<T>& r) {
  const Problem& p = *job.p;
  const auto* m = static_cast<const T*>(piece(p, p.in[kRowMax], f.b, f.h, i0, nq, 0, 1).data);
  const auto* c = static_cast<const T*>(piece(p, p.in[kRowLogSum], f.b, f.h, i0, nq, 0, 1).data);
  const T* delta = static_cast<const T*>(job.delta) + (f.b * p.Hq + f.h) * p.Sq + i0;
  r.empty = 0;
  for (int n = 0; n < nq; ++n) {
    r.m[n] = m[n];
    r.c[n] = c[n];
    r.delta[n] = delta[n];
    r.empty |= static_cast<uint64_t>(c[n] >= static_cast<T>(kEmptyRow / 2)) << n;
  }
}

// P = exp(S - m - c) in place.
template <typename T>
static __attribute__((noinline)) void weights_plain(T* s, const RowFacts<T>& rows, int nq,
                                                    int lanes) {
  for (int r = 0; r < nq; ++r) {
    const Vec<T> m = splat<T>(rows.m[r]), c = splat<T>(rows.c[r]);
    for (int n = 0; n < lanes; n += kLanes<T>) {
      T* at = s + r * kTile + n;
      store(at, exp<T>((load(at) - m) - c));
    }
  }
}

// dS = P * (dP - delta); dP comes in `ds`.
template <typename T>
static __attribute__((noinline)) void dlogits_plain(T* ds, const T* p, const RowFacts<T>& rows,
                                                    int nq, int lanes) {
  for (int r = 0; r < nq; ++r) {
    const Vec<T> delta = splat<T>(rows.delta[r]);
    for (int n = 0; n < lanes; n += kLanes<T>) {
      T* at = ds + r * kTile + n;
      store(at, load(p + r * kTile + n) * (load(at) - delta));
    }
  }
}

// The same two steps with every option, on one block. P goes to w.p, P * Z to w.pz, d softcap to
// w.dsc.
template <typename T>
static __attribute__((noinline)) void weights_general(const Problem& p, const Head& f,
                                                      const Tile& t, const RowFacts<T>& rows,
                                                      const uint64_t* keep, const Block& block,
                                                      const Rows<T>& bias,
                                                      const BackwardScratch<T>& w) {
  const Softcap<T> softcap(p);
  const Alibi<T> alibi(f, t);
  const T z = static_cast<T>(dropout_scale(p));
  Prefetch next_bias;
  if (f.bias)
    next_bias = Prefetch(piece(p, p.in[kBias], f.b, f.h, t.i0 + kTile, kTile, t.j0, t.nk));
  for (int r = block.row0; r < block.row1; ++r) {
    const Vec<T> m = splat<T>(rows.m[r]), c = splat<T>(rows.c[r]);
    if (block.lane0 == 0) next_bias(r);
    for (int n = block.lane0; n < block.lane1; n += kLanes<T>) {
      const int at = r * kTile + n;
      const auto visible = lane_mask(t.row[r] >> n, w.p);
      Vec<T> s = load(w.p + at), factor;
      if (f.softcap) {
        s = softcap(s, factor);
        store(w.dsc + at, select(visible, factor, Vec<T>{}));
      }
      if (f.bias) s += load(bias.data + r * bias.ld + n);
      if (f.alibi) s = fma(splat<T>(-alibi.slope), alibi.distance_over_keys(r, n), s);
      const Vec<T> weight = select(visible, exp<T>((s - m) - c), Vec<T>{});
      store(w.p + at, weight);
      if (keep) {
        store(w.pz + at, select(lane_mask(keep[r] >> n, w.p), weight * z, Vec<T>{}));
      }
    }
  }
}

template <typename T>
static __attribute__((noinline)) void dlogits_general(const BackwardJob& job, const Head& f,
                                                      const Tile& t, const RowFacts<T>& rows,
                                                      const uint64_t* keep, const Block& block,
                                                      const BackwardScratch<T>& w, Vec<T>& dalibi) {
  const Alibi<T> alibi(f, t);
  const T z = static_cast<T>(dropout_scale(*job.p));
  for (int r = block.row0; r < block.row1; ++r) {
    const Vec<T> delta = splat<T>(rows.delta[r]);
    for (int n = block.lane0; n < block.lane1; n += kLanes<T>) {
      const int at = r * kTile + n;
      Vec<T> dp = load(w.ds + at);
      if (keep) dp = select(lane_mask(keep[r] >> n, w.ds), dp * z, Vec<T>{});
      const Vec<T> ds =
          select(lane_mask(t.row[r] >> n, w.ds), load(w.p + at) * (dp - delta), Vec<T>{});
      store(w.ds + at, ds);
      if (job.dalibi_part) dalibi += ds * alibi.distance_over_keys(r, n);
      if (job.dbias_keys) store(w.column + n, load(w.column + n) + ds);
      if (f.softcap) store(w.dsc + at, ds * load(w.dsc + at));
    }
  }
}

template <typename T>
JFT_INLINE T sum_lanes(Vec<T> v) {
  T sum = 0;
  for (int n = 0; n < kLanes<T>; ++n) sum += v[n];
  return sum;
}

// dst(r, c) += src[r * ld + c], dst of type T.
template <typename T>
static void add_rows(const T* src, int64_t ld, const Piece& dst) {
  for (int r = 0; r < dst.rows; ++r) {
    T* d = static_cast<T*>(dst.data) + r * dst.row;
    const T* s = src + r * ld;
    int c = 0;
    for (; c + kLanes<T> <= dst.cols; c += kLanes<T>) store(d + c, load(d + c) + load(s + c));
    for (; c < dst.cols; ++c) d[c] += s[c];
  }
}

// First of the key tiles that meet query tile i, and one past the last.
static inline Range key_tiles_of(const Head& f, int64_t i0, int64_t nq) {
  const Range keys = visible_keys_any(f.pos, i0, i0 + nq);
  if (keys.begin >= keys.end) return {0, 0};
  return {keys.begin / kTile, tiles(keys.end)};
}

// Adds the tile's dq to its sum. Called in the order of the key tiles.
template <typename T>
static void add_dq(const BackwardJob& job, const Head& f, const BackwardScratch<T>& w, int64_t i0,
                   int nq, bool first, bool last) {
  const Problem& p = *job.p;
  Piece sum;
  if (job.dq_in_slots) {
    const int64_t unit = f.b * p.Hkv + f.h / p.G;
    const int64_t row = (unit % job.slots * p.G + f.h % p.G) * p.Sq + i0;
    sum = {static_cast<T*>(job.dq.data) + row * w.ldk,
           job.dq.dtype,
           w.ldk,
           1,
           nq,
           static_cast<int>(p.D)};
  } else {
    sum = piece(p, job.dq, f.b, f.h, i0, nq, 0, p.D);
  }
  const bool overwrite = first && !job.dq_across_units;
  if (job.dq_in_slots && first && last) {  // never leaves this tile
    store_rows(w.dq, w.ldk, piece(p, p.out[kResDQ], f.b, f.h, i0, nq, 0, p.D));
    return;
  }
  if (overwrite) {
    store_rows(w.dq, w.ldk, sum);
  } else {
    add_rows(w.dq, w.ldk, sum);
  }
  if (job.dq_in_slots && last) {
    store_rows(static_cast<T*>(sum.data), w.ldk, piece(p, p.out[kResDQ], f.b, f.h, i0, nq, 0, p.D));
  }
}

// One (query tile, key tile) pair: adds to dk and dv in scratch and leaves dq of the pair in w.dq.
// False if no query sees a key here.
template <typename T, typename Products>
static bool backward_pair(const BackwardJob& job, const Head& f, Tile& t, Products& products,
                          const BackwardScratch<T>& w, Vec<T>& dalibi) {
  const Problem& p = *job.p;
  RowFacts<T> rows;
  load_row_facts(job, f, t.i0, t.nq, rows);
  const Seen seen = look(f, t, rows.empty, kTile * f.mask_row);
  if (seen == Seen::kNone) return false;
  const int lanes = (t.nk + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  const T scale = static_cast<T>(p.attrs.scale);
  const bool plain = seen == Seen::kAll && f.plain();

  Block blocks[4] = {{0, t.nq, 0, lanes}};
  int count = 1;
  uint64_t seeing = ~uint64_t{0}, needed = 0;  // rows that see a key; rows of the blocks
  if (seen == Seen::kSome) {
    count = plan_blocks<T, Products::kRowStep>(t.row, t.nq, lanes, blocks);
    seeing = 0;
    for (int r = 0; r < t.nq; ++r) seeing |= static_cast<uint64_t>(t.row[r] != 0) << r;
    for (int n = 0; n < count; ++n) needed |= low_bits(blocks[n].row1) & ~low_bits(blocks[n].row0);
  } else if (!plain) {
    for (int r = 0; r < t.nq; ++r) t.row[r] = low_bits(t.nk);
  }

  // What takes no part may be NaN, and 0 * NaN is NaN.
  products.load_queries(piece(p, p.in[kQ], f.b, f.h, t.i0, t.nq, 0, p.D),
                        piece(p, p.in[kDO], f.b, f.h, t.i0, t.nq, 0, p.Dv),
                        (needed & ~seeing) != 0 ? seeing : ~uint64_t{0});

  uint64_t keep_words[kTile];
  const uint64_t* keep = nullptr;
  if (f.threshold) {
    dropout_bits(f, t, keep_words);
    keep = keep_words;
  }
  Rows<T> bias{nullptr, 0};
  if (f.bias) {
    const Piece from = piece(p, p.in[kBias], f.b, f.h, t.i0, t.nq, t.j0, t.nk);
    bias = tile_rows(from, w.bias, kTile, from.col == 0 || t.nk != lanes);
  }
  T* const pz = keep ? w.pz : w.p;
  T* const dsc = f.softcap ? w.dsc : w.ds;
  if (seen == Seen::kSome) {  // what lies outside of the blocks
    __builtin_memset(w.ds, 0, sizeof(T) * static_cast<size_t>(kLogitTile));
    if (f.softcap) __builtin_memset(w.dsc, 0, sizeof(T) * static_cast<size_t>(kLogitTile));
  }

  for (int n = 0; n < count; ++n) {
    const Block& b = blocks[n];
    const int64_t corner = b.row0 * kTile + b.lane0;

    // S = scale * Q K^T, P = exp(S - m - c), dP = dO V^T, dS = P * (Z * dP - delta)
    products.scores(b, StoreScaled<T>{w.p + corner, kTile, scale});
    if (plain) {
      weights_plain(w.p, rows, t.nq, lanes);
    } else {
      weights_general(p, f, t, rows, keep, b, bias, w);
    }
    products.dweights(b, StoreScaled<T>{w.ds + corner, kTile, T(1)});
    if (plain) {
      dlogits_plain(w.ds, w.p, rows, t.nq, lanes);
    } else {
      dlogits_general(job, f, t, rows, keep, b, w, dalibi);
    }

    // dV^T += dO^T (P * Z), dK^T += Q^T dS
    products.add_dv(pz, b, w.dvt);
    products.add_dk(dsc, b, w.dkt);
  }

  // dQ = scale * dS K
  products.dq(dsc, t.nq, seen == Seen::kSome ? t.keys : ~uint64_t{0}, scale, w.dq);
  return true;
}

// dbias of one pair, from dS in w.ds.
template <typename T>
static void add_dbias(const BackwardJob& job, const Head& f, const Tile& t,
                      const BackwardScratch<T>& w) {
  const Problem& p = *job.p;
  if (job.dbias_tiles) {
    const Piece dst = piece(p, job.dbias, f.b, f.h, t.i0, t.nq, t.j0, t.nk);
    if (job.dbias_across_units) {
      add_rows(w.ds, kTile, dst);
    } else {
      store_rows(w.ds, kTile, dst);
    }
  } else if (job.dbias_rows) {
    T* sums = static_cast<T*>(job.dbias_rows) + (f.b * p.Hq + f.h) * p.Sq + t.i0;
    for (int r = 0; r < t.nq; ++r) {
      T sum = 0;
      for (int n = 0; n < t.nk; ++n) sum += w.ds[r * kTile + n];
      sums[r] += sum;
    }
  }
}

// Stores or adds the finished dk or dv of a key tile; `sums` is transposed.
template <typename T>
static void put_dkv(const Problem& p, const Tensor& dst, bool add, const T* sums, T factor,
                    int64_t b, int64_t kv_head, int64_t j0, int nk, int64_t features, T* rows,
                    int64_t ld) {
  const Piece to = piece(p, dst, b, kv_head, j0, nk, 0, features);
  T factors[kTile];
  for (T& x : factors) x = factor;
  if (!add) return store_transposed(sums, factors, to);
  const Piece staged{rows, kTypeOf<T>, ld, 1, nk, static_cast<int>(features)};
  store_transposed(sums, factors, staged);
  add_rows(rows, ld, to);
}

template <typename T, template <typename> class Products>
static void backward_tile(const BackwardJob& job, int64_t task, void* memory) {
  const Problem& p = *job.p;
  Arena<T> arena{static_cast<T*>(memory)};
  const BackwardScratch<T> w(arena, p.D, p.Dv);
  Products<T> products(arena, p.D, p.Dv);
  const typename Products<T>::Registers registers;
  const int64_t unit = task / job.k_tiles, j = task % job.k_tiles;
  const int64_t b = unit / p.Hkv, kv_head = unit % p.Hkv;
  const int64_t j0 = j * kTile;
  const int nk = static_cast<int>(p.Sk - j0 < kTile ? p.Sk - j0 : kTile);
  int64_t* const progress = job.progress + task;
  const bool ordered_units = job.dk_across_units || job.dv_across_units || job.dbias_across_units;

  if (job.dq_in_slots && unit >= job.slots) {
    wait_for(job.unit_done + unit - job.slots, job.k_tiles);
  }
  if (job.dq_across_units && unit > 0) wait_for(job.unit_done + unit - 1, job.k_tiles);

  products.load_keys(piece(p, p.in[kK], b, kv_head, j0, nk, 0, p.D),
                     piece(p, p.in[kV], b, kv_head, j0, nk, 0, p.Dv));
  __builtin_memset(w.dkt, 0, sizeof(T) * static_cast<size_t>((p.D + 15) / 16 * 16 * kTile));
  __builtin_memset(w.dvt, 0, sizeof(T) * static_cast<size_t>((p.Dv + 15) / 16 * 16 * kTile));

  for (int64_t g = 0; g < p.G; ++g) {
    const Head f = head_of(p, b, kv_head * p.G + g);
    const Range queries = visible_queries_any(f.pos, j0, j0 + nk);
    Vec<T> dalibi{};
    for (int n = 0; n < kTile; ++n) w.column[n] = 0;
    Tile t;
    t.j0 = j0;
    t.nk = nk;
    for (int64_t i = queries.begin / kTile; i * kTile < queries.end; ++i) {
      t.i0 = i * kTile;
      t.nq = static_cast<int>(p.Sq - t.i0 < kTile ? p.Sq - t.i0 : kTile);
      const bool some = backward_pair(job, f, t, products, w, dalibi);

      const Range meets = key_tiles_of(f, t.i0, t.nq);
      const int64_t step = g * job.q_tiles + i + 1;
      if (j > meets.begin) wait_for(progress - 1, step);
      if (job.dbias_across_units && unit > 0) {
        wait_for(progress - job.k_tiles, (p.G - 1) * job.q_tiles + i + 1);
      }
      if (!some) __builtin_memset(w.dq, 0, sizeof(T) * static_cast<size_t>(kTile * w.ldk));
      if (some || j == meets.begin || j + 1 == meets.end) {
        add_dq(job, f, w, t.i0, t.nq, j == meets.begin, j + 1 == meets.end);
      }
      if (some) add_dbias(job, f, t, w);
      publish(progress, step);
    }
    const int64_t head = b * p.Hq + f.h;
    if (job.dalibi_part) {
      static_cast<T*>(job.dalibi_part)[head * job.k_tiles + j] = -sum_lanes<T>(dalibi);
    }
    if (job.dbias_keys) {
      T* sums = static_cast<T*>(job.dbias_keys) + head * p.Sk + j0;
      for (int n = 0; n < nk; ++n) sums[n] = w.column[n];
    }
  }

  if (ordered_units && unit > 0) wait_for(progress - job.k_tiles, kFinished);
  put_dkv(p, job.dk, job.dk_across_units, w.dkt, static_cast<T>(p.attrs.scale), b, kv_head, j0, nk,
          p.D, w.rows, w.ldk);
  put_dkv(p, job.dv, job.dv_across_units, w.dvt, T(1), b, kv_head, j0, nk, p.Dv, w.rows, w.ldv);
  publish(progress, kFinished);
  add_one(job.unit_done + unit);
}

}  // namespace jft::cpu::JFT_ISA
