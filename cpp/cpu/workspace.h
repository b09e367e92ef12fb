// Scratch memory of one worker, in elements of the accumulator type. Every worker of a pass takes one
// block of this size; docs/tuning-cpu.md lists the sizes.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace jft::cpu {

constexpr int64_t kLogitTile = int64_t{kTile} * kTile;

template <typename T>
struct Arena {
  T* next;
  T* take(int64_t elements) {
    T* p = next;
    next += (elements + 15) / 16 * 16;
    return p;
  }
};

// With next == nullptr the constructor only counts.
template <typename T>
struct ForwardScratch {
  T *q, *k, *v;          // q transposed [D][kTile]; k [kTile][padded(D)]; v [kTile][padded(Dv)]
  T *s, *bias, *o;       // logits, then weights [key][query]; bias likewise; o transposed [Dv][kTile]
  T *m, *l, *tile_max, *rescale;  // [kTile], one per query
  int64_t ldk, ldv;

  ForwardScratch(Arena<T>& a, int64_t D, int64_t Dv) : ldk(padded(D)), ldv(padded(Dv)) {
    q = a.take(D * kTile);
    k = a.take(kTile * ldk);
    v = a.take(kTile * ldv);
    s = a.take(kLogitTile);
    bias = a.take(kLogitTile);
    o = a.take(Dv * kTile);
    m = a.take(kTile);
    l = a.take(kTile);
    tile_max = a.take(kTile);
    rescale = a.take(kTile);
  }
};

template <typename T>
struct BackwardScratch {
  T *kt, *vt, *k;        // k, v transposed [D][kTile]; k [kTile][padded(D)]
  T* k_clean;            // k without the non-finite rows that a tile does not see
  T *q, *d_o;            // [kTile][padded(..)]
  T *p, *pz, *ds, *dsc;  // weights, dropped weights, ds, ds through softcap [query][key]
  T* bias;               // [query][key]
  T *dkt, *dvt, *dq;     // sums: [D][kTile], [Dv][kTile]; [kTile][padded(D)]
  T* column;             // [kTile] sums over queries
  int64_t ldk, ldv;

  BackwardScratch(Arena<T>& a, int64_t D, int64_t Dv) : ldk(padded(D)), ldv(padded(Dv)) {
    kt = a.take(D * kTile);
    vt = a.take(Dv * kTile);
    k = a.take(kTile * ldk);
    k_clean = a.take(kTile * ldk);
    q = a.take(kTile * ldk);
    d_o = a.take(kTile * ldv);
    p = a.take(kLogitTile);
    pz = a.take(kLogitTile);
    ds = a.take(kLogitTile);
    dsc = a.take(kLogitTile);
    bias = a.take(kLogitTile);
    dkt = a.take(D * kTile);
    dvt = a.take(Dv * kTile);
    dq = a.take(kTile * ldk);
    column = a.take(kTile);
  }
};

template <typename T>
struct DeltaScratch {
  T *o, *d_o, *zeros;  // [kTile][padded(..)]
  int64_t ldk, ldv;

  DeltaScratch(Arena<T>& a, int64_t D, int64_t Dv) : ldk(padded(D)), ldv(padded(Dv)) {
    o = a.take(kTile * ldv);
    d_o = a.take(kTile * ldv);
    zeros = a.take(kTile * ldk);
  }
};

template <typename T, template <typename> class Scratch>
int64_t scratch_bytes(int64_t D, int64_t Dv) {
  Arena<T> arena{nullptr};
  Scratch<T> scratch(arena, D, Dv);
  return reinterpret_cast<intptr_t>(arena.next);
}

}  // namespace jft::cpu
