// Folds the leading dimensions of a problem: neighbours that every operand and result walks as one
// become one, so that most calls reach the kernels with a single batch dimension (no divisions
// there).
#pragma once

#include "../core/problem.h"

namespace jft::cuda {

// Visits every tensor that is present.
template <class P, class Visit>
void each_tensor(P& p, Visit visit) {
  for (auto& t : p.in) {
    if (t.data) visit(t);
  }
  for (auto& t : p.out) {
    if (t.data) visit(t);
  }
}

inline void fold_batch(Problem& p) {
  int dims = 0;  // folded so far
  for (int d = 0; d < p.batch_dims; ++d) {
    if (p.batch_size[d] == 1) continue;
    bool joins = dims > 0;
    each_tensor(p, [&](const Tensor& t) {
      joins = joins && t.batch[dims - 1] == t.batch[d] * p.batch_size[d];
    });
    if (joins) {
      --dims;
      p.batch_size[dims] *= p.batch_size[d];
    } else {
      p.batch_size[dims] = p.batch_size[d];
    }
    each_tensor(p, [&](Tensor& t) { t.batch[dims] = t.batch[d]; });
    ++dims;
  }
  if (dims == 0) {
    p.batch_size[0] = 1;
    each_tensor(p, [](Tensor& t) { t.batch[0] = 0; });
    dims = 1;
  }
  p.batch_dims = dims;
}

// Elements of a gradient's batch, and how many of the problem's are summed into each.
struct BatchSum {
  int64_t kept = 1, summed = 1;
  bool operator==(const BatchSum& o) const { return kept == o.kept && summed == o.summed; }
};
inline BatchSum batch_sum(const Problem& p, const Tensor& t) {
  BatchSum s;
  for (int d = 0; d < p.batch_dims; ++d) {
    (t.batch[d] == 0 ? s.summed : s.kept) *= p.batch_size[d];
  }
  return s;
}
inline bool same_batches(const Problem& p, const Tensor& a, const Tensor& b) {
  for (int d = 0; d < p.batch_dims; ++d) {
    if ((a.batch[d] == 0) != (b.batch[d] == 0)) return false;
  }
  return true;
}

}  // namespace jft::cuda
