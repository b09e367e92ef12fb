#include "backward_wide_launch.cuh"
#include "launch.h"

namespace jft::hopper {
cudaError_t backward_wide_bf16(const Problem& p, void* workspace, cudaStream_t stream) {
  return launch_backward_wide<__nv_bfloat16>(p, workspace, stream);
}
}  // namespace jft::hopper
