// Where the pieces of one batch element lie in memory.
#pragma once

#include "../params.h"
#include "ptx.h"

#if defined(JFT_EMULATE)
#define JFT_PARAMS const Params&
#else
#define JFT_PARAMS const __grid_constant__ Params
#endif

namespace jft::cuda {

// Offset of batch element b. Divides once per dimension: the attention kernels let one thread per
// tensor do it (Control), instead of repeating the divisions at every use.
JFT_DEV i64 batch_at(const Problem& p, const Tensor& t, i64 b) {
  if (p.batch_dims == 1) return b * t.batch[0];
  i64 offset = 0;
  JFT_NO_UNROLL
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    offset += (b % p.batch_size[d]) * t.batch[d];
    b /= p.batch_size[d];
  }
  return offset;
}

// Flat batch element number `summed` of those that are added into element `kept` of result `t`.
JFT_DEV i64 batch_of_result(const Problem& p, const Tensor& t, i64 kept, i64 summed) {
  i64 b = 0, stride = 1;
  JFT_NO_UNROLL
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    const i64 size = p.batch_size[d];
    i64& source = t.batch[d] == 0 ? summed : kept;
    b += (source % size) * stride;
    source /= size;
    stride *= size;
  }
  return b;
}

// Start of head h of batch element b.
template <class T>
JFT_DEV T* head_pointer(const Problem& p, const Tensor& t, i64 b, i64 h) {
  return static_cast<T*>(t.data) + batch_at(p, t, b) + h * t.head;
}

// A range that fits 32 bits, as all ranges inside a matrix do.
struct Span {
  int begin, end;
  JFT_DEV static Span of(Range r) { return {static_cast<int>(r.begin), static_cast<int>(r.end)}; }
};

// Facts of one batch element in shared memory, where they occupy no registers.
struct Control {
  Positions pos;
  i64 b;
  i64 map_at;                              // of the batch element in the visibility map
  i64 offset[kNumOperands + kNumResults];  // of the batch element in each operand and result
  Span any, all;                           // keys that one row, every row of the query tile sees

  template <class E>
  JFT_DEV E* operand(const Problem& p, Operand op, int h) const {
    return static_cast<E*>(p.in[op].data) + offset[op] + h * p.in[op].head;
  }
  template <class E>
  JFT_DEV E* result(const Problem& p, Result slot, int h) const {
    return static_cast<E*>(p.out[slot].data) + offset[kNumOperands + slot] + h * p.out[slot].head;
  }
};
static_assert(sizeof(Control) <= 384, "twin of kSeen in the kernels' shared memory");

JFT_DEV i64 batch_int(const Problem& p, const Control& c, Operand op, i64 absent) {
  return p.in[op].data ? static_cast<i64>(*c.operand<const int>(p, op, 0)) : absent;
}

// Fills the block's Control for batch element b and, where there is one, its query tile [i0, i1).
// Synchronises before (what lay there is done with) and after.
JFT_DEV void share_control(u32 at, const Params& params, i64 b, int i0, int i1) {
  const Problem& p = params.p;
  Control& c = shared<Control>(at);
  const int n = thread_index();
  sync_block();
  if (n < kNumOperands + kNumResults) {
    const Tensor& t = n < kNumOperands ? p.in[n] : p.out[n - kNumOperands];
    c.offset[n] = t.data ? batch_at(p, t, b) : 0;
  } else if (n == kNumOperands + kNumResults) {
    i64 rest = b, map_at = 0;
    JFT_NO_UNROLL
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      map_at += (rest % p.batch_size[d]) * params.map.batch[d];
      rest /= p.batch_size[d];
    }
    c.map_at = map_at;
    c.b = b;
  }
  sync_block();
  if (n == 0) {
    c.pos =
        make_positions(p.Sq, p.Sk, batch_int(p, c, kQLengths, p.Sq),
                       batch_int(p, c, kKvLengths, p.Sk), batch_int(p, c, kQOffset, p.Sk - p.Sq),
                       p.attrs.causal != 0, batch_int(p, c, kWindowLeft, p.attrs.window_left),
                       batch_int(p, c, kWindowRight, p.attrs.window_right));
    c.any = Span::of(visible_keys_any(c.pos, i0, i1));
    c.all = Span::of(visible_keys_all(c.pos, i0, i1));
  }
  sync_block();
}

// Joint state of the cells that a tile of rows [i0, i1) and keys [j0, j1) touches.
JFT_DEV int map_state(const VisibilityMap& map, const Control& c, int h, int i0, int i1, int j0,
                      int j1) {
  const unsigned char* cells = map.data + c.map_at + h * map.head;
  const int qe = min_int(map.query_cells, (i1 + kCell - 1) / kCell);
  const int ke = min_int(map.key_cells, (j1 + kCell - 1) / kCell);
  bool any = false, all = true;
  JFT_NO_UNROLL
  for (int qc = i0 / kCell; qc < qe; ++qc) {
    JFT_NO_UNROLL
    for (int kc = j0 / kCell; kc < ke; ++kc) {
      const int state = cells[static_cast<i64>(qc) * map.key_cells + kc];
      any |= state != kCellHidden;
      all &= state == kCellVisible;
    }
  }
  return any ? (all ? kCellVisible : kCellMixed) : kCellHidden;
}

// Walks the tiles [next, end) that are not hidden, 32 at a time where there is a map: lanes test
// one tile each. All warps walk alike.
struct TileWalker {
  int next, end;
  int window;  // first tile of `visible` and `plain`
  u32 visible, plain;

  JFT_DEV void start(int begin, int stop) {
    next = begin;
    end = stop;
    window = begin - 32;
    visible = plain = 0;
  }
  // The next tile, -1 at the end. `*fully` tells that the map hides nothing of it.
  template <class State>
  JFT_DEV int pop(bool has_map, State state, bool* fully) {
    *fully = true;
    if (next >= end) return -1;
    if (!has_map) return next++;
    const int lane = thread_index() & 31;
    for (;;) {
      if (next >= window + 32) {
        window = next;
        const int mine = window + lane;
        const int s = mine < end ? state(mine) : static_cast<int>(kCellHidden);
        visible = ballot(s != kCellHidden);
        plain = ballot(s == kCellVisible);
      }
      const u32 left = visible & (0xffffffffu << (next - window));
      if (left != 0) {
        const int bit = first_bit(left);
        next = window + bit + 1;
        *fully = (plain >> bit) & 1;
        return window + bit;
      }
      next = window + 32;
      if (next >= end) return -1;
    }
  }
};

}  // namespace jft::cuda
