// Facts of the current device, and the once-per-device opt-in to large shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>

namespace jft::hopper {

constexpr int kMaxDevices = 64;

inline cudaError_t multiprocessors(int* count) {
  static std::atomic<int> known[kMaxDevices];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device < kMaxDevices && (*count = known[device].load(std::memory_order_relaxed)) > 0)
    return cudaSuccess;
  if (cudaError_t e = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device))
    return e;
  if (device < kMaxDevices) known[device].store(*count, std::memory_order_relaxed);
  return cudaSuccess;
}

// kKernel<<<blocks, threads, shared, stream>>>(params); shared memory beyond 48 KB is granted once
// per kernel and device.
#if defined(JFT_EMULATE)
template <auto kKernel, class Params>
cudaError_t launch_kernel(int blocks, int threads, int shared, cudaStream_t, const Params& params) {
  // Kernels with large shared memory keep nothing outside of it: their blocks may run side by side.
  emu::run_grid(
      blocks, threads, shared, [&] { kKernel(params); }, shared > 0 ? emu::kMultiprocessors : 1);
  return cudaSuccess;
}
#else
template <auto kKernel, class Params>
cudaError_t launch_kernel(int blocks, int threads, int shared, cudaStream_t stream,
                          const Params& params) {
  if (shared > 48 * 1024) {
    static std::atomic<bool> granted[kMaxDevices];
    int device;
    if (cudaError_t e = cudaGetDevice(&device)) return e;
    if (device >= kMaxDevices || !granted[device].load(std::memory_order_acquire)) {
      if (cudaError_t e =
              cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
        return e;
      if (device < kMaxDevices) granted[device].store(true, std::memory_order_release);
    }
  }
  // clang-format off
  kKernel<<<blocks, threads, shared, stream>>>(params);
  // clang-format on
  return cudaGetLastError();
}
#endif

}  // namespace jft::hopper
