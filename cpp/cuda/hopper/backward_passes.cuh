// What surrounds the main backward kernel: delta and gauges before it, dq to 16 bits and dsinks
// after it.
#pragma once

#include "../../core/attrs.h"
#include "backward_params.h"
#include "device/fragment.cuh"

namespace jft::hopper {

constexpr int kPassThreads = 256;

struct PassTile {
  int m, h, b0, b1;
  int64_t tile;  // over (b0, b1, h, m)

  __device__ __forceinline__ explicit PassTile(const PassParams& p) {
    tile = blockIdx.x;
    const int head = blockIdx.x / p.q_tiles, b = head / p.shape.Hq;
    m = blockIdx.x - head * p.q_tiles;
    h = head - b * p.shape.Hq;
    b0 = b / p.shape.B1;
    b1 = b - b0 * p.shape.B1;
  }
};

template <class T>
__device__ __forceinline__ T* wide_row(const Wide& t, int b0, int b1, int h, int64_t i) {
  return static_cast<T*>(t.data) + b0 * t.b0 + b1 * t.b1 + h * t.head + i * t.row;
}

template <class T>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  float sum = 0.f;
  const T* x = reinterpret_cast<const T*>(&a);
  const T* y = reinterpret_cast<const T*>(&b);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

// delta = rowsum(o do) - dL, gauges, and with kAtomicDq the dq scratch = 0. Dead rows by selection:
// their do and dL may be NaN.
template <class T, int kDim, int kRows, bool kAtomicDq>
__global__ void __launch_bounds__(kPassThreads)
    backward_prepare(const __grid_constant__ PassParams p) {
  constexpr int kLanes = kDim / 8;  // 16 bytes of a row each
  const PassTile t(p);
  if (kAtomicDq) {
    float4* zero = reinterpret_cast<float4*>(p.dq_scratch + t.tile * (kRows * kDim));
#pragma unroll
    for (int i = 0; i < kRows * kDim / 4 / kPassThreads; ++i)
      zero[i * kPassThreads + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (threadIdx.x == 0) p.semaphore[t.tile] = 0;
  }

  const Positions pos = load_positions(p.positions, p.shape, t.b0, t.b1);
  const int lane = threadIdx.x % kLanes;
#pragma unroll 4
  for (int r = threadIdx.x / kLanes; r < kRows; r += kPassThreads / kLanes) {
    const int64_t i = int64_t(t.m) * kRows + r;
    bool live = i < p.shape.Sq;
    if (live) {
      const Range keys = visible_keys(pos, i);
      live = keys.begin < keys.end;
    }
    float sum = 0.f;
    uint32_t some = 0;  // bits of o
    if (live && lane * 8 < p.Dv) {
      const uint4 o =
          *reinterpret_cast<const uint4*>(wide_row<T>(p.o, t.b0, t.b1, t.h, i) + lane * 8);
      some = (o.x | o.y | o.z | o.w) & 0x7FFF7FFFu;
      sum = dot8<T>(
          o, *reinterpret_cast<const uint4*>(wide_row<T>(p.d_o, t.b0, t.b1, t.h, i) + lane * 8));
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      some |= __shfl_xor_sync(0xffffffffu, some, offset);
    }
    if (lane != 0) continue;
    float gauge = 0.f, c = static_cast<float>(kEmptyRow), delta = kDeadDelta;
    if (live) {
      const float row_max = p.row_max.at(t.b0, t.b1, t.h)[i * p.row_max.row];
      const float log_sum = p.row_log_sum.at(t.b0, t.b1, t.h)[i * p.row_log_sum.row];
      // An empty row with a sink has L = sink and o = 0 (or weights below the type's resolution).
      const bool sink_only = p.general && p.sinks.data && log_sum == 0.f && some == 0 &&
                             row_max == *p.sinks.at(t.b0, t.b1, t.h);
      if (log_sum < static_cast<float>(kEmptyRow / 2) && !sink_only) {
        if (p.general) {
          gauge = row_max;
          c = log_sum * 1.4426950408889634f;
        } else {
          // g + c = (m + ln l) log2 e, the rounding of g made good in c
          gauge = __fmul_rn(row_max, 1.4426950408889634f);
          c = static_cast<float>(
              (double(log_sum) + (double(row_max) - double(gauge) * 0.69314718055994530942)) *
              1.4426950408889634074);
        }
        delta = sum - (p.dlse.data ? p.dlse.at(t.b0, t.b1, t.h)[i * p.dlse.row] : 0.f);
      }
    }
    const int64_t row = t.tile * kRows + r;
    float* pair = p.gauge + 4 * (row >> 1) + (row & 1);
    pair[0] = gauge;
    pair[2] = c;
    p.delta[row] = delta;
  }
}

// dq = scale * scratch, from fragment order to rows, rounded once.
template <class T, int kDim, int kRows>
__global__ void __launch_bounds__(kPassThreads)
    backward_finish(const __grid_constant__ PassParams p) {
  constexpr int kPitch = kDim + 8;
  __shared__ __align__(16) T tile[kRows * kPitch];
  const PassTile t(p);
  const float4* from = reinterpret_cast<const float4*>(p.dq_scratch + t.tile * (kRows * kDim));
#pragma unroll
  for (int n = 0; n < kRows * kDim / 4 / kPassThreads; ++n) {
    const int index = n * kPassThreads + threadIdx.x;
    const float4 x = from[index];
    const int part = index / 1024, group = index / 128 % 8, thread = index % 128;
    const int row = 16 * (thread / 32) + thread % 32 / 4 + (kDim == 64 ? 64 * part : 0);
    const int col = 8 * group + 2 * (thread % 4) + (kDim == 64 ? 0 : 64 * part);
    *reinterpret_cast<uint32_t*>(tile + row * kPitch + col) = pack<T>(x.x * p.scale, x.y * p.scale);
    *reinterpret_cast<uint32_t*>(tile + (row + 8) * kPitch + col) =
        pack<T>(x.z * p.scale, x.w * p.scale);
  }
  __syncthreads();
  constexpr int kLanes = kDim / 8;
  const int lane = threadIdx.x % kLanes;
  for (int r = threadIdx.x / kLanes; r < kRows; r += kPassThreads / kLanes) {
    const int64_t i = int64_t(t.m) * kRows + r;
    if (i < p.shape.Sq && lane * 8 < p.D)
      *reinterpret_cast<uint4*>(wide_row<T>(p.dq, t.b0, t.b1, t.h, i) + lane * 8) =
          *reinterpret_cast<const uint4*>(tile + r * kPitch + lane * 8);
  }
}

// dsink_h = - sum exp(sink_h - L) delta, one block per element of dsinks, in a fixed order. A dead
// row has L = sink and delta = -dL.
template <int kRows>
__global__ void __launch_bounds__(kPassThreads, 2)
    backward_sinks(const __grid_constant__ PassParams p) {
  const int h = blockIdx.x % p.shape.Hq, element = blockIdx.x / p.shape.Hq;
  const bool all0 = p.dsinks.b0 == 0, all1 = p.dsinks.b1 == 0;
  const int n1 = all1 ? 1 : p.shape.B1;
  const int first0 = all0 ? 0 : element / n1, last0 = all0 ? p.shape.B0 : first0 + 1;
  const int first1 = all1 ? 0 : element % n1, last1 = all1 ? p.shape.B1 : first1 + 1;
  float sum = 0.f;
  for (int b0 = first0; b0 < last0; ++b0)
    for (int b1 = first1; b1 < last1; ++b1) {
      const float sink = *p.sinks.at(b0, b1, h);
      const int64_t head = int64_t(b0 * p.shape.B1 + b1) * p.shape.Hq + h;
      for (int i = threadIdx.x; i < p.shape.Sq; i += kPassThreads) {
        if (!(sink > -INFINITY)) continue;
        const float delta = p.delta[head * p.q_tiles * kRows + i];
        if (delta != kDeadDelta) {
          const float m = p.row_max.at(b0, b1, h)[i * p.row_max.row];
          const float c = p.row_log_sum.at(b0, b1, h)[i * p.row_log_sum.row];
          sum -= expf((sink - m) - c) * delta;
        } else if (p.dlse.data) {
          sum += p.dlse.at(b0, b1, h)[i * p.dlse.row];
        }
      }
    }
  __shared__ float partial[kPassThreads];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int width = kPassThreads / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) *p.dsinks.at(first0, first1, h) = partial[0];
}

}  // namespace jft::hopper
