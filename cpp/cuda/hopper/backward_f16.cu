#include "backward_launch.cuh"
#include "launch.h"

namespace jft::hopper {
cudaError_t backward_f16(const Problem& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__half>(p, workspace, stream);
}
}  // namespace jft::hopper
