// One pass of a call on a stream: picks kernels, lays out scratch, launches.
#pragma once

#include <string>

#include "../core/problem.h"
#include "launch/stream.h"
#include "workspace.h"

namespace jft::cuda {

// Plain facts that decide support; what the lowering and `explain` ask too (module.cc).
struct Facts {
  DType dtype = DType::kBF16;
  bool full_float32 = false;  // precision high or highest
  int64_t Sq = 0, Sk = 0, D = 0, Dv = 0;
};
// "" : the portable kernels take it. Else the reason, in user terms.
std::string unsupported(const Facts& facts);
// Name of the kernel that takes it.
std::string kernel_name(const Facts& facts);
// Its head bucket, 0 where there is none.
int kernel_head(const Facts& facts);

// Each returns "" or an error text. `workspace` has `workspace_bytes` bytes.
std::string run_forward(const Problem& problem, void* workspace, int64_t workspace_bytes,
                        Stream stream);
std::string run_backward(const Problem& problem, void* workspace, int64_t workspace_bytes,
                         Stream stream);

}  // namespace jft::cuda
