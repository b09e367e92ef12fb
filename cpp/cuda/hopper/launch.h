// One launcher per pass and type: each lives in a source of its own, so that they compile in
// parallel.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/problem.h"

namespace jft::hopper {

cudaError_t forward_bf16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t forward_f16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t backward_bf16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t backward_f16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t backward_wide_bf16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t backward_wide_f16(const Problem& p, void* workspace, cudaStream_t stream);
// dbias, after one of the backwards above on the same scratch.
cudaError_t backward_bias_bf16(const Problem& p, void* workspace, cudaStream_t stream);
cudaError_t backward_bias_f16(const Problem& p, void* workspace, cudaStream_t stream);

}  // namespace jft::hopper
