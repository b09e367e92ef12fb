// Element types of the matrix products: how fragments are multiplied, packed and converted.
//
// A k-step is 32 bytes of K in both families (16 halves or 8 floats), so K-major fragments of every
// type are loaded by the same ldmatrix pattern (device/fragment.h).
#pragma once

#include "ptx.h"

namespace jft::cuda {

// Fragments of one 16 x kStep A tile and two kStep x 8 B tiles. `small` is used by 3xTF32 only.
struct FragmentA {
  u32 r[4];
};
struct FragmentB {
  u32 r[4];  // columns 0-7: r[0], r[1]; columns 8-15: r[2], r[3]
};

struct F16 {
  using Storage = unsigned short;
  static constexpr bool kGeneralOnly = false;
  static constexpr int kBytes = 2;
  static constexpr int kStep = 16;
  JFT_DEV static u32 pack(float lo, float hi) { return pack_f16(lo, hi); }
  JFT_DEV static float to_float(Storage x) { return f16_to_float(x); }
  JFT_DEV static void mma(float (&c)[4], const FragmentA& a, u32 b0, u32 b1) {
    mma_f16(c, a.r, b0, b1);
  }
};

struct BF16 {
  using Storage = unsigned short;
  static constexpr bool kGeneralOnly = false;
  static constexpr int kBytes = 2;
  static constexpr int kStep = 16;
  JFT_DEV static u32 pack(float lo, float hi) { return pack_bf16(lo, hi); }
  JFT_DEV static float to_float(Storage x) { return bits_float(static_cast<u32>(x) << 16); }
  JFT_DEV static void mma(float (&c)[4], const FragmentA& a, u32 b0, u32 b1) {
    mma_bf16(c, a.r, b0, b1);
  }
};

// float32 inputs through the TF32 unit: 10 bits of mantissa, rounded (the unit itself truncates).
struct TF32 {
  using Storage = float;
  static constexpr bool kGeneralOnly = false;
  static constexpr int kBytes = 4;
  static constexpr int kStep = 8;
  JFT_DEV static float to_float(Storage x) { return x; }
  JFT_DEV static void mma(float (&c)[4], const FragmentA& a, u32 b0, u32 b1) {
    u32 big[4];
    JFT_UNROLL
    for (int i = 0; i < 4; ++i) big[i] = round_tf32(a.r[i]);
    mma_tf32(c, big, round_tf32(b0), round_tf32(b1));
  }
};

// float32 to nearly full accuracy: x = big + small, ab = big big + big small + small big.
struct TF32x3 : TF32 {
  static constexpr bool kGeneralOnly =
      true;  // one road for logits: these kernels take long to compile
  JFT_DEV static u32 rest(u32 x, u32 big) {
    // An infinity leaves inf - inf = NaN: the big part alone carries it.
    const bool finite = (big & 0x7F800000u) != 0x7F800000u;
    return finite ? round_tf32(float_bits(bits_float(x) - bits_float(big))) : 0u;
  }
  JFT_DEV static void mma(float (&c)[4], const FragmentA& a, u32 b0, u32 b1) {
    u32 big[4], small[4];
    JFT_UNROLL
    for (int i = 0; i < 4; ++i) {
      big[i] = round_tf32(a.r[i]);
      small[i] = rest(a.r[i], big[i]);
    }
    const u32 b0_big = round_tf32(b0), b1_big = round_tf32(b1);
    mma_tf32(c, small, b0_big, b1_big);
    mma_tf32(c, big, rest(b0, b0_big), rest(b1, b1_big));
    mma_tf32(c, big, b0_big, b1_big);
  }
};

}  // namespace jft::cuda
