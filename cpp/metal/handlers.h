// Entry points that module.cc hands to Python, and the support rule behind `explain`.
#pragma once

#include <string>

#include "problem.h"
#include "xla/ffi/api/c_api.h"

namespace jft::metal {

extern "C" XLA_FFI_Error* MetalForwardHandler(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* MetalBackwardHandler(XLA_FFI_CallFrame* frame);

// How often a buffer was wrapped in place and how often it was copied (for tests and reports).
struct BufferCounts {
  long long wrapped, staged;
};
BufferCounts take_buffer_counts();

}  // namespace jft::metal
