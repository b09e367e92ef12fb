// The emulator's bodies of hopper/device: wgmma, the copy engine, mbarriers, named barriers.
//
// Made to find faults: products run when they are waited for, and not earlier; until then their
// accumulators are poisoned. Loads land late and in any order over poisoned memory, stores read
// their buffer at the last moment. A read by wgmma or the copy engine of bytes that were written
// without a proxy fence behind them is an error, and so is a product without wgmma.fence.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "../device/ptx.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static  // kernels that use it run one block at a time
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

namespace jft::emu {

struct Operand {  // of a product: shared memory by descriptor, or registers (A)
  bool registers, transposed;
  uint64_t descriptor;
  const uint32_t* values;
};
void issue_product(int n, bool half, float* d, Operand a, uint64_t b, bool b_transposed,
                   bool accumulate);
void fence_products();
void commit_products();
void wait_products(int pending);

void named_barrier(int id, int threads, bool wait);
void phase_init(uint32_t bar, uint32_t arrivals);
void phase_arrive(uint32_t bar, uint32_t bytes);
void phase_wait(uint32_t bar, uint32_t parity);

void load_box(uint32_t smem, const CUtensorMap* map, uint32_t bar, const int (&at)[5]);
void store_box(const CUtensorMap* map, uint32_t smem, const int (&at)[5]);
void load_bytes(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar);
void add_floats(float* global, uint32_t smem, uint32_t bytes);
void commit_stores();
void wait_stores(int pending, bool written);

void fence_proxy();
// Ordinary access to shared memory; `address` is what shared_address() gave.
char* read_shared(uint32_t address, uint32_t bytes);
char* write_shared(uint32_t address, uint32_t bytes);
// Shared memory does not start at a multiple of 1024.
constexpr uint32_t kSharedStart = 1040;

}  // namespace jft::emu

namespace jft::hopper {

struct Index {
  int (*get)();
  operator int() const { return get(); }
};
struct Index3 {
  Index x;
};
inline const Index3 threadIdx{{[] { return emu::block->current; }}};
inline const Index3 blockIdx{{[] { return static_cast<int>(emu::block->index); }}};
inline const Index3 gridDim{{[] { return static_cast<int>(emu::block->grid); }}};

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __log2f(float x) { return std::log2(x); }
inline void __syncthreads() { emu::sync_block_or(0); }
inline void __syncwarp() { cuda::sync_warp(); }
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return cuda::shuffle_any(x, (emu::block->current & 31) ^ mask);
}
template <class T>
inline T __shfl_sync(unsigned, T x, int lane) {
  return cuda::shuffle_any(x, lane);
}
inline int __all_sync(unsigned, bool x) { return cuda::ballot(x) == 0xffffffffu; }
inline unsigned __ballot_sync(unsigned, bool x) { return cuda::ballot(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int atomicAdd(int* p, int x) {
  const int old = *p;
  *p += x;
  return old;
}

// ---- memory.cuh ----

inline uint8_t* dynamic_shared() { return reinterpret_cast<uint8_t*>(emu::block->smem.data()); }
inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emu::block->smem.data()) +
         emu::kSharedStart;
}
inline void load_shared(uint32_t address, float& x0, float& x1) {
  const float* x = reinterpret_cast<const float*>(emu::read_shared(address, 8));
  x0 = x[0];
  x1 = x[1];
}
inline void load_shared(uint32_t address, float& x0, float& x1, float& x2, float& x3) {
  const float* x = reinterpret_cast<const float*>(emu::read_shared(address, 16));
  x0 = x[0];
  x1 = x[1];
  x2 = x[2];
  x3 = x[3];
}
inline void store_shared(uint32_t address, float x0, float x1, float x2, float x3) {
  float* x = reinterpret_cast<float*>(emu::write_shared(address, 16));
  x[0] = x0;
  x[1] = x1;
  x[2] = x2;
  x[3] = x3;
}
inline void reduce_add_v4(float* global, float x0, float x1, float x2, float x3) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emu::fail("red.v4 is not aligned");
  global[0] += x0;
  global[1] += x1;
  global[2] += x2;
  global[3] += x3;
}
inline void wait_for_count(const int* counter, int value) {
  emu::Fiber& me = emu::self();
  while (*counter != value) {
    me.wait = emu::Wait::kCount;
    me.counter = counter;
    me.value = value;
    emu::yield();
  }
}
inline void raise_count(int* counter) { ++*counter; }
inline void fence_global() {}

// ---- sync.cuh, mbarrier.cuh ----

