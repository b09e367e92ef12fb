// What these kernels support, and the entry points.
#include "hopper.h"

#include <initializer_list>

#include "host/maps.h"
#include "host/workspace.h"
#include "launch.h"

namespace jft {

using namespace hopper;

namespace {

constexpr int64_t kMaxLength = int64_t(1) << 29;

bool any_unmappable(const Problem& p, bool backward) {
  bool bad = !mappable(p, p.in[kQ]) || !mappable(p, p.in[kK]) || !mappable(p, p.in[kV]);
  if (!backward) return bad || !mappable(p, p.out[kResO]);
  bad = bad || !mappable(p, p.in[kO]) || !mappable(p, p.in[kDO]);
  return bad || !mappable(p, p.out[kResDQ]) || !mappable(p, p.out[kResDK]) ||
         !mappable(p, p.out[kResDV]);
}

// A gradient that is summed over a batch dimension that the problem has in full.
bool sums_over_batch(const Problem& p) {
  for (int r : {kResDQ, kResDK, kResDV})
    for (int d = 0; d < p.batch_dims; ++d)
      if (p.batch_size[d] > 1 && p.out[r].batch[d] == 0) return true;
  return false;
}

const char* backward_reason(const Problem& p) {
  if (p.attrs.grads & kGradAlibi) return "the Hopper backward makes no gradient of alibi_slopes";
  if ((p.attrs.grads & kGradBias) && (p.out[kResDBias].row == 0 || p.out[kResDBias].col == 0))
    return "the Hopper backward makes no gradient of a bias that broadcasts over queries or keys";
  if (p.attrs.softcap > 0 && p.has(kBias))
    return "the Hopper backward takes softcap or a bias, not both";
  // Waiting CTAs of one head must all be resident: 132 multiprocessors (an H100 PCIe has 114), 128
  // keys each.
  if (p.attrs.deterministic && p.Sk > 114 * 128 && backward_bucket(p) <= 128)
    return "the deterministic Hopper backward takes up to 14592 keys";
  if (sums_over_batch(p)) return "the Hopper backward does not sum gradients over batch dimensions";
  return nullptr;
}

}  // namespace

const char* hopper_reason(const Problem& p, bool backward) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16)
    return "the Hopper kernels take bfloat16 and float16";
  if (p.D % 8 != 0 || p.Dv % 8 != 0)
    return "the Hopper kernels need head sizes that are multiples of 8";
  if (p.D > 256 || p.Dv > 256) return "the Hopper kernels take head sizes up to 256";
  if (p.has(kBias) && p.in[kBias].dtype == DType::kF64)
    return "the Hopper kernels take no float64 bias";
  if (p.dropout_threshold != 0) return "the Hopper kernels take no dropout";
  if (!(p.attrs.scale > 0)) return "the Hopper kernels need a positive scale";
  if (p.Sq >= kMaxLength || p.Sk >= kMaxLength)
    return "the Hopper kernels take fewer than 2^29 positions";
  if (p.B * p.Hq * ((p.Sq > p.Sk ? p.Sq : p.Sk) / 64 + 1) >= kMaxLength)
    return "the Hopper kernels take fewer than 2^29 tiles";
  if (any_unmappable(p, backward))
    return "the Hopper kernels need 16-byte aligned rows and a feature stride of 1";
  if (!fold_batch(p, backward).ok)
    return "the Hopper kernels take at most two groups of batch dimensions that broadcast "
           "differently";
  if (backward) return backward_reason(p);
  return nullptr;
}

size_t hopper_workspace_bytes(const Problem& p, bool backward) {
  if (p.B == 0) return 0;
  return static_cast<size_t>(backward ? BackwardScratch(p).hidden.end
                                      : ForwardScratch(p).hidden.end) +
         128;
}

cudaError_t hopper_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.Sq == 0) return cudaSuccess;
  return p.dtype == DType::kF16 ? forward_f16(p, workspace, stream)
                                : forward_bf16(p, workspace, stream);
}

cudaError_t hopper_backward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0) return cudaSuccess;
  const bool half = p.dtype == DType::kF16, wide = backward_bucket(p) > 128;
  const auto run = half ? (wide ? backward_wide_f16 : backward_f16)
                        : (wide ? backward_wide_bf16 : backward_bf16);
  if (cudaError_t e = run(p, workspace, stream)) return e;
  if (!(p.attrs.grads & kGradBias)) return cudaSuccess;
  return (half ? backward_bias_f16 : backward_bias_bf16)(p, workspace, stream);
}

}  // namespace jft
