// Scratch memory of one worker, in elements of the accumulator type, beside the operands of the
// products (products.h). Every worker of a pass takes one block.
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

// With next == nullptr the constructors only count.

// What the forward keeps of one query tile while key tiles go by.
template <typename T>
struct QueryState {
  T* o;                           // transposed: [Dv][kTile]
  T *m, *l, *tile_max, *rescale;  // [kTile], one per query
};

template <typename T>
struct ForwardScratch {
  QueryState<T> query[kQueryTiles];
  T *s, *bias;  // logits, then weights [key][query]; bias likewise

  ForwardScratch(Arena<T>& a, int64_t Dv) {
    for (QueryState<T>& state : query) {
      state.o = a.take(Dv * kTile);
      state.m = a.take(kTile);
      state.l = a.take(kTile);
      state.tile_max = a.take(kTile);
      state.rescale = a.take(kTile);
    }
    s = a.take(kLogitTile);
    bias = a.take(kLogitTile);
  }
};

template <typename T>
struct BackwardScratch {
  T *p, *pz, *ds, *dsc;  // weights, dropped weights, ds, ds through softcap [query][key]
  T* bias;               // [query][key]
  T *dkt, *dvt, *dq;     // sums: [D][kTile], [Dv][kTile]; [kTile][padded(D)]
  T* column;             // [kTile] sums over queries
  T* rows;               // [kTile][padded(D) or padded(Dv)]: dk or dv on its way out
  int64_t ldk, ldv;

  BackwardScratch(Arena<T>& a, int64_t D, int64_t Dv) : ldk(padded(D)), ldv(padded(Dv)) {
    p = a.take(kLogitTile);
    pz = a.take(kLogitTile);
    ds = a.take(kLogitTile);
    dsc = a.take(kLogitTile);
    bias = a.take(kLogitTile);
    dkt = a.take((D + 15) / 16 * 16 * kTile);
    dvt = a.take((Dv + 15) / 16 * 16 * kTile);
    dq = a.take(kTile * ldk);
    column = a.take(kTile);
    rows = a.take(kTile * (ldk > ldv ? ldk : ldv));
  }
};

// Units (batch element, kv head) of a bf16 or f16 backward that may be in flight: each holds its dq
// in the accumulator's type. One suffices, more only keep threads busy while a unit ends; together
// they stay below half a megabyte per thread unless a single unit is larger.
constexpr int64_t kSlotBytesPerThread = int64_t{512} << 10;

static inline int64_t dq_slots(int64_t slot_bytes, int64_t threads, int64_t units) {
  int64_t slots = slot_bytes > 0 ? threads * kSlotBytesPerThread / slot_bytes : units;
  if (slots > threads + 1) slots = threads + 1;
  if (slots > units) slots = units;
  return slots > 1 ? slots : 1;
}

}  // namespace jft::cpu
