// What the host side needs of the CUDA runtime, and the emulator's stand-ins.
#pragma once

#if defined(JFT_EMULATE)
#include "../emulator/emulator.h"

namespace jft::cuda {
using Stream = void*;
using Status = int;  // 0 = success
constexpr Status kSuccess = 0;
inline const char* status_text(Status) { return "emulated launch failed"; }
}  // namespace jft::cuda

#define JFT_LAUNCH(status, kernel, blocks, threads, bytes, stream, ...) \
  do {                                                                  \
    (void)(stream);                                                     \
    ::jft::emu::run_grid(blocks, threads, bytes, [&] { kernel(__VA_ARGS__); }); \
    status = ::jft::cuda::kSuccess;                                     \
  } while (0)
#else
#include <cuda_runtime_api.h>

namespace jft::cuda {
using Stream = cudaStream_t;
using Status = cudaError_t;
constexpr Status kSuccess = cudaSuccess;
inline const char* status_text(Status s) { return cudaGetErrorString(s); }
}  // namespace jft::cuda
#endif
