#include "hopper_road.h"

#if defined(JFT_WITH_HOPPER)
#include <atomic>

#include "hopper/hopper.h"

namespace jft::cuda {

bool hopper_takes(const Problem& p, bool backward, int64_t capability) {
  // Without keys there is nothing to load, and a pipeline that waits for a load would wait forever.
  if (p.Sk == 0 || p.Sq == 0) return false;
  return capability == 90 && hopper_reason(p, backward) == nullptr;
}

int64_t hopper_scratch(const Problem& p, bool backward) {
  if (hopper_reason(p, backward) != nullptr) return 0;
  return static_cast<int64_t>(hopper_workspace_bytes(p, backward));
}

Status hopper_launch(const Problem& p, bool backward, void* workspace, Stream stream) {
  return backward ? hopper_backward(p, workspace, stream) : hopper_forward(p, workspace, stream);
}

int64_t current_capability() {
  static std::atomic<int> known[64];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device < 64 && known[device].load(std::memory_order_relaxed) != 0) {
    return known[device].load(std::memory_order_relaxed);
  }
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return 0;
  }
  if (device < 64) known[device].store(10 * major + minor, std::memory_order_relaxed);
  return 10 * major + minor;
}

}  // namespace jft::cuda

#else

namespace jft::cuda {

bool hopper_takes(const Problem&, bool, int64_t) { return false; }
int64_t hopper_scratch(const Problem&, bool) { return 0; }
Status hopper_launch(const Problem&, bool, void*, Stream) { return kSuccess; }
int64_t current_capability() { return 0; }

}  // namespace jft::cuda
#endif
