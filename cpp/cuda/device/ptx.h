// One thin wrapper per machine instruction. Two bodies: PTX, and the emulator's C++ (emulator/).
// Shared memory is addressed by byte offsets into the block's dynamic shared memory.
#pragma once

#include "../../core/semantics.h"

#if defined(JFT_EMULATE)
#include "../emulator/ptx_emulated.h"
#else

#define JFT_DEV __device__ __forceinline__
#define JFT_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define JFT_UNROLL _Pragma("unroll")
#define JFT_NO_UNROLL _Pragma("unroll 1")
#define JFT_PRAGMA(text) _Pragma(#text)
#define JFT_UNROLL_BY(n) JFT_PRAGMA(unroll n)

namespace jft::cuda {

extern __shared__ __align__(128) char jft_shared[];

JFT_DEV int thread_index() { return static_cast<int>(threadIdx.x); }
JFT_DEV i64 block_index() { return static_cast<i64>(blockIdx.x); }

template <class T>
JFT_DEV T& shared(u32 offset) {
  return *reinterpret_cast<T*>(jft_shared + offset);
}

JFT_DEV u32 shared_window(u32 offset) {
  return static_cast<u32>(__cvta_generic_to_shared(jft_shared)) + offset;
}

// Hides a value's origin: what is computed from it inside a loop is not hoisted out of the loop,
// where it would only occupy registers.
template <class T>
JFT_DEV T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}
JFT_DEV int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- Synchronisation
// -------------------------------------------------------------------------------

JFT_DEV void sync_block() { __syncthreads(); }
JFT_DEV bool sync_block_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
JFT_DEV void sync_warp() { __syncwarp(); }
JFT_DEV float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
JFT_DEV u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
JFT_DEV u32 shuffle(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
JFT_DEV u32 ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
// Lowest set bit, -1 for 0.
JFT_DEV int first_bit(u32 x) { return __ffs(static_cast<int>(x)) - 1; }

// ---- Asynchronous copies (sm_80)
// -------------------------------------------------------------------

// 16 bytes to shared memory; `bytes` of them (0 or more) come from `src`, the rest are zero.
JFT_DEV void copy_async(u32 dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_window(dst)),
               "l"(src), "r"(bytes)
               : "memory");
}
JFT_DEV void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most kPending of this thread's groups are still in flight.
template <int kPending>
JFT_DEV void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ---- Matrix fragments
// --------------------------------------------------------------------------------

JFT_DEV void ldmatrix_x4(u32 (&r)[4], u32 offset) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_window(offset)));
}
JFT_DEV void ldmatrix_x4_trans(u32 (&r)[4], u32 offset) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_window(offset)));
}

// One word of a fragment. Not a C++ load: those are moved far ahead of their use and spill.
JFT_DEV u32 load_word(u32 offset) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(r) : "r"(shared_window(offset)));
  return r;
}

#define JFT_MMA(shape, type)                                                   \
  asm("mma.sync.aligned." shape ".row.col.f32." type "." type                  \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

JFT_DEV void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  JFT_MMA("m16n8k16", "f16");
}
JFT_DEV void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  JFT_MMA("m16n8k16", "bf16");
}
JFT_DEV void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  JFT_MMA("m16n8k8", "tf32");
}
#undef JFT_MMA

// ---- Conversions and arithmetic
// ----------------------------------------------------------------------

JFT_DEV u32 float_bits(float x) { return __float_as_uint(x); }
JFT_DEV float bits_float(u32 x) { return __uint_as_float(x); }

// Two floats rounded to nearest; `lo` lands in the low half.
JFT_DEV u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
JFT_DEV u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
JFT_DEV float f16_to_float(unsigned short bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;\n" : "=f"(r) : "h"(bits));
  return r;
}
JFT_DEV u32 round_tf32(u32 x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(__uint_as_float(x)));
  return r;
}

JFT_DEV float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
  return r;
}
JFT_DEV float log_accurate(float x) { return logf(x); }
JFT_DEV float reciprocal(float x) { return __frcp_rn(x); }
JFT_DEV float fast_divide(float x, float y) { return __fdividef(x, y); }
// Written out so that forward and backward round alike: no contraction, no reassociation.
JFT_DEV float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
JFT_DEV float mul_rn(float a, float b) { return __fmul_rn(a, b); }
JFT_DEV float add_rn(float a, float b) { return __fadd_rn(a, b); }
JFT_DEV float max_f(float a, float b) { return fmaxf(a, b); }
JFT_DEV float abs_f(float a) { return fabsf(a); }

JFT_DEV int min_int(int a, int b) { return min(a, b); }
JFT_DEV int max_int(int a, int b) { return max(a, b); }

JFT_DEV void atomic_add(float* p, float x) { atomicAdd(p, x); }
JFT_DEV void atomic_or_shared(u32 offset, u32 bits) { atomicOr(&shared<u32>(offset), bits); }

}  // namespace jft::cuda
#endif
