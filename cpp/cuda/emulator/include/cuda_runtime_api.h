// The emulator's stand-in for the CUDA runtime: what the Hopper kernels' host side uses of it.
#pragma once

#include <cstddef>

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInsufficientDriver = 35,
                      cudaErrorNotSupported = 801;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaEntryPointFlags { cudaEnableDefault };

cudaError_t cudaGetDevice(int* device);
// The emulated device has kMultiprocessors (emulator.h) and the compute capability that the
// environment names: JFT_EMULATED_CAPABILITY=90 is a Hopper GPU, absent takes the portable kernels.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             cudaEntryPointFlags,
                                             cudaDriverEntryPointQueryResult* found);
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t);
