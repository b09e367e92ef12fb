// The two FFI targets of the CUDA backend.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jft::cuda {

extern "C" XLA_FFI_Error* JftCudaForward(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JftCudaBackward(XLA_FFI_CallFrame* call_frame);

}  // namespace jft::cuda
