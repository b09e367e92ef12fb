// Folds the leading dimensions of a call into at most two groups (b0 outer, b1 inner), each of
// which every operand either has in full or broadcasts over.
#pragma once

#include <initializer_list>

#include "../../../core/problem.h"
#include "../params.h"

namespace jft::hopper {

struct BatchGroups {
  int count = 0;             // groups in use, innermost first
  int64_t size[2] = {1, 1};  // [0] inner (b1), [1] outer (b0)
  int begin[2] = {0, 0};     // innermost dimension of each group
  bool ok = true;
};

// True if dimension d continues the group whose innermost dimension is `inner` with `size` elements
// so far.
inline bool continues(const Tensor& t, int d, int inner, int64_t size) {
  return t.batch[d] == t.batch[inner] * size;
}

// Looks at every present operand and every result in use.
inline BatchGroups fold_batch(const Problem& p, bool backward) {
  BatchGroups g;
  const bool sinks = backward && (p.attrs.grads & kGradSinks);
  const bool bias = backward && (p.attrs.grads & kGradBias);
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    if (p.batch_size[d] == 1) continue;
    bool joins = g.count > 0;
    if (joins) {
      const int inner = g.begin[g.count - 1];
      const int64_t size = g.size[g.count - 1];
      for (int op = 0; op < kNumOperands; ++op)
        if (has(p.attrs.present, static_cast<Operand>(op)))
          joins = joins && continues(p.in[op], d, inner, size);
      for (int r = 0; r < 3; ++r) joins = joins && continues(p.out[r], d, inner, size);
      if (bias) joins = joins && continues(p.out[kResDBias], d, inner, size);
      if (sinks) joins = joins && continues(p.out[kResDSinks], d, inner, size);
    }
    if (joins) {
      g.size[g.count - 1] *= p.batch_size[d];
    } else if (g.count == 2) {
      g.ok = false;
      return g;
    } else {
      g.begin[g.count] = d;
      g.size[g.count] = p.batch_size[d];
      ++g.count;
    }
  }
  return g;
}

inline int64_t group_stride(const BatchGroups& g, const Tensor& t, int group) {
  return group < g.count ? t.batch[g.begin[group]] : 0;
}

template <class T>
Strided<T> strided(const BatchGroups& g, const Tensor& t) {
  return {static_cast<T*>(t.data), group_stride(g, t, 1), group_stride(g, t, 0), t.head, t.row};
}

}  // namespace jft::hopper
