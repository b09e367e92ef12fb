// The choice between the Hopper kernels (hopper/, sm_90a) and the portable ones: one rule, read by
// the handlers, `explain` and `workspace_bytes`.
#pragma once

#include <cstdint>

#include "../core/problem.h"
#include "launch/stream.h"

namespace jft::cuda {

// True where the Hopper kernels were built and take the problem. `capability`: 90 for an H100 or
// H200.
bool hopper_takes(const Problem& p, bool backward, int64_t capability);
// Scratch of the Hopper kernels, 0 where they do not take the problem.
int64_t hopper_scratch(const Problem& p, bool backward);
// The backward without its dbias: where the Hopper kernels take that much, the portable ones make
// the dbias (of a bias that broadcasts over queries or keys).
inline Problem without_dbias(Problem p) {
  p.attrs.grads &= ~int64_t(kGradBias);
  p.out[kResDBias] = Tensor{};
  return p;
}
// Launches them on the current device; only after hopper_takes.
Status hopper_launch(const Problem& p, bool backward, void* workspace, Stream stream);
// Compute capability of the current device times ten, asked once per device.
int64_t current_capability();

}  // namespace jft::cuda
