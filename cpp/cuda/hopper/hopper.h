// Warp-specialised attention for Hopper (sm_90a: wgmma, TMA). Host interface; link the library,
// call these.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../../core/problem.h"

namespace jft {

// nullptr: these kernels take the problem. Else the reason they do not, in user terms. Looks at
// sizes, strides, options and (where known) addresses; does not ask which GPU is present.
const char* hopper_reason(const Problem& problem, bool backward);

// Bytes of device scratch, 0 where none is needed. The scratch must be 128-byte aligned, or 127
// bytes longer (already counted in).
size_t hopper_workspace_bytes(const Problem& problem, bool backward);

// Launch on `stream`: no allocation, no synchronisation, CUDA-graph safe.
cudaError_t hopper_forward(const Problem& problem, void* workspace, cudaStream_t stream);
cudaError_t hopper_backward(const Problem& problem, void* workspace, cudaStream_t stream);

}  // namespace jft
