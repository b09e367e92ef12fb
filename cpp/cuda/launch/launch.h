// Launchers of the compiled kernels. Definitions: launch/head_kernels.h (one translation unit per
// element type and head bucket) and launch/common.cu.
#pragma once

#include <cstdint>

#include "../params.h"
#include "stream.h"

namespace jft::cuda {

struct F16;
struct BF16;
struct TF32;
struct TF32x3;

// Each launches nothing and succeeds for 0 blocks. `blocks` is the whole grid.
template <class T, int kHead>
struct HeadKernels {
  static Status forward(const Params& params, int64_t blocks, Stream stream);
  static Status dq(const Params& params, int64_t blocks, Stream stream);
  static Status dkdv(const Params& params, int64_t blocks, Stream stream);
  static Status bias_gradient(const Params& params, int64_t blocks, Stream stream);
};

template <class T>
struct RowKernels {
  static Status rows(const Params& params, Stream stream);
};

Status launch_map(const Params& params, Stream stream);
Status launch_head_sum(const Params& params, bool alibi, int64_t blocks, Stream stream);
Status launch_bias_sum(const Params& params, Stream stream);

// The same behind one type, for host code that picks at run time.
struct KernelSet {
  using Launch = Status (*)(const Params&, int64_t, Stream);
  Launch forward, dq, dkdv, bias_gradient;
  Status (*rows)(const Params&, Stream);
  int element_bytes;
  int head;  // bucket
  const char* name;
};
// nullptr: no kernel was built for it.
const KernelSet* find_kernels(DType dtype, bool full_float32, int64_t features);

}  // namespace jft::cuda
