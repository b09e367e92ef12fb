// What the launchers of the backward kernels share: parameters and the passes around them.
#pragma once

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

inline PassParams make_pass_params(const Problem& p, const BatchGroups& g, void* workspace) {
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
  pass.general = is_general(p);
  pass.scale = static_cast<float>(p.attrs.scale);
  return pass;
}

// Maps and scalars of a kernel that owns tiles of `keys` keys and walks tiles of `rows` queries.
inline cudaError_t make_backward_params(BackwardParams* b, const Problem& p, const BatchGroups& g,
                                        const PassParams& pass, int rows, int keys) {
  const bool half = p.dtype == DType::kF16;
  Tensor q = p.in[kQ], d_o = p.in[kDO];
  if (p.Sq == 0) q.data = d_o.data = p.in[kK].data;  // never read; a map needs an address
  if (cudaError_t e = make_map(&b->q, g, q, half, {p.D, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&b->d_o, g, d_o, half, {p.Dv, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&b->k, g, p.in[kK], half, {p.D, p.Sk, p.Hkv}, keys)) return e;
  if (cudaError_t e = make_map(&b->v, g, p.in[kV], half, {p.Dv, p.Sk, p.Hkv}, keys)) return e;
  if (cudaError_t e = make_map(&b->dk, g, p.out[kResDK], half, {p.D, p.Sk, p.Hkv}, 64)) return e;
  if (cudaError_t e = make_map(&b->dv, g, p.out[kResDV], half, {p.Dv, p.Sk, p.Hkv}, 64)) return e;
  b->dq = pass.dq_scratch;
  b->gauge = pass.gauge;
  b->delta = pass.delta;
  b->semaphore = nullptr;
  b->q_tiles = pass.q_tiles;
  b->rotate = 0;
  b->shape = pass.shape;
  b->positions = pass.positions;
  b->logit = make_logit_args(p, g);
  Schedule& s = b->schedule;
  s.tiles = static_cast<int>((p.Sk + keys - 1) / keys);
  s.heads = static_cast<int>(p.B * p.Hkv);
  s.total = s.tiles * s.heads;
  s.section_heads =
      section_heads(p.Sq * p.G * (2 * (p.D + p.Dv) + 4 * p.D), 1, s.heads, kBackwardL2Budget);
  s.longest_first = is_uneven(p) ? 2 : 0;
  s.counter = nullptr;
  return cudaSuccess;
}

template <int kRows>
cudaError_t launch_sinks(const Problem& p, const PassParams& pass, cudaStream_t stream) {
  if (!(p.attrs.grads & kGradSinks)) return cudaSuccess;
  const int elements = (pass.dsinks.b0 ? pass.shape.B0 : 1) * (pass.dsinks.b1 ? pass.shape.B1 : 1);
  return launch_kernel<backward_sinks<kRows>>(elements * pass.shape.Hq, kPassThreads, 0, stream,
                                              pass);
}

}  // namespace jft::hopper
