// bf16 and f16 conversions, scalar and of every instruction set: all 65 536 values forth and back,
// rounding at every boundary between neighbours, NaN payloads of float.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.h"
#include "half.h"
#include "isa.h"

namespace jft {
namespace {

using cpu::bits_float;
using cpu::float_bits;

bool is_nan(DType t, uint16_t h) {
  return t == DType::kBF16 ? (h & 0x7fffu) > 0x7f80u : (h & 0x7fffu) > 0x7c00u;
}

// The value of a half from the definition, in double.
double value(DType t, uint16_t h) {
  const int bits = t == DType::kBF16 ? 7 : 10, bias = t == DType::kBF16 ? 127 : 15;
  const int exponent = (h & 0x7fff) >> bits, mantissa = h & ((1 << bits) - 1);
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 2 * bias + 1) return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - bits);
  return sign * std::ldexp((1 << bits) + mantissa, exponent - bias - bits);
}

uint16_t narrow_scalar(DType t, float x) {
  return t == DType::kBF16 ? cpu::float_to_bf16(x) : cpu::float_to_f16(x);
}
float widen_scalar(DType t, uint16_t h) {
  return t == DType::kBF16 ? cpu::bf16_to_float(h) : cpu::f16_to_float(h);
}

// Floats whose conversion could go wrong: halves, the midpoints between neighbours and their
// neighbours, and NaNs with one payload bit each.
std::vector<float> interesting(DType t) {
  std::vector<float> x;
  for (int h = 0; h < 0x10000; ++h) {
    if (is_nan(t, static_cast<uint16_t>(h))) continue;
    const float a = widen_scalar(t, static_cast<uint16_t>(h));
    x.push_back(a);
    const double b = value(t, static_cast<uint16_t>(h + 1));
    if (std::isinf(a) || std::isnan(b) || (h & 0x7fff) == 0x7fff) continue;
    const double top = std::ldexp(1.0, t == DType::kBF16 ? 128 : 16);
    const float mid = static_cast<float>((a + (std::isinf(b) ? std::copysign(top, b) : b)) / 2);
    x.insert(x.end(), {mid, std::nextafter(mid, 0.0f), std::nextafter(mid, INFINITY),
                       std::nextafter(mid, -INFINITY)});
  }
  for (int bit = 0; bit < 23; ++bit) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      x.push_back(bits_float(sign | 0x7f800000u | (1u << bit)));
      x.push_back(bits_float(sign | 0x7f800000u | (0x7fffffu ^ (1u << bit))));
    }
  }
  x.insert(x.end(), {1e38f, -1e38f, 1e-40f, -1e-45f, 65519.99f, 65520.0f, 3.4028235e38f});
  return x;
}

// Nearest half by definition: no representable value is nearer, ties have an even last bit.
bool nearest(DType t, float x, uint16_t got) {
  if (std::isnan(x)) return is_nan(t, got);
  if (is_nan(t, got)) return false;
  const double top = std::ldexp(1.0, t == DType::kBF16 ? 128 : 16);  // where infinity stands
  const auto place = [&](uint16_t h) {
    const double v = value(t, h);
    return std::isinf(v) ? std::copysign(top, v) : v;
  };
  if (std::isinf(x)) return value(t, got) == x;
  if (std::signbit(x) != ((got & 0x8000) != 0)) return false;
  const double error = std::fabs(place(got) - x);
  for (int step : {-1, 1}) {
    const int magnitude = (got & 0x7fff) + step;
    const uint16_t other = static_cast<uint16_t>((got & 0x8000) | magnitude);
    if (magnitude < 0 || is_nan(t, other)) continue;
    const double other_error = std::fabs(place(other) - x);
    if (other_error < error || (other_error == error && (got & 1))) {
      return std::fabs(x) > top;  // beyond the range everything rounds to infinity
    }
  }
  return true;
}

void scalar(DType t) {
  for (int h = 0; h < 0x10000; ++h) {
    const uint16_t half = static_cast<uint16_t>(h);
    const float x = widen_scalar(t, half);
    if (is_nan(t, half)) {
      CHECK(std::isnan(x) && is_nan(t, narrow_scalar(t, x)));
    } else {
      CHECK(static_cast<double>(x) == value(t, half) && narrow_scalar(t, x) == half);
    }
  }
  for (float x : interesting(t)) CHECK(nearest(t, x, narrow_scalar(t, x)));
}

void vectors(DType t) {
  std::vector<uint16_t> halves(0x10000);
  for (size_t h = 0; h < halves.size(); ++h) halves[h] = static_cast<uint16_t>(h);
  std::vector<float> wide(halves.size());
  cpu::kernels().widen(halves.data(), t, wide.data(), static_cast<int64_t>(halves.size()));
  for (size_t h = 0; h < halves.size(); ++h) {
    const float want = widen_scalar(t, halves[h]);
    CHECK(std::isnan(want) ? std::isnan(wide[h]) : float_bits(wide[h]) == float_bits(want));
  }
  const std::vector<float> x = interesting(t);
  std::vector<uint16_t> got(x.size());
  cpu::kernels().narrow(x.data(), got.data(), t, static_cast<int64_t>(x.size()));
  for (size_t n = 0; n < x.size(); ++n) {
    CHECK(std::isnan(x[n]) ? is_nan(t, got[n]) : got[n] == narrow_scalar(t, x[n]));
  }
}

}  // namespace
}  // namespace jft

int main() {
  using namespace jft;
  for (DType t : {DType::kBF16, DType::kF16}) {
    scalar(t);
    for (const std::string& level : cpu::isa_levels()) {
      cpu::set_isa(level);
      vectors(t);
    }
  }
  std::printf("convert_test: %d failures\n", testing::failures);
  return testing::failures != 0;
}
