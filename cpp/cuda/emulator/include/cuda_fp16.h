// The emulator's stand-in: a 16-bit float that reads as float.
#pragma once

#include <cstdint>

#include "../../device/ptx.h"

struct __half {
  uint16_t bits;
  operator float() const { return jft::cuda::f16_to_float(bits); }
};
