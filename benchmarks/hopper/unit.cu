// Unit tests of cpp/cuda/hopper/device: one kernel per idea, called from drive.py through ctypes.
#include <cuda_runtime.h>

#include "../../cpp/cuda/hopper/device/fragment.cuh"
#include "../../cpp/cuda/hopper/device/mbarrier.cuh"
#include "../../cpp/cuda/hopper/device/sync.cuh"
#include "../../cpp/cuda/hopper/device/tma.cuh"
#include "../../cpp/cuda/hopper/device/wgmma.cuh"
#include "../../cpp/cuda/hopper/host/maps.h"
#include "../../cpp/cuda/hopper/pipeline.cuh"

namespace jft::hopper {
namespace {

// C[64, 128] = A[64, 128] B[128, 128]. Memory of the operands by form:
//   A k-major: [64 m][128 k]   A mn-major: [128 k][64 m]   B k-major: [128 n][128 k]   B mn-major: [128 k][128 n]
// Results: f32 direct, 16-bit through stmatrix and a TMA store, f32 added twice by bulk reduction.
struct ProductParams {
  TileMap a, b, c16;
  float* c;
  float* sum;
};

constexpr int kAKMajor = 0, kAMnMajor = 1, kARegisters = 2;

template <class T, int kFormA, bool kBMn>
__global__ void __launch_bounds__(128, 1) product_kernel(const __grid_constant__ ProductParams p) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t bar_storage;
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u, bar = shared_address(&bar_storage);
  const uint32_t sa = base, sb = base + 16384, sc = base + 16384 + 32768;
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(bar, 16384 + 32768);
    if (kFormA == kAMnMajor) {
      tma_load(sa, &p.a.map, bar, 0, 0, 0, 0, 0);  // one panel of 128 rows
    } else {
      tma_load(sa, &p.a.map, bar, 0, 0, 0, 0, 0);  // two panels of 64 rows
      tma_load(sa + 8192, &p.a.map, bar, 64, 0, 0, 0, 0);
    }
    tma_load(sb, &p.b.map, bar, 0, 0, 0, 0, 0);
    tma_load(sb + 16384, &p.b.map, bar, 64, 0, 0, 0, 0);
  }
  __syncthreads();
  mbarrier_wait(bar, 0);

  float d[64];
  uint32_t fragment[32];
  if (kFormA == kARegisters) {
    // Read A by the documented swizzle and fragment layouts, independent of stmatrix.
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int step = i / 4, row = 16 * warp + lane / 4 + 8 * (i & 1);
      const int col = 16 * step + 2 * (lane & 3) + 8 * ((i >> 1) & 1);
      const uint32_t at = sa + (col / 64) * 8192 + swizzle128(row, (col % 64) / 8) + (col % 8) * 2;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(fragment[i]) : "r"(at));
    }
  }
  pin(fragment);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const uint64_t b = kBMn ? descriptor_advance(descriptor_mn_major(sb, 16384), k * kMnMajorStep)
                            : descriptor_advance(descriptor_k_major(sb), k_major_step(k, 16384));
    if (kFormA == kARegisters) {
      Wgmma<128>::template rs<T, kBMn>(d, fragment + 4 * k, b, k > 0);
    } else if (kFormA == kAMnMajor) {
      Wgmma<128>::template ss<T, 1, kBMn>(d, descriptor_advance(descriptor_mn_major(sa, 16384), k * kMnMajorStep),
                                          b, k > 0);
    } else {
      Wgmma<128>::template ss<T, 0, kBMn>(d, descriptor_advance(descriptor_k_major(sa), k_major_step(k, 8192)), b,
                                          k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);

  const int lane = threadIdx.x & 31, row = 16 * (threadIdx.x >> 5) + lane / 4;
  for (int i = 0; i < 64; ++i)
    p.c[(row + 8 * ((i >> 1) & 1)) * 128 + 8 * (i / 4) + 2 * (lane & 3) + (i & 1)] = d[i];
  store_fragments<T, 128>(sc, 8192, d, 1.f, 1.f);
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(&p.c16.map, sc, 0, 0, 0, 0, 0);
    tma_store(&p.c16.map, sc + 8192, 64, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
  __syncthreads();
  // 64 x 128 f32 = 32 768 bytes over b's buffer, thread-major.
  for (int i = 0; i < 16; ++i) {
    const uint32_t at = sb + i * 2048 + threadIdx.x * 16;
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(d[4 * i]), "f"(d[4 * i + 1]),
                 "f"(d[4 * i + 2]), "f"(d[4 * i + 3])
                 : "memory");
  }
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_reduce_add_f32(p.sum, sb, 32768);
    bulk_commit();
    bulk_reduce_add_f32(p.sum, sb, 32768);
    bulk_commit();
    bulk_wait<0>();
  }
}

