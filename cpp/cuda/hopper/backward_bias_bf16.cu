#include "backward_bias_launch.cuh"
#include "launch.h"

namespace jft::hopper {
cudaError_t backward_bias_bf16(const Problem& p, void* workspace, cudaStream_t stream) {
  return launch_bias_gradient<__nv_bfloat16>(p, workspace, stream);
}
}  // namespace jft::hopper
