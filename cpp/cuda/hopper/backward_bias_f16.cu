#include "backward_bias_launch.cuh"
#include "launch.h"

namespace jft::hopper {
cudaError_t backward_bias_f16(const Problem& p, void* workspace, cudaStream_t stream) {
  return launch_bias_gradient<__half>(p, workspace, stream);
}
}  // namespace jft::hopper
