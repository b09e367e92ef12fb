// Vectors of the instruction set that this translation unit is compiled for (GCC/Clang vector
// extensions plus the few instructions they cannot express). Everything here lives in the namespace
// JFT_ISA, and nothing from std:: is used: an inline function compiled twice with different
// instruction sets would be one definition to the linker.
#pragma once

#include <cstdint>

#include "problem.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define JFT_INLINE static inline __attribute__((always_inline))
#define JFT_SELF __attribute__((always_inline))  // for member functions

namespace jft::cpu::JFT_ISA {

// Register tile of the micro-kernel: kRows rows of kVectors vectors. The accumulators, one row of B
// and one broadcast must fit: 6*4+4 of 32 zmm, 6*2+2 of 16 ymm, 4*4+4 of 32 NEON registers (6*4
// spills), 4*2+2 of 16 xmm (one more for the product, without FMA).
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kRows = 6, kVectors = 4;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kRows = 6, kVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kRows = 4, kVectors = 4;
#else
constexpr int kVectorBytes = 16, kRows = 4, kVectors = 2;
#endif

typedef float F32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t U16 __attribute__((vector_size(kVectorBytes / 2)));
typedef double F64 __attribute__((vector_size(kVectorBytes)));
typedef int64_t I64 __attribute__((vector_size(kVectorBytes)));
typedef uint64_t U64 __attribute__((vector_size(kVectorBytes)));

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using V = F32;
  using I = I32;
  using U = U32;
  using Int = int32_t;
  static constexpr int kLanes = kVectorBytes / 4;
};
template <>
struct Simd<double> {
  using V = F64;
  using I = I64;
  using U = U64;
  using Int = int64_t;
  static constexpr int kLanes = kVectorBytes / 8;
};
template <typename T>
using Vec = typename Simd<T>::V;
template <typename T>
using IVec = typename Simd<T>::I;
template <typename T>
using UVec = typename Simd<T>::U;
template <typename T>
constexpr int kLanes = Simd<T>::kLanes;

template <typename T>
constexpr DType kTypeOf = sizeof(T) == 8 ? DType::kF64 : DType::kF32;

template <typename T>
JFT_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <typename T>
JFT_INLINE void store(T* p, Vec<T> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <typename T>
JFT_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};  // x - 0 keeps the sign of a zero
}

// Fused where the hardware can. -ffp-contract=off everywhere else, so that forward and backward
// round the logits in the same way.
JFT_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
JFT_INLINE F64 fma(F64 a, F64 b, F64 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

// Lane-wise a > b ? a : b: b where either is NaN, so max(bound, x) keeps the NaN of x.
JFT_INLINE F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
JFT_INLINE F64 max(F64 a, F64 b) {
#if defined(__AVX512F__)
  return _mm512_max_pd(a, b);
#elif defined(__AVX2__)
  return _mm256_max_pd(a, b);
#elif defined(__SSE2__)
  return _mm_max_pd(a, b);
#else
  return a > b ? a : b;
#endif
}

// Lane masks come from words of 64 bits, bit n for lane n.
template <typename T>
struct LaneMask;
#if defined(__AVX512F__)
template <>
struct LaneMask<float> {
  __mmask16 m;
};
template <>
struct LaneMask<double> {
  __mmask8 m;
};
JFT_INLINE LaneMask<float> lane_mask(uint64_t bits, const float*) {
  return {static_cast<__mmask16>(bits)};
}
JFT_INLINE LaneMask<double> lane_mask(uint64_t bits, const double*) {
  return {static_cast<__mmask8>(bits)};
}
JFT_INLINE F32 select(LaneMask<float> m, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(m.m, no, yes);
}
JFT_INLINE F64 select(LaneMask<double> m, F64 yes, F64 no) {
  return _mm512_mask_blend_pd(m.m, no, yes);
}
#else
template <>
struct LaneMask<float> {
  I32 m;
};
template <>
struct LaneMask<double> {
  I64 m;
};
template <typename T>
JFT_INLINE LaneMask<T> lane_mask(uint64_t bits, const T*) {
  using Int = typename Simd<T>::Int;
  IVec<T> bit;
  for (int n = 0; n < kLanes<T>; ++n) bit[n] = static_cast<Int>(1) << n;
  const IVec<T> all = static_cast<Int>(bits & ((uint64_t{1} << kLanes<T>)-1)) - IVec<T>{};
  return {(all & bit) == bit};
}
template <typename T>
JFT_INLINE Vec<T> select_lanes(IVec<T> m, Vec<T> yes, Vec<T> no) {
  return (Vec<T>)(((IVec<T>)yes & m) | ((IVec<T>)no & ~m));
}
JFT_INLINE F32 select(LaneMask<float> m, F32 yes, F32 no) {
  return select_lanes<float>(m.m, yes, no);
}
JFT_INLINE F64 select(LaneMask<double> m, F64 yes, F64 no) {
  return select_lanes<double>(m.m, yes, no);
}
#endif

// Interleave the low or high halves of a and b: the step of the transposition network in convert.h.
JFT_INLINE void zip(F32 a, F32 b, F32& lo, F32& hi) {
#if defined(__AVX512F__)
  lo = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  hi = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
  lo = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  hi = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  lo = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}
JFT_INLINE void zip(F64 a, F64 b, F64& lo, F64& hi) {
#if defined(__AVX512F__)
  lo = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  hi = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif defined(__AVX2__)
  lo = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#else
  lo = __builtin_shufflevector(a, b, 0, 2);
  hi = __builtin_shufflevector(a, b, 1, 3);
#endif
}

}  // namespace jft::cpu::JFT_ISA
