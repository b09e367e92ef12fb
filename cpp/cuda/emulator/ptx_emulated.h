// The emulator's bodies of device/ptx.h. Fragment layouts as the PTX manual gives them.
#pragma once

#include <cmath>
#include <cstring>

#include "emulator.h"

#define JFT_DEV inline
#define JFT_KERNEL(threads, blocks) void
#define JFT_UNROLL
#define JFT_NO_UNROLL
#define JFT_UNROLL_BY(n)

namespace jft::cuda {

inline int thread_index() { return emu::block->current; }
inline i64 block_index() { return emu::block->index; }

template <class T>
inline T& shared(u32 offset) {
  return *reinterpret_cast<T*>(emu::shared_at(offset, sizeof(T)));
}

template <class T>
inline T opaque(T x) {
  return x;
}

inline void sync_block() { emu::sync_block_or(0); }
inline bool sync_block_or(bool predicate) { return emu::sync_block_or(predicate) != 0; }
inline void sync_warp() {
  emu::warp_collective(nullptr, [](void**) {});
}
template <class T>
inline T shuffle_any(T x, int source) {
  struct Args {
    T in, out;
    int source;
  } args{x, x, source};
  emu::warp_collective(&args, [](void** s) {
    for (int l = 0; l < 32; ++l) {
      Args* a = static_cast<Args*>(s[l]);
      a->out = static_cast<Args*>(s[a->source & 31])->in;
    }
  });
  return args.out;
}
inline float shuffle_xor(float x, int mask) { return shuffle_any(x, (thread_index() & 31) ^ mask); }
inline u32 shuffle_xor(u32 x, int mask) { return shuffle_any(x, (thread_index() & 31) ^ mask); }
inline u32 shuffle(u32 x, int lane) { return shuffle_any(x, lane); }
inline u32 ballot(bool predicate) {
  struct Args {
    bool in;
    u32 out;
  } args{predicate, 0};
  emu::warp_collective(&args, [](void** s) {
    u32 bits = 0;
    for (int l = 0; l < 32; ++l) bits |= u32(static_cast<Args*>(s[l])->in) << l;
    for (int l = 0; l < 32; ++l) static_cast<Args*>(s[l])->out = bits;
  });
  return args.out;
}
inline int first_bit(u32 x) { return x == 0 ? -1 : __builtin_ctz(x); }

inline void copy_async(u32 dst, const void* src, int bytes) {
  if (dst % 16 != 0 || (bytes > 0 && reinterpret_cast<uintptr_t>(src) % 16 != 0)) {
    emu::fail("cp.async is not aligned to 16 bytes");
  }
  emu::shared_at(dst, 16);
  emu::self().open.push_back({dst, src, bytes});
}
inline void copy_async_commit() {
  emu::Fiber& f = emu::self();
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}
template <int kPending>
inline void copy_async_wait() {
  emu::copy_async_wait(kPending);
}

inline void ldmatrix_any(u32 (&r)[4], u32 offset, bool trans) {
  struct Args {
    u32 offset;
    u32* r;
    bool trans;
  } args{offset, r, trans};
  if (offset % 16 != 0) emu::fail("ldmatrix is not aligned to 16 bytes");
  emu::warp_collective(&args, [](void** s) {
    for (int m = 0; m < 4; ++m) {
      uint16_t tile[8][8];
      for (int i = 0; i < 8; ++i) {
        std::memcpy(tile[i], emu::shared_at(static_cast<Args*>(s[m * 8 + i])->offset, 16), 16);
      }
      for (int l = 0; l < 32; ++l) {
        Args* a = static_cast<Args*>(s[l]);
        const int row = l / 4, col = 2 * (l % 4);
        const uint16_t lo = a->trans ? tile[col][row] : tile[row][col];
        const uint16_t hi = a->trans ? tile[col + 1][row] : tile[row][col + 1];
        a->r[m] = lo | (u32(hi) << 16);
      }
    }
  });
}
inline u32 load_word(u32 offset) { return shared<u32>(offset); }
inline void ldmatrix_x4(u32 (&r)[4], u32 offset) { ldmatrix_any(r, offset, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 offset) { ldmatrix_any(r, offset, true); }

inline u32 float_bits(float x) {
  u32 r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline float bits_float(u32 x) {
  float r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline unsigned short bf16_bits(float x) {
  const u32 u = float_bits(x);
  if (x != x) return 0x7FFF;
  return static_cast<unsigned short>((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
}
inline float f16_to_float(unsigned short h) {
  const int e = (h >> 10) & 31, m = h & 1023;
  const float sign = (h & 0x8000) ? -1.0f : 1.0f;
  if (e == 31) return m ? NAN : sign * INFINITY;
  return sign * (e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp(float(m), -24));
}
inline unsigned short f16_bits(float x) {
  const unsigned short sign = static_cast<unsigned short>((float_bits(x) >> 16) & 0x8000);
  const float a = std::fabs(x);
  if (x != x) return 0x7FFF;
  if (a >= 65520.0f) return sign | 0x7C00;
  if (a == 0.0f) return sign;
  int e;
  std::frexp(a, &e);
  const int shift = e - 11 < -24 ? -24 : e - 11;
  const int q = static_cast<int>(std::nearbyint(std::ldexp(a, -shift)));  // 11 bits, ties to even
  if (shift == -24) return static_cast<unsigned short>(sign | q);
  return static_cast<unsigned short>(sign | (((shift + 24) << 10) + q));
}
inline u32 pack_bf16(float lo, float hi) { return bf16_bits(lo) | (u32(bf16_bits(hi)) << 16); }
inline u32 pack_f16(float lo, float hi) { return f16_bits(lo) | (u32(f16_bits(hi)) << 16); }
inline u32 round_tf32(u32 x) {
  if ((x & 0x7F800000u) == 0x7F800000u) return x;
  return (x + 0x1000u) & 0xFFFFE000u;
}

struct MmaArgs {
  float* c;
  const u32* a;
  u32 b[2];
};
// D = A B + D for one warp; `get` reads element n (0 or 1) of a 32-bit register.
template <int kPerRegister, class Get>
inline void mma_any(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Get get) {
  MmaArgs args{c, a, {b0, b1}};
  emu::warp_collective(&args, [get](void** s) {
    constexpr int kK = 8 * kPerRegister;
    float ma[16][kK], mb[kK][8];
    for (int l = 0; l < 32; ++l) {
      const MmaArgs* x = static_cast<const MmaArgs*>(s[l]);
      const int g = l / 4, t = l % 4;
      for (int r = 0; r < 4; ++r) {
        for (int n = 0; n < kPerRegister; ++n) {
          ma[g + 8 * (r & 1)][kPerRegister * t + n + (r >> 1) * (kK / 2)] = get(x->a[r], n);
        }
      }
      for (int r = 0; r < 2; ++r) {
        for (int n = 0; n < kPerRegister; ++n) {
          mb[kPerRegister * t + n + r * (kK / 2)][g] = get(x->b[r], n);
        }
      }
    }
    for (int l = 0; l < 32; ++l) {
      float* out = static_cast<const MmaArgs*>(s[l])->c;
      for (int e = 0; e < 4; ++e) {
        const int i = l / 4 + 8 * (e >> 1), j = 2 * (l % 4) + (e & 1);
        float sum = 0;
        for (int k = 0; k < kK; ++k) sum += ma[i][k] * mb[k][j];
        out[e] += sum;
      }
    }
  });
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_any<2>(c, a, b0, b1,
             [](u32 r, int n) { return f16_to_float(static_cast<unsigned short>(r >> (16 * n))); });
}
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_any<2>(c, a, b0, b1, [](u32 r, int n) { return bits_float((r >> (16 * n)) << 16); });
}
inline void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_any<1>(c, a, b0, b1, [](u32 r, int) { return bits_float(r & 0xFFFFE000u); });
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log_accurate(float x) { return std::log(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float fast_divide(float x, float y) { return x / y; }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float mul_rn(float a, float b) { return a * b; }
inline float add_rn(float a, float b) { return a + b; }
inline float max_f(float a, float b) { return std::fmax(a, b); }
inline float abs_f(float a) { return std::fabs(a); }

inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

inline void atomic_add(float* p, float x) { *p += x; }
inline void atomic_or_shared(u32 offset, u32 bits) { shared<u32>(offset) |= bits; }

}  // namespace jft::cuda
