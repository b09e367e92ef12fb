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

JFT_DEV i64 batch_at(const Problem& p, const Tensor& t, i64 b) {
  if (p.batch_dims == 1) return b * t.batch[0];  // the usual case, without divisions
  return batch_offset(p, t, b);
}

// Flat batch element number `summed` of those that are added into element `kept` of result `t`.
JFT_DEV i64 batch_of_result(const Problem& p, const Tensor& t, i64 kept, i64 summed) {
  i64 b = 0, stride = 1;
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

JFT_DEV i64 batch_int(const Problem& p, Operand op, i64 b, i64 absent) {
  const Tensor& t = p.in[op];
  return t.data ? static_cast<i64>(static_cast<const int*>(t.data)[batch_at(p, t, b)]) : absent;
}

JFT_DEV Positions load_positions(const Problem& p, i64 b) {
  return make_positions(p.Sq, p.Sk, batch_int(p, kQLengths, b, p.Sq),
                        batch_int(p, kKvLengths, b, p.Sk), batch_int(p, kQOffset, b, p.Sk - p.Sq),
                        p.attrs.causal != 0, batch_int(p, kWindowLeft, b, p.attrs.window_left),
                        batch_int(p, kWindowRight, b, p.attrs.window_right));
}

// A range that fits 32 bits, as all ranges inside a matrix do.
struct Span {
  int begin, end;
  JFT_DEV static Span of(Range r) { return {static_cast<int>(r.begin), static_cast<int>(r.end)}; }
};

// What a loop needs only now and then lies in shared memory, where it occupies no registers.
struct Control {
  Positions pos;
  i64 b, h;          // batch element; query head (kernels that have one)
  const void* k;     // keys and values of the kv head
  const void* v;
  Span any, all;     // keys that one row, every row of the query tile sees
};
static_assert(sizeof(Control) <= 128, "twin of kSeen in the kernels' shared memory");

JFT_DEV void share_control(u32 at, const Control& control) {
  if (thread_index() == 0) shared<Control>(at) = control;
}

// Joint state of the cells that a tile of rows [i0, i1) and keys [j0, j1) touches.
JFT_DEV int map_state(const Problem& p, const VisibilityMap& map, i64 b, i64 h, int i0, int i1, int j0,
                      int j1) {
  i64 at = h * map.head;
  if (p.batch_dims == 1) {
    at += b * map.batch[0];
  } else {
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      at += (b % p.batch_size[d]) * map.batch[d];
      b /= p.batch_size[d];
    }
  }
  const int qe = min_int(map.query_cells, (i1 + kCell - 1) / kCell);
  const int ke = min_int(map.key_cells, (j1 + kCell - 1) / kCell);
  bool any = false, all = true;
  for (int qc = i0 / kCell; qc < qe; ++qc) {
    for (int kc = j0 / kCell; kc < ke; ++kc) {
      const int state = map.data[at + static_cast<i64>(qc) * map.key_cells + kc];
      any |= state != kCellHidden;
      all &= state == kCellVisible;
    }
  }
  return any ? (all ? kCellVisible : kCellMixed) : kCellHidden;
}

// Walks the tiles [next, end) that are not hidden, 32 at a time where there is a map: lanes test one
// tile each. All warps walk alike.
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
