#include "forward_launch.cuh"
#include "launch.h"

namespace jft::hopper {
cudaError_t forward_f16(const Problem& p, void* workspace, cudaStream_t stream) {
  return launch_forward<__half>(p, workspace, stream);
}
}  // namespace jft::hopper
