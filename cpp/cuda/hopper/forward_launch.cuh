// Host side of the forward pass for one 16-bit type. Included by forward_bf16.cu and
// forward_f16.cu.
#pragma once

#include "forward.cuh"
#include "host/args.h"
#include "host/device.h"
#include "host/maps.h"
#include "host/workspace.h"

namespace jft::hopper {

constexpr int64_t kForwardL2Budget = 32 << 20;  // K and V of the heads that run side by side

template <class Traits>
cudaError_t launch_forward_kernel(const ForwardParams& params, int blocks, cudaStream_t stream) {
  return launch_kernel<forward_kernel<Traits>>(blocks, Traits::kThreads, Traits::kSharedBytes,
                                               stream, params);
}

template <class T, class Tile>
cudaError_t launch_forward_tile(const Problem& p, void* workspace, cudaStream_t stream) {
  using Traits = ForwardTraits<T, Tile, Road::kPlain>;
  constexpr bool kHalf = std::is_same<T, __half>::value;
  const BatchGroups g = fold_batch(p, false);
  ForwardParams f;
  Tensor k = p.in[kK], v = p.in[kV];
  if (p.Sk == 0) k.data = v.data = p.in[kQ].data;  // never read; a map needs an address
  if (cudaError_t e = make_map(&f.q, g, p.in[kQ], kHalf, {p.D, p.Sq, p.Hq}, Traits::kRows))
    return e;
  if (cudaError_t e = make_map(&f.k, g, k, kHalf, {p.D, p.Sk, p.Hkv}, Traits::kKeys)) return e;
  if (cudaError_t e = make_map(&f.v, g, v, kHalf, {p.Dv, p.Sk, p.Hkv}, Traits::kKeys)) return e;
  if (cudaError_t e = make_map(&f.o, g, p.out[kResO], kHalf, {p.Dv, p.Sq, p.Hq}, 64)) return e;
  f.row_max = strided<float>(g, p.out[kResRowMax]);
  f.row_log_sum = strided<float>(g, p.out[kResRowLogSum]);
  f.shape = make_shape(p, g);
  f.positions = make_position_args(p, g);
  f.logit = make_logit_args(p, g);
  uint8_t* scratch = align_scratch(workspace);
  if (cudaError_t e = launch_hidden(&f.hidden, p, g, ForwardScratch(p).hidden, scratch,
                                    forward_side(Tile{}), 0, stream))
    return e;

  int sms;
  if (cudaError_t e = multiprocessors(&sms)) return e;
  Schedule& s = f.schedule;
  s.tiles = static_cast<int>((p.Sq + Traits::kRows - 1) / Traits::kRows);
  s.heads = static_cast<int>(p.B * p.Hq);
  s.total = s.tiles * s.heads;
  s.section_heads = section_heads(2 * p.Sk * (p.D + p.Dv), p.G, s.heads, kForwardL2Budget);
  s.longest_first = is_uneven(p) ? 1 : 0;
  s.counter = nullptr;
  const int blocks = s.total < sms ? s.total : sms;
  if (s.longest_first && s.total > sms) {
    s.counter = reinterpret_cast<int*>(scratch);
    if (cudaError_t e = cudaMemsetAsync(s.counter, 0, sizeof(int), stream)) return e;
  }
  if (is_general(p) && !p.has(kBias))
    return launch_forward_kernel<ForwardTraits<T, Tile, Road::kGeneral>>(f, blocks, stream);
  if constexpr (!std::is_same<Tile, ForwardTile64>::value)  // with_forward_tile
    if (p.has(kBias))
      return launch_forward_kernel<ForwardTraits<T, Tile, Road::kBias>>(f, blocks, stream);
  return launch_forward_kernel<Traits>(f, blocks, stream);
}

template <class T>
cudaError_t launch_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  return with_forward_tile(
      p, [&](auto tile) { return launch_forward_tile<T, decltype(tile)>(p, workspace, stream); });
}

}  // namespace jft::hopper
