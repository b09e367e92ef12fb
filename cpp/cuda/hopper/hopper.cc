// What these kernels support, and the entry points.
#include "hopper.h"

#include "host/maps.h"
#include "launch.h"

namespace jft {

using namespace hopper;

namespace {

constexpr int64_t kMaxLength = int64_t(1) << 30;

bool any_unmappable(const Problem& p, bool backward) {
  bool bad = !mappable(p, p.in[kQ]) || !mappable(p, p.in[kK]) || !mappable(p, p.in[kV]);
  if (!backward) return bad || !mappable(p, p.out[kResO]);
  bad = bad || !mappable(p, p.in[kO]) || !mappable(p, p.in[kDO]);
  return bad || !mappable(p, p.out[kResDQ]) || !mappable(p, p.out[kResDK]) || !mappable(p, p.out[kResDV]);
}

}  // namespace

const char* hopper_reason(const Problem& p, bool backward) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return "the Hopper kernels take bfloat16 and float16";
  if (p.D % 8 != 0 || p.Dv % 8 != 0) return "the Hopper kernels need head sizes that are multiples of 8";
  if (p.D > 256 || p.Dv > 256) return "the Hopper kernels take head sizes up to 256";
  if (has(p.attrs.present, kBias)) return "the Hopper kernels take no bias";
  if (has(p.attrs.present, kMask)) return "the Hopper kernels take no mask array";
  if (has(p.attrs.present, kQSegmentIds) || has(p.attrs.present, kKvSegmentIds))
    return "the Hopper kernels take no segment ids";
  if (p.dropout_threshold != 0) return "the Hopper kernels take no dropout";
  if (!(p.attrs.scale > 0)) return "the Hopper kernels need a positive scale";
  if (p.Sq >= kMaxLength || p.Sk >= kMaxLength) return "the Hopper kernels take up to 2^30 positions";
  if (p.B * p.Hq * ((p.Sq > p.Sk ? p.Sq : p.Sk) / 64 + 1) >= kMaxLength)
    return "the Hopper kernels take fewer than 2^30 tiles";
  if (any_unmappable(p, backward))
    return "the Hopper kernels need 16-byte aligned rows and a feature stride of 1";
  if (!fold_batch(p, 3).ok)
    return "the Hopper kernels take at most two groups of batch dimensions that broadcast differently";
  if (backward) return "the Hopper backward is not built yet";
  return nullptr;
}

size_t hopper_workspace_bytes(const Problem& p, bool backward) {
  return p.B == 0 || backward ? 0 : 256;  // forward: the tile counter
}

cudaError_t hopper_forward(const Problem& p, void* workspace, cudaStream_t stream) {
  if (p.B == 0 || p.Sq == 0) return cudaSuccess;
  return p.dtype == DType::kF16 ? forward_f16(p, workspace, stream) : forward_bf16(p, workspace, stream);
}

cudaError_t hopper_backward(const Problem& p, void* workspace, cudaStream_t stream) {
  (void)p, (void)workspace, (void)stream;
  return cudaErrorNotSupported;
}

}  // namespace jft
