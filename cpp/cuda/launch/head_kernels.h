// Launchers of one element type and head bucket; instantiated by the generated sources
// (CMakeLists.txt).
#pragma once

#include <type_traits>

#include "../kernels/backward_dkdv.h"
#include "../kernels/backward_dq.h"
#include "../kernels/bias_gradient.h"
#include "../kernels/forward.h"
#include "dispatch.h"
#include "launch.h"

namespace jft::cuda {

// Calls `launch` with the road for logits (Params::general) as a constant.
template <class T, class Launch>
Status on_road(const Params& params, Launch launch) {
  if constexpr (!T::kGeneralOnly) {
    if (!params.general) return launch(std::false_type{});
  }
  return launch(std::true_type{});
}

template <class T, int kHead, bool kGeneral>
Status launch_forward(const Params& params, int64_t blocks, Stream stream) {
  constexpr int kBytes = forward_shared(T::kBytes, kHead, kGeneral);
  constexpr int kThreads = ForwardTraits<T, kHead, kGeneral>::kThreads;
  constexpr auto kernel = forward_kernel<T, kHead, kGeneral>;
  Status status;
  JFT_LAUNCH(status, kernel, blocks, kThreads, kBytes, stream, params);
  return status;
}

template <class T, int kHead>
Status HeadKernels<T, kHead>::forward(const Params& params, int64_t blocks, Stream stream) {
  if (blocks == 0) return kSuccess;
  return on_road<T>(params, [&](auto general) {
    return launch_forward<T, kHead, decltype(general)::value>(params, blocks, stream);
  });
}

template <class T, int kHead, bool kGeneral>
Status launch_dq(const Params& params, int64_t blocks, Stream stream) {
  constexpr int kBytes = dq_shared(T::kBytes, kHead, kGeneral);
  constexpr int kThreads = DqTraits<T, kHead, kGeneral>::kThreads;
  constexpr auto kernel = dq_kernel<T, kHead, kGeneral>;
  Status status;
  JFT_LAUNCH(status, kernel, blocks, kThreads, kBytes, stream, params);
  return status;
}

template <class T, int kHead>
Status HeadKernels<T, kHead>::dq(const Params& params, int64_t blocks, Stream stream) {
  if (blocks == 0) return kSuccess;
  return on_road<T>(params, [&](auto general) {
    return launch_dq<T, kHead, decltype(general)::value>(params, blocks, stream);
  });
}

template <class T, int kHead, bool kGeneral, bool kDk, bool kDv>
Status launch_dkdv(const Params& params, int64_t blocks, Stream stream) {
  constexpr int kBytes = dkdv_shared(T::kBytes, kHead, kGeneral);
  constexpr int kThreads = DkDvTraits<T, kHead, kGeneral>::kThreads;
  constexpr auto kernel = dkdv_kernel<T, kHead, kGeneral, kDk, kDv>;
  Status status;
  JFT_LAUNCH(status, kernel, blocks, kThreads, kBytes, stream, params);
  return status;
}

template <class T, int kHead, bool kGeneral>
Status launch_dkdv(const Params& params, int64_t blocks, Stream stream) {
  if constexpr (split_dkdv(kHead)) {
    Status status = kSuccess;
    if (params.write_dk) {
      status = launch_dkdv<T, kHead, kGeneral, true, false>(params, blocks, stream);
    }
    if (status == kSuccess && params.write_dv) {
      status = launch_dkdv<T, kHead, kGeneral, false, true>(params, blocks, stream);
    }
    return status;
  } else {
    return launch_dkdv<T, kHead, kGeneral, true, true>(params, blocks, stream);
  }
}

template <class T, int kHead>
Status HeadKernels<T, kHead>::dkdv(const Params& params, int64_t blocks, Stream stream) {
  if (blocks == 0) return kSuccess;
  return on_road<T>(params, [&](auto general) {
    return launch_dkdv<T, kHead, decltype(general)::value>(params, blocks, stream);
  });
}

template <class T, int kHead>
Status HeadKernels<T, kHead>::bias_gradient(const Params& params, int64_t blocks, Stream stream) {
  if (blocks == 0) return kSuccess;
  constexpr int kBytes = dq_shared(T::kBytes, kHead, true);
  constexpr int kThreads = DqTraits<T, kHead, true>::kThreads;
  constexpr auto kernel = bias_gradient_kernel<T, kHead>;
  Status status;
  JFT_LAUNCH(status, kernel, blocks, kThreads, kBytes, stream, params);
  return status;
}

}  // namespace jft::cuda
