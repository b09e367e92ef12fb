// Host side of the backward pass beyond head size 128, for one 16-bit type. Included by
// backward_wide_bf16.cu and backward_wide_f16.cu.
#pragma once

#include "backward_common.cuh"
#include "backward_wide.cuh"

namespace jft::hopper {

constexpr int64_t kQueryGradientL2Budget = 32 << 20;  // K and V of heads that run side by side

template <class T, int kDim, Road kRoad>
cudaError_t launch_wide_kernels(const BackwardParams& b, const QueryGradientParams& q,
                                cudaStream_t stream) {
  using Keys = KeyGradientTraits<T, kDim, kRoad>;
  using Queries = QueryGradientTraits<T, kDim, kRoad>;
  if (b.schedule.total > 0) {
    if (cudaError_t e = launch_kernel<key_gradient_kernel<Keys>>(b.schedule.total, Keys::kThreads,
                                                                 Keys::kSharedBytes, stream, b))
      return e;
  }
  if (q.schedule.total == 0) return cudaSuccess;
  return launch_kernel<query_gradient_kernel<Queries>>(q.schedule.total, Queries::kThreads,
                                                       Queries::kSharedBytes, stream, q);
}

template <class T, int kDim>
cudaError_t launch_wide_dim(const Problem& p, void* workspace, cudaStream_t stream) {
  using Keys = KeyGradientTraits<T, kDim, Road::kPlain>;
  using Queries = QueryGradientTraits<T, kDim, Road::kPlain>;
  const bool half = p.dtype == DType::kF16;
  const BatchGroups g = fold_batch(p, true);
  const PassParams pass = make_pass_params(p, g, workspace);
  const int pass_blocks = static_cast<int>(pass.q_tiles * p.Hq * p.B);
  if (pass_blocks > 0) {
    if (cudaError_t e = launch_kernel<backward_prepare<T, 256, Keys::kRows, false>>(
            pass_blocks, kPassThreads, 0, stream, pass))
      return e;
  }
  BackwardParams b;
  if (cudaError_t e = make_backward_params(&b, p, g, pass, Keys::kRows, Keys::kKeys)) return e;
  const BackwardScratch scratch(p);
  uint8_t* base = align_scratch(workspace);
  if (cudaError_t e = launch_hidden(&b.hidden, p, g, scratch.hidden, base, kWideKeySide, 0, stream))
    return e;
  QueryGradientParams q;
  if (cudaError_t e =
          launch_hidden(&q.hidden, p, g, scratch.hidden, base, kWideQuerySide, 1, stream))
    return e;
  const int rows = Queries::kRows;
  if (cudaError_t e = make_map(&q.q, g, p.in[kQ], half, {p.D, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&q.d_o, g, p.in[kDO], half, {p.Dv, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&q.dq, g, p.out[kResDQ], half, {p.D, p.Sq, p.Hq}, 64)) return e;
  q.k = b.k;  // both kernels load 64 keys at a time
  q.v = b.v;
  static_assert(Queries::kKeys == Keys::kKeys, "the maps of k and v are shared");
  q.gauge = pass.gauge;
  q.delta = pass.delta;
  q.rows_pitch = pass.q_tiles * Keys::kRows;
  q.shape = b.shape;
  q.positions = b.positions;
  q.logit = b.logit;
  Schedule& s = q.schedule;
  s.tiles = static_cast<int>((p.Sq + rows - 1) / rows);
  s.heads = static_cast<int>(p.B * p.Hq);
  s.total = s.tiles * s.heads;
  s.section_heads = section_heads(2 * p.Sk * (p.D + p.Dv), p.G, s.heads, kQueryGradientL2Budget);
  s.longest_first = is_uneven(p) ? 1 : 0;
  s.counter = nullptr;
  const cudaError_t e = p.has(kBias)    ? launch_wide_kernels<T, kDim, Road::kBias>(b, q, stream)
                        : is_general(p) ? launch_wide_kernels<T, kDim, Road::kGeneral>(b, q, stream)
                                        : launch_wide_kernels<T, kDim, Road::kPlain>(b, q, stream);
  if (e) return e;
  return launch_sinks<Keys::kRows>(p, pass, stream);
}

// Sq and Sk are positive (hopper_takes).
template <class T>
cudaError_t launch_backward_wide(const Problem& p, void* workspace, cudaStream_t stream) {
  return p.D <= 192 && p.Dv <= 192 ? launch_wide_dim<T, 192>(p, workspace, stream)
                                   : launch_wide_dim<T, 256>(p, workspace, stream);
}

}  // namespace jft::hopper
