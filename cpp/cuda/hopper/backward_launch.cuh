// Host side of the backward pass for one 16-bit type. Included by backward_bf16.cu and
// backward_f16.cu.
#pragma once

#include "backward.cuh"
#include "backward_passes.cuh"
#include "host/args.h"
#include "host/device.h"
#include "host/maps.h"
#include "host/workspace.h"

namespace jft::hopper {

constexpr int64_t kBackwardL2Budget =
    40 << 20;  // q, do and dq scratch of the heads that run side by side

inline Wide wide(const BatchGroups& g, const Tensor& t) {
  return {t.data, group_stride(g, t, 1), group_stride(g, t, 0), t.head, t.row};
}

template <class Traits>
cudaError_t launch_backward_kernel(const BackwardParams& b, cudaStream_t stream) {
  return launch_kernel<backward_kernel<Traits>>(b.schedule.total, Traits::kThreads,
                                                Traits::kSharedBytes, stream, b);
}

template <class T, int kDim>
cudaError_t launch_backward_dim(const Problem& p, void* workspace, cudaStream_t stream) {
  using Traits = BackwardTraits<T, kDim, false, false>;
  constexpr int kRows = Traits::kRows;
  constexpr bool kHalf = std::is_same<T, __half>::value;
  const BatchGroups g = fold_batch(p, true);
  const BackwardScratch scratch(p);
  uint8_t* base = align_scratch(workspace);

  PassParams pass;
  pass.o = wide(g, p.in[kO]);
  pass.d_o = wide(g, p.in[kDO]);
  pass.dq = wide(g, p.out[kResDQ]);
  pass.row_max = strided<const float>(g, p.in[kRowMax]);
  pass.row_log_sum = strided<const float>(g, p.in[kRowLogSum]);
  pass.dlse = strided<const float>(g, p.in[kDLse]);
  pass.sinks = strided<const float>(g, p.in[kSinks]);
  pass.dsinks = strided<float>(g, p.out[kResDSinks]);
  pass.dq_scratch = reinterpret_cast<float*>(base + scratch.dq);
  pass.gauge = reinterpret_cast<float*>(base + scratch.gauge);
  pass.delta = reinterpret_cast<float*>(base + scratch.delta);
  pass.semaphore = reinterpret_cast<int*>(base + scratch.semaphore);
  pass.q_tiles = static_cast<int>(scratch.q_tiles);
  pass.D = static_cast<int>(p.D);
  pass.Dv = static_cast<int>(p.Dv);
  pass.shape = make_shape(p, g);
  pass.positions = make_position_args(p, g);
  pass.scale = static_cast<float>(p.attrs.scale);
  const int pass_blocks = static_cast<int>(scratch.q_tiles * p.Hq * p.B);
  if (pass_blocks > 0) {
    if (cudaError_t e = launch_kernel<backward_prepare<T, kDim, kRows>>(pass_blocks, kPassThreads,
                                                                        0, stream, pass))
      return e;
  }

  if (p.Sk > 0) {
    BackwardParams b;
    Tensor q = p.in[kQ], d_o = p.in[kDO];
    if (p.Sq == 0) q.data = d_o.data = p.in[kK].data;  // never read; a map needs an address
    if (cudaError_t e = make_map(&b.q, g, q, kHalf, {p.D, p.Sq, p.Hq}, kRows)) return e;
    if (cudaError_t e = make_map(&b.d_o, g, d_o, kHalf, {p.Dv, p.Sq, p.Hq}, kRows)) return e;
    if (cudaError_t e = make_map(&b.k, g, p.in[kK], kHalf, {p.D, p.Sk, p.Hkv}, Traits::kKeys))
      return e;
    if (cudaError_t e = make_map(&b.v, g, p.in[kV], kHalf, {p.Dv, p.Sk, p.Hkv}, Traits::kKeys))
      return e;
    if (cudaError_t e = make_map(&b.dk, g, p.out[kResDK], kHalf, {p.D, p.Sk, p.Hkv}, 64)) return e;
    if (cudaError_t e = make_map(&b.dv, g, p.out[kResDV], kHalf, {p.Dv, p.Sk, p.Hkv}, 64)) return e;
    b.dq = pass.dq_scratch;
    b.gauge = pass.gauge;
    b.delta = pass.delta;
    b.q_tiles = pass.q_tiles;
    b.shape = pass.shape;
    b.positions = pass.positions;
    b.logit = make_logit_args(p, g);
    Schedule& s = b.schedule;
    s.tiles = static_cast<int>((p.Sk + Traits::kKeys - 1) / Traits::kKeys);
    s.heads = static_cast<int>(p.B * p.Hkv);
    s.total = s.tiles * s.heads;
    s.section_heads =
        section_heads(p.Sq * p.G * (2 * (p.D + p.Dv) + 4 * p.D), 1, s.heads, kBackwardL2Budget);
    // Deterministic: head by head, so that the CTAs that wait for each other are resident together.
    const bool ordered = p.attrs.deterministic != 0;
    s.longest_first = is_uneven(p) && !ordered ? 2 : 0;
    int sms = 0;
    if (ordered)
      if (cudaError_t e = multiprocessors(&sms)) return e;
    if (ordered && s.tiles > sms) return cudaErrorNotSupported;  // they could wait for ever
    b.semaphore = ordered ? pass.semaphore : nullptr;
    b.rotate = ordered && !is_uneven(p);
    s.counter = nullptr;
    cudaError_t e;
    if (has_extras(p))
      e = ordered ? launch_backward_kernel<BackwardTraits<T, kDim, true, true>>(b, stream)
                  : launch_backward_kernel<BackwardTraits<T, kDim, true, false>>(b, stream);
    else
      e = ordered ? launch_backward_kernel<BackwardTraits<T, kDim, false, true>>(b, stream)
                  : launch_backward_kernel<Traits>(b, stream);
    if (e) return e;
  }

  if (pass_blocks > 0) {
    if (cudaError_t e = launch_kernel<backward_finish<T, kDim, kRows>>(pass_blocks, kPassThreads, 0,
                                                                       stream, pass))
      return e;
  }
  if (p.attrs.grads & kGradSinks) {
    const int elements =
        (pass.dsinks.b0 ? pass.shape.B0 : 1) * (pass.dsinks.b1 ? pass.shape.B1 : 1);
    return launch_kernel<backward_sinks<kRows>>(elements * pass.shape.Hq, kPassThreads, 0, stream,
                                                pass);
  }
  return cudaSuccess;
}

template <class T>
cudaError_t launch_backward(const Problem& p, void* workspace, cudaStream_t stream) {
  return backward_bucket(p) == 64 ? launch_backward_dim<T, 64>(p, workspace, stream)
                                  : launch_backward_dim<T, 128>(p, workspace, stream);
}

}  // namespace jft::hopper
