// <<<>>> lives here and nowhere else.
#pragma once

#include "stream.h"

#if !defined(JFT_EMULATE)
#include <atomic>

namespace jft::cuda {

// Dynamic shared memory beyond 48 KB is granted per kernel and per device, once.
template <class Kernel>
Status allow_shared(Kernel kernel, int bytes, std::atomic<unsigned long long>& granted) {
  if (bytes <= 48 * 1024) return cudaSuccess;
  int device = 0;
  if (Status s = cudaGetDevice(&device); s != cudaSuccess) return s;
  const unsigned long long bit = 1ull << (device & 63);
  if (device < 64 && (granted.load(std::memory_order_relaxed) & bit)) return cudaSuccess;
  const Status s = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (s == cudaSuccess) granted.fetch_or(bit, std::memory_order_relaxed);
  return s;
}

}  // namespace jft::cuda

#define JFT_LAUNCH(status, kernel, blocks, threads, bytes, stream, ...)               \
  do {                                                                                \
    static std::atomic<unsigned long long> granted{0};                                \
    status = ::jft::cuda::allow_shared(kernel, bytes, granted);                       \
    if (status == cudaSuccess) {                                                      \
      kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(__VA_ARGS__); \
      status = cudaGetLastError();                                                    \
    }                                                                                 \
  } while (0)
#endif
