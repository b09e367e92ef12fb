// exp and tanh for vectors.
#pragma once

#include "simd.h"

namespace jft::cpu::JFT_ISA {

template <typename T>
struct Math;

template <>
struct Math<float> {
  static constexpr float kLog2e = 1.44269504088896341f;
  static constexpr float kMagic = 0x1.8p23f;    // x + kMagic rounds x to an integer
  static constexpr float kLowest = -87.33654f;  // ln of the smallest normal number
  static constexpr float kLn2Hi = 0x1.62e4p-1f, kLn2Lo = 0x1.7f7d1cp-20f;
  static constexpr int kMantissa = 23;
  static constexpr uint32_t kOne = 0x3f800000;
  // 2^f = 1 + f * poly(f) on [-0.5, 0.5]: minimax, relative error 2.0e-9.
  static constexpr int kExp2Terms = 6;
  static constexpr float kExp2[kExp2Terms] = {0.6931472028550666f,    0.2402264791362895f,
                                              0.05550332471125741f,   0.009618437357660197f,
                                              0.0013398874414164673f, 0.00015353361912216236f};
  // e^r - 1 = r + r^2 * poly(r) on |r| <= ln(2) / 2: Taylor.
  static constexpr int kExpm1Terms = 6;
};

template <>
struct Math<double> {
  static constexpr double kLog2e = 1.44269504088896340736;
  static constexpr double kMagic = 0x1.8p52;
  static constexpr double kLowest = -708.3964185322641;
  static constexpr double kLn2Hi = 0x1.62e42fefa38p-1, kLn2Lo = 0x1.ef35793c7673p-45;
  static constexpr int kMantissa = 52;
  static constexpr uint64_t kOne = 0x3ff0000000000000;
  // Taylor: ln(2)^(k+1) / (k+1)!, relative error 4e-18.
  static constexpr int kExp2Terms = 13;
  static constexpr double kExp2[kExp2Terms] = {
      0.6931471805599453,     0.2402265069591007,     0.055504108664821576,
      0.009618129107628477,   0.0013333558146428441,  0.00015403530393381606,
      1.5252733804059838e-05, 1.3215486790144305e-06, 1.0178086009239696e-07,
      7.054911620801121e-09,  4.44553827187081e-10,   2.5678435993488196e-11,
      1.3691488853904124e-12};
  static constexpr int kExpm1Terms = 12;
};

// 1 / (k + 2)!
template <typename T>
constexpr T expm1_coefficient(int k) {
  T c = T(0.5);
  for (int n = 3; n <= k + 2; ++n) c /= T(n);
  return c;
}

template <typename T>
JFT_INLINE Vec<T> pow2_of_magic(Vec<T> t) {  // 2^n from t = n + kMagic, n in the normal range
  using M = Math<T>;
  return (Vec<T>)(((UVec<T>)t << M::kMantissa) + M::kOne);
}

// e^x for x <= 0 (and a little above). 0 below the normal range, NaN stays NaN.
template <typename T>
JFT_INLINE Vec<T> exp(Vec<T> x) {
  using M = Math<T>;
#if defined(__AVX512F__)
  // scalef underflows to 0 by itself; the bound only keeps -inf out of f = x - x.
  const Vec<T> bounded = max(splat<T>(M::kLowest * T(1.5)), x);
#else
  const Vec<T> bounded = max(splat<T>(M::kLowest), x);
#endif
  const Vec<T> t = fma(bounded, splat<T>(M::kLog2e), splat<T>(M::kMagic));
  const Vec<T> n = t - M::kMagic;
  const Vec<T> f = fma(bounded, splat<T>(M::kLog2e), -n);
  Vec<T> poly = splat<T>(M::kExp2[M::kExp2Terms - 1]);
#pragma GCC unroll 16
  for (int k = M::kExp2Terms - 2; k >= 0; --k) poly = fma(poly, f, splat<T>(M::kExp2[k]));
  poly = fma(poly, f, splat<T>(T(1)));
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return _mm512_scalef_ps(poly, n);
  } else {
    return _mm512_scalef_pd(poly, n);
  }
#else
  const Vec<T> result = poly * pow2_of_magic<T>(t);
  const IVec<T> tiny = x < splat<T>(M::kLowest);  // false for NaN
  return (Vec<T>)((IVec<T>)result & ~tiny);
#endif
}

template <typename T>
JFT_INLINE Vec<T> tanh(Vec<T> x) {
  using M = Math<T>;
  const IVec<T> sign = (IVec<T>)x & (IVec<T>)splat<T>(T(-0.0));
  const Vec<T> y = T(-2) * (Vec<T>)((IVec<T>)x & ~(IVec<T>)splat<T>(T(-0.0)));
  const Vec<T> bounded = max(splat<T>(T(-50)), y);  // tanh(25) rounds to 1 in double
  const Vec<T> t = fma(bounded, splat<T>(M::kLog2e), splat<T>(M::kMagic));
  const Vec<T> n = t - M::kMagic;
  const Vec<T> r = fma(-n, splat<T>(M::kLn2Lo), fma(-n, splat<T>(M::kLn2Hi), bounded));
  Vec<T> poly = splat<T>(expm1_coefficient<T>(M::kExpm1Terms - 1));
#pragma GCC unroll 16
  for (int k = M::kExpm1Terms - 2; k >= 0; --k) {
    poly = fma(poly, r, splat<T>(expm1_coefficient<T>(k)));
  }
  const Vec<T> expm1_r = fma(r * r, poly, r);
  const Vec<T> pow2 = pow2_of_magic<T>(t);
  const Vec<T> expm1 = fma(pow2, expm1_r, pow2 - T(1));  // e^(-2|x|) - 1, no cancellation near 0
  const Vec<T> magnitude = -expm1 / (expm1 + T(2));
  return (Vec<T>)((IVec<T>)magnitude | sign);
}

}  // namespace jft::cpu::JFT_ISA
