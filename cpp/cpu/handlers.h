// Entry points that module.cc hands to Python.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jft::cpu {

extern "C" XLA_FFI_Error* ForwardHandler(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* BackwardHandler(XLA_FFI_CallFrame* frame);

}  // namespace jft::cpu
