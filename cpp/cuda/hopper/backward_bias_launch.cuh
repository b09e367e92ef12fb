// Host side of dbias, for one 16-bit type. Included by backward_bias_bf16.cu and
// backward_bias_f16.cu.
#pragma once

#include "backward_bias.cuh"
#include "backward_common.cuh"

namespace jft::hopper {

template <class T, int kDim>
cudaError_t launch_bias_gradient_dim(const Problem& p, void* workspace, cudaStream_t stream) {
  using Traits = BiasGradientTraits<T, kDim>;
  const bool half = p.dtype == DType::kF16;
  const BatchGroups g = fold_batch(p, true);
  const PassParams pass = make_pass_params(p, g, workspace);
  BiasGradientParams b;
  const int rows = Traits::kRows, keys = Traits::kKeys;
  if (cudaError_t e = make_map(&b.q, g, p.in[kQ], half, {p.D, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&b.d_o, g, p.in[kDO], half, {p.Dv, p.Sq, p.Hq}, rows)) return e;
  if (cudaError_t e = make_map(&b.k, g, p.in[kK], half, {p.D, p.Sk, p.Hkv}, keys)) return e;
  if (cudaError_t e = make_map(&b.v, g, p.in[kV], half, {p.Dv, p.Sk, p.Hkv}, keys)) return e;
  b.gauge = pass.gauge;
  b.delta = pass.delta;
  const BackwardScratch scratch(p);
  b.rows_pitch = static_cast<int>(scratch.q_tiles * scratch.rows);
  b.shape = pass.shape;
  b.positions = pass.positions;
  b.logit = make_logit_args(p, g);
  // The kernels before left the passes' results where they are.
  if (cudaError_t e = launch_hidden(&b.hidden, p, g, scratch.hidden, align_scratch(workspace),
                                    bias_side(kDim), 1, stream))
    return e;
  b.out = make_bias_args(p, p.out[kResDBias], g);
  b.q_tiles = static_cast<int>((p.Sq + rows - 1) / rows);
  b.k_tiles = static_cast<int>((p.Sk + keys - 1) / keys);
  const int64_t blocks = int64_t(b.q_tiles) * b.k_tiles * (b.out.head ? p.Hq : 1) *
                         (b.out.b0 ? b.shape.B0 : 1) * (b.out.b1 ? b.shape.B1 : 1);
  if (blocks >= int64_t(1) << 31) return cudaErrorInvalidValue;
  return launch_kernel<bias_gradient_kernel<Traits>>(static_cast<int>(blocks), Traits::kThreads,
                                                     Traits::kSharedBytes, stream, b);
}

template <class T>
cudaError_t launch_bias_gradient(const Problem& p, void* workspace, cudaStream_t stream) {
  const int64_t dim = p.D > p.Dv ? p.D : p.Dv;
  if (dim <= 64) return launch_bias_gradient_dim<T, 64>(p, workspace, stream);
  if (dim <= 128) return launch_bias_gradient_dim<T, 128>(p, workspace, stream);
  if (dim <= 192) return launch_bias_gradient_dim<T, 192>(p, workspace, stream);
  return launch_bias_gradient_dim<T, 256>(p, workspace, stream);
}

}  // namespace jft::hopper
