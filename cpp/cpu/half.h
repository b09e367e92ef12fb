// Scalar conversions between storage types and float. NaN stays NaN in both directions; everything
// else rounds to nearest even. The vector twins live in convert.h and are tested
// against these. static: see JFT_FN in semantics.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace jft::cpu {

static inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

static inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

static inline float bf16_to_float(uint16_t h) { return bits_float(static_cast<uint32_t>(h) << 16); }

static inline uint16_t float_to_bf16(float x) {
  const uint32_t u = float_bits(x);
  // Rounding could carry a NaN's payload into the exponent of infinity: quiet it instead.
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf, NaN (quieted, as the hardware does)
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13) | quiet);
  }
  // Shift exponent and mantissa into place as if normal, then let one exact multiplication fix the
  // bias (2^112); it also normalises subnormals.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

static inline uint16_t float_to_f16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to >= 65520
  if (magnitude < 0x38800000u) {
    // Result is subnormal: adding 0.5 aligns the mantissa to 2^-24 and rounds to nearest even.
    const float aligned = bits_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(aligned) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

}  // namespace jft::cpu
