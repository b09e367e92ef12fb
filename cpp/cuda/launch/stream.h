// What the host side needs of the CUDA runtime, and the emulator's stand-ins.
#pragma once

#if defined(JFT_EMULATE)
#include <cstring>

#include "../emulator/emulator.h"

namespace jft::cuda {
using Stream = void*;
using Status = int;  // 0 = success
constexpr Status kSuccess = 0;
inline const char* status_text(Status) { return "emulated launch failed"; }
inline Status clear_memory(void* data, size_t bytes, Stream) {
  std::memset(data, 0, bytes);
  return kSuccess;
}
}  // namespace jft::cuda

#define JFT_LAUNCH(status, kernel, blocks, threads, bytes, stream, ...)         \
  do {                                                                          \
    (void)(stream);                                                             \
    ::jft::emu::run_grid(blocks, threads, bytes, [&] { kernel(__VA_ARGS__); }); \
    status = ::jft::cuda::kSuccess;                                             \
  } while (0)
#else
#include <cuda_runtime_api.h>

namespace jft::cuda {
using Stream = cudaStream_t;
using Status = cudaError_t;
constexpr Status kSuccess = cudaSuccess;
inline const char* status_text(Status s) { return cudaGetErrorString(s); }
inline Status clear_memory(void* data, size_t bytes, Stream stream) {
  return cudaMemsetAsync(data, 0, bytes, stream);
}
}  // namespace jft::cuda
#endif