inline void fence_async_shared() { emu::fence_proxy(); }
inline void named_sync(int id, int threads) { emu::named_barrier(id, threads, true); }
inline void named_arrive(int id, int threads) { emu::named_barrier(id, threads, false); }
template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void give_registers() {}
inline void mbarrier_init(uint32_t bar, uint32_t arrivals) { emu::phase_init(bar, arrivals); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t bar) { emu::phase_arrive(bar, 0); }
inline void mbarrier_arrive_expect(uint32_t bar, uint32_t bytes) { emu::phase_arrive(bar, bytes); }
inline void mbarrier_wait(uint32_t bar, uint32_t parity) { emu::phase_wait(bar, parity); }

// ---- tma.cuh ----

inline void tma_prefetch_map(const CUtensorMap*) {}
inline void tma_load(uint32_t smem, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                     int c3, int c4) {
  emu::load_box(smem, map, bar, {c0, c1, c2, c3, c4});
}
inline void tma_store(const CUtensorMap* map, uint32_t smem, int c0, int c1, int c2, int c3,
                      int c4) {
  emu::store_box(map, smem, {c0, c1, c2, c3, c4});
}
inline void bulk_load(uint32_t smem, const void* global, uint32_t bytes, uint32_t bar) {
  emu::load_bytes(smem, global, bytes, bar);
}
inline void bulk_reduce_add_f32(float* global, uint32_t smem, uint32_t bytes) {
  emu::add_floats(global, smem, bytes);
}
inline void bulk_commit() { emu::commit_stores(); }
template <int kPending>
inline void bulk_wait_read() {
  emu::wait_stores(kPending, false);
}
template <int kPending>
inline void bulk_wait() {
  emu::wait_stores(kPending, true);
}

// ---- wgmma.cuh ----

inline void wgmma_fence() { emu::fence_products(); }
inline void wgmma_commit() { emu::commit_products(); }
template <int kPending>
inline void wgmma_wait() {
  emu::wait_products(kPending);
}
template <class T, int kN>
inline void pin(T (&)[kN]) {}

template <int kN>
struct Wgmma {
  template <class T, int kTransA, int kTransB>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    emu::issue_product(kN, std::is_same<T, __half>::value, d, {false, kTransA != 0, a, nullptr}, b,
                       kTransB != 0, accumulate != 0);
  }
  template <class T, int kTransB>
  static void rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    emu::issue_product(kN, std::is_same<T, __half>::value, d, {true, false, 0, a}, b, kTransB != 0,
                       accumulate != 0);
  }
};

// ---- fragment.cuh ----

template <class T>
inline uint32_t pack(float lo, float hi);
template <>
inline uint32_t pack<__nv_bfloat16>(float lo, float hi) {
  return cuda::pack_bf16(lo, hi);
}
template <>
inline uint32_t pack<__half>(float lo, float hi) {
  return cuda::pack_f16(lo, hi);
}
template <bool kHalf>
inline float low_half(uint32_t bits) {
  return kHalf ? cuda::f16_to_float(static_cast<uint16_t>(bits)) : cuda::bits_float(bits << 16);
}
inline uint32_t transpose_8x8(uint32_t x) {
  const int lane = emu::block->current & 31;
  uint32_t y = 0;
  for (int e = 0; e < 2; ++e) {
    // Row 2 (lane % 4) + e of the source, column lane / 4.
    const uint32_t from = cuda::shuffle_any(x, 4 * (2 * (lane % 4) + e) + lane / 4 / 2);
    y |= (from >> (16 * (lane / 4 % 2)) & 0xFFFFu) << (16 * e);
  }
  return y;
}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.f / x; }

inline void stmatrix_any(uint32_t address, uint32_t (&r)[4], bool trans) {
  struct Args {
    uint32_t address, r[4];
    bool trans;
    int thread;
  } args{address, {r[0], r[1], r[2], r[3]}, trans, emu::block->current};
  // The lane that gives the address of a row answers for the fence behind it.
  emu::write_shared(address, 16);
  emu::warp_collective(&args, [](void** s) {
    for (int m = 0; m < 4; ++m) {
      for (int l = 0; l < 32; ++l) {
        const Args* from = static_cast<const Args*>(s[l]);
        for (int e = 0; e < 2; ++e) {
          const uint16_t x = static_cast<uint16_t>(from->r[m] >> (16 * e));
          const int row = from->trans ? 2 * (l % 4) + e : l / 4;
          const int col = from->trans ? l / 4 : 2 * (l % 4) + e;
          const Args* at = static_cast<const Args*>(s[8 * m + row]);
          std::memcpy(emu::read_shared(at->address, 16) + 2 * col, &x, 2);
        }
      }
    }
  });
}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  stmatrix_any(address, r, false);
}
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                              uint32_t r3) {
  uint32_t r[4] = {r0, r1, r2, r3};
  stmatrix_any(address, r, true);
}

}  // namespace jft::hopper
