// Host side of the backward pass up to head size 128, for one 16-bit type. Included by
// backward_bf16.cu and backward_f16.cu.
#pragma once

#include "backward.cuh"
#include "backward_common.cuh"

namespace jft::hopper {

template <class Traits>
cudaError_t launch_backward_kernel(const BackwardParams& b, cudaStream_t stream) {
  return launch_kernel<backward_kernel<Traits>>(b.schedule.total, Traits::kThreads,
                                                Traits::kSharedBytes, stream, b);
}

template <class T, int kDim>
cudaError_t launch_backward_dim(const Problem& p, void* workspace, cudaStream_t stream) {
  using Traits = BackwardTraits<T, kDim, Road::kPlain, false>;
  constexpr int kRows = Traits::kRows;
  const BatchGroups g = fold_batch(p, true);
  const PassParams pass = make_pass_params(p, g, workspace);
  const int pass_blocks = static_cast<int>(pass.q_tiles * p.Hq * p.B);
  if (pass_blocks > 0) {
    if (cudaError_t e = launch_kernel<backward_prepare<T, kDim, kRows, true>>(
            pass_blocks, kPassThreads, 0, stream, pass))
      return e;
  }
  if (p.Sk > 0) {
    BackwardParams b;
    if (cudaError_t e = make_backward_params(&b, p, g, pass, kRows, Traits::kKeys)) return e;
    if (cudaError_t e =
            launch_hidden(&b.hidden, p, g, BackwardScratch(p).hidden, align_scratch(workspace),
                          kDim == 64 ? kKeySide64 : kKeySide128, 0, stream))
      return e;
    const bool ordered = p.attrs.deterministic != 0;
    if (ordered) {
      // Head by head, so that the CTAs that wait for each other are resident together.
      b.schedule.longest_first = 0;
      int sms = 0;
      if (cudaError_t e = multiprocessors(&sms)) return e;
      if (b.schedule.tiles > sms) return cudaErrorNotSupported;  // they could wait for ever
      b.semaphore = pass.semaphore;
      b.hidden.map = {};  // the order of the additions counts every tile
      b.rotate = !is_uneven(p);
    }
    const auto launch = [&](auto ordered_) {
      constexpr bool kOrdered = decltype(ordered_)::value;
      if (p.has(kBias))
        return launch_backward_kernel<BackwardTraits<T, kDim, Road::kBias, kOrdered>>(b, stream);
      if (is_general(p))
        return launch_backward_kernel<BackwardTraits<T, kDim, Road::kGeneral, kOrdered>>(b, stream);
      return launch_backward_kernel<BackwardTraits<T, kDim, Road::kPlain, kOrdered>>(b, stream);
    };
    const cudaError_t e = ordered ? launch(std::true_type{}) : launch(std::false_type{});
    if (e) return e;
  }
  if (pass_blocks > 0) {
    if (cudaError_t e = launch_kernel<backward_finish<T, kDim, kRows>>(pass_blocks, kPassThreads, 0,
                                                                       stream, pass))
      return e;
  }
  return launch_sinks<kRows>(p, pass, stream);
}

template <class T>
cudaError_t launch_backward(const Problem& p, void* workspace, cudaStream_t stream) {
  return backward_bucket(p) == 64 ? launch_backward_dim<T, 64>(p, workspace, stream)
                                  : launch_backward_dim<T, 128>(p, workspace, stream);
}

}  // namespace jft::hopper