// sum over tiles of x[tiles * 64, 64] through a ring of 2 stages, with register reallocation: the barrier
// phases wrap tiles / 2 times.
template <class T>
__global__ void __launch_bounds__(256, 1) ring_kernel(const __grid_constant__ TileMap x, int tiles, float* out) {
  extern __shared__ uint8_t raw[];
  __shared__ uint64_t bars[4];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u, bar = shared_address(bars);
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(bar + 8 * s, 1);
      mbarrier_init(bar + 16 + 8 * s, 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  Ring<2> ring(bar, bar + 16);
  if (warpgroup_index() == 0) {
    give_registers<40>();
    if (threadIdx.x == 0)
      for (int t = 0; t < tiles; ++t, ring.advance()) {
        ring.wait_empty();
        ring.expect(8192);
        tma_load(base + ring.stage * 8192, &x.map, ring.full_barrier(), 0, 64 * t, 0, 0, 0);
      }
  } else {
    take_registers<200>();
    float sum[32] = {};
    const int thread = threadIdx.x - 128;
    for (int t = 0; t < tiles; ++t, ring.advance()) {
      ring.wait_full();
      for (int i = 0; i < 32; ++i) {
        const int e = i * 128 + thread, row = e / 64, col = e % 64;
        uint16_t bits;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(bits)
                     : "r"(base + ring.stage * 8192 + swizzle128(row, col / 8) + (col % 8) * 2));
        sum[i] += static_cast<float>(*reinterpret_cast<const T*>(&bits));
      }
      ring.release();
    }
    for (int i = 0; i < 32; ++i) out[i * 128 + thread] = sum[i];
  }
}

Tensor matrix(void* data, int64_t cols) {
  Tensor t = {};
  t.data = data;
  t.row = cols;
  t.col = 1;
  return t;
}

template <class T, int kFormA, bool kBMn>
cudaError_t run_product(const ProductParams& p, cudaStream_t stream) {
  constexpr int kBytes = 16384 + 32768 + 16384 + 1024;
  if (cudaError_t e = cudaFuncSetAttribute(product_kernel<T, kFormA, kBMn>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
    return e;
  product_kernel<T, kFormA, kBMn><<<1, 128, kBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
cudaError_t product(int form_a, int b_mn, const ProductParams& p, cudaStream_t stream) {
  if (form_a == kAKMajor) return b_mn ? run_product<T, 0, true>(p, stream) : run_product<T, 0, false>(p, stream);
  if (form_a == kAMnMajor) return b_mn ? run_product<T, 1, true>(p, stream) : run_product<T, 1, false>(p, stream);
  return b_mn ? run_product<T, 2, true>(p, stream) : run_product<T, 2, false>(p, stream);
}

}  // namespace
}  // namespace jft::hopper

using namespace jft::hopper;

// a_rows, c_rows: rows that exist (the rest is filled with zeros or not written).
extern "C" int jft_unit_product(int half, int form_a, int b_mn, void* a, void* b, void* c16, float* c, float* sum,
                                int64_t a_rows, int64_t c_rows, void* stream) {
  ProductParams p;
  jft::Problem none = {};
  const BatchGroups g = fold_batch(none, false);
  const bool a_mn = form_a == kAMnMajor;
  if (cudaError_t e = make_map(&p.a, g, matrix(a, a_mn ? 64 : 128), half, {a_mn ? 64 : 128, a_rows, 1},
                               a_mn ? 128 : 64))
    return e;
  if (cudaError_t e = make_map(&p.b, g, matrix(b, 128), half, {128, 128, 1}, 128)) return e;
  if (cudaError_t e = make_map(&p.c16, g, matrix(c16, 128), half, {128, c_rows, 1}, 64)) return e;
  p.c = c;
  p.sum = sum;
  auto s = static_cast<cudaStream_t>(stream);
  return half ? product<__half>(form_a, b_mn, p, s) : product<__nv_bfloat16>(form_a, b_mn, p, s);
}

extern "C" int jft_unit_ring(void* x, int tiles, int64_t rows, float* out, void* stream) {
  TileMap m;
  jft::Problem none = {};
  if (cudaError_t e = make_map(&m, fold_batch(none, false), matrix(x, 64), false, {64, rows, 1}, 64)) return e;
  ring_kernel<__nv_bfloat16><<<1, 256, 2 * 8192 + 1024, static_cast<cudaStream_t>(stream)>>>(m, tiles, out);
  return cudaGetLastError();
}
