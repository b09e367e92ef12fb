// D[64 x N] (+)= A[64 x 16] B[16 x N] by one warpgroup, f32 accumulators, bf16 or f16 operands.
// A from shared memory (descriptor) or registers; B from shared memory. A "transposed" operand is
// the one whose MN dimension is contiguous in memory (V in P V, dO in P^T dO ...): no copy is
// needed for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "memory.cuh"

namespace jft::hopper {

// ---- Descriptors of tiles made of panels: 64 columns (128 bytes) wide, 128B swizzle, 1024-byte
// aligned. Fields: [0,14) address/16, [16,30) leading offset/16, [32,46) stride offset/16,
// [62,64) swizzle.

constexpr uint64_t kSwizzle128 = 1ull << 62;
constexpr uint64_t kEightRows = uint64_t(1024 >> 4) << 32;  // 8 rows of 128 bytes

// Contraction along the panel's columns. Next k16 step inside a panel: address + 32 bytes.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
  return kSwizzle128 | kEightRows | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}

// Contraction along the panel's rows; MN runs over columns, then panels `panel_bytes` apart. Next
// k16 step: address + 2048 bytes.
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, uint32_t panel_bytes) {
  return kSwizzle128 | kEightRows | (uint64_t(panel_bytes >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// Same tile, `bytes` further (bytes % 16 == 0).
__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Byte offset of k16 step `k` in a K-major tile whose panels are panel_bytes apart.
__host__ __device__ constexpr uint32_t k_major_step(int k, uint32_t panel_bytes) {
  return (k / 4) * panel_bytes + (k % 4) * 32;
}

constexpr uint32_t kMnMajorStep = 16 * 128;

#if !defined(JFT_EMULATE)

// ---- Ordering ----

// Before the first product that reads registers written by ordinary code.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of accumulators above a wait, or writes below a fence.
template <int kN>
__device__ __forceinline__ void pin(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kN>
__device__ __forceinline__ void pin(uint32_t (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// ---- The instruction, one width N at a time ----

template <int kN>
struct Wgmma;

#define JFT_N10(t)                                                                                 \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t \
  "9, "
#define JFT_N0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define JFT_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define JFT_D8(i) JFT_D4(i), JFT_D4((i) + 4)
#define JFT_D16(i) JFT_D8(i), JFT_D8((i) + 8)
#define JFT_D32(i) JFT_D16(i), JFT_D16((i) + 16)
#define JFT_D64(i) JFT_D32(i), JFT_D32((i) + 32)
// The accumulator lists by width; function-like, so that they travel through macros unexpanded.
#define JFT_OUT32() JFT_D16(0)
#define JFT_OUT64() JFT_D32(0)
#define JFT_OUT80() JFT_D32(0), JFT_D8(32)
#define JFT_OUT96() JFT_D32(0), JFT_D16(32)
#define JFT_OUT128() JFT_D64(0)
#define JFT_OUT160() JFT_D64(0), JFT_D16(64)
#define JFT_OUT176() JFT_D64(0), JFT_D16(64), JFT_D8(80)
#define JFT_OUT112() JFT_D32(0), JFT_D16(32), JFT_D8(48)
#define JFT_OUT192() JFT_D64(0), JFT_D32(64)
#define JFT_OUT256() JFT_D64(0), JFT_D64(64)

// names: list of the N/2 accumulators; then the numbers of the operands that follow them.
#define JFT_WGMMA_SS(n, type, names, outs, p0, p1, p2, p3, p4)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p2                                   \
               ", 0;\n"                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names \
               "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p3 ", %" #p4 ";\n}"                   \
               : outs()                                                                   \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB))
#define JFT_WGMMA_RS(n, type, names, outs, p0, p1, p2, p3, p4, p5, p6)                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p5                                       \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" names     \
               "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4 ", p, 1, 1, %" #p6 ";\n}" \
               : outs()                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),         \
                 "n"(kTransB))

#define JFT_DEFINE_WGMMA(n, names, outs, p0, p1, p2, p3, p4, p5, p6)                            \
  template <>                                                                                   \
  struct Wgmma<n> {                                                                             \
    template <class T, int kTransA, int kTransB>                                                \
    __device__ __forceinline__ static void ss(float (&d)[n / 2], uint64_t a, uint64_t b,        \
                                              int accumulate) {                                 \
      if constexpr (std::is_same<T, __half>::value)                                             \
        JFT_WGMMA_SS(n, "f16", names, outs, p0, p1, p2, p3, p4);                                \
      else                                                                                      \
        JFT_WGMMA_SS(n, "bf16", names, outs, p0, p1, p2, p3, p4);                               \
    }                                                                                           \
    template <class T, int kTransB>                                                             \
    __device__ __forceinline__ static void rs(float (&d)[n / 2], const uint32_t* a, uint64_t b, \
                                              int accumulate) {                                 \
      if constexpr (std::is_same<T, __half>::value)                                             \
        JFT_WGMMA_RS(n, "f16", names, outs, p0, p1, p2, p3, p4, p5, p6);                        \
      else                                                                                      \
        JFT_WGMMA_RS(n, "bf16", names, outs, p0, p1, p2, p3, p4, p5, p6);                       \
    }                                                                                           \
  };

JFT_DEFINE_WGMMA(32, JFT_N0 "%10, %11, %12, %13, %14, %15", JFT_OUT32, 16, 17, 18, 19, 20, 21, 22)
JFT_DEFINE_WGMMA(64, JFT_N0 JFT_N10(1) JFT_N10(2) "%30, %31", JFT_OUT64, 32, 33, 34, 35, 36, 37, 38)
JFT_DEFINE_WGMMA(80,
                 JFT_N0 JFT_N10(1) JFT_N10(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39",
                 JFT_OUT80, 40, 41, 42, 43, 44, 45, 46)
JFT_DEFINE_WGMMA(96,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) "%40, %41, %42, %43, %44, %45, %46, %47",
                 JFT_OUT96, 48, 49, 50, 51, 52, 53, 54)
JFT_DEFINE_WGMMA(112,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) "%50, %51, %52, %53, %54, %55",
                 JFT_OUT112, 56, 57, 58, 59, 60, 61, 62)
JFT_DEFINE_WGMMA(128,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) JFT_N10(5) "%60, %61, %62, %63",
                 JFT_OUT128, 64, 65, 66, 67, 68, 69, 70)
JFT_DEFINE_WGMMA(160,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) JFT_N10(5)
                     JFT_N10(6) "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79",
                 JFT_OUT160, 80, 81, 82, 83, 84, 85, 86)
JFT_DEFINE_WGMMA(176,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) JFT_N10(5) JFT_N10(6)
                     JFT_N10(7) "%80, %81, %82, %83, %84, %85, %86, %87",
                 JFT_OUT176, 88, 89, 90, 91, 92, 93, 94)
JFT_DEFINE_WGMMA(192,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) JFT_N10(5) JFT_N10(6) JFT_N10(7)
                     JFT_N10(8) "%90, %91, %92, %93, %94, %95",
                 JFT_OUT192, 96, 97, 98, 99, 100, 101, 102)
JFT_DEFINE_WGMMA(256,
                 JFT_N0 JFT_N10(1) JFT_N10(2) JFT_N10(3) JFT_N10(4) JFT_N10(5) JFT_N10(6) JFT_N10(7)
                     JFT_N10(8) JFT_N10(9) JFT_N10(10)
                         JFT_N10(11) "%120, %121, %122, %123, %124, %125, %126, %127",
                 JFT_OUT256, 128, 129, 130, 131, 132, 133, 134)

#undef JFT_N10
#undef JFT_N0
#endif

}  // namespace jft::hopper
