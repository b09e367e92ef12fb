// Facts of the current device, and the once-per-device opt-in to large shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

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

// One instantiation (and one flag per device) per kernel.
template <auto kKernel>
cudaError_t allow_shared(int bytes) {
  static std::atomic<bool> done[kMaxDevices];
  int device;
  if (cudaError_t e = cudaGetDevice(&device)) return e;
  if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return cudaSuccess;
  if (cudaError_t e =
          cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;
  if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
  return cudaSuccess;
}

}  // namespace jft::hopper
