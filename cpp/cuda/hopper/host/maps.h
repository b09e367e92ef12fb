// Tensor maps, built on the host for every call: they hold addresses, so they are never cached.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../params.h"
#include "../tiles.h"
#include "batch.h"

namespace jft::hopper {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder without linking libcuda: the module still loads on machines without a
// driver.
inline EncodeTiled tensor_map_encoder() {
  static const EncodeTiled encode = [] {
    void* fn = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      fn = nullptr;
    return reinterpret_cast<EncodeTiled>(fn);
  }();
  return encode;
}

struct MapShape {
  int64_t dim, rows, heads;  // D, S, H
};

// (D, S, H, b1, b0) map of a 16-bit tensor, boxes of 64 columns x box_rows rows, 128B swizzle, zero
// fill.
inline cudaError_t make_map(TileMap* out, const BatchGroups& g, const Tensor& t, bool half,
                            MapShape s, int box_rows) {
  const EncodeTiled encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorInsufficientDriver;
  out->has_b0 = group_stride(g, t, 1) != 0;
  out->has_b1 = group_stride(g, t, 0) != 0;
  const int64_t sizes[4] = {s.rows, s.heads, out->has_b1 ? g.size[0] : 1,
                            out->has_b0 ? g.size[1] : 1};
  const int64_t steps[4] = {t.row, t.head, group_stride(g, t, 0), group_stride(g, t, 1)};
  cuuint64_t dims[5] = {static_cast<cuuint64_t>(s.dim)}, strides[4];
  for (int i = 0; i < 4; ++i) {
    dims[i + 1] = static_cast<cuuint64_t>(sizes[i] > 0 ? sizes[i] : 1);
    // The stride of a dimension of one element is never used, but must be a legal one.
    strides[i] =
        sizes[i] > 1 ? static_cast<cuuint64_t>(steps[i] * 2) : ((s.dim * 2 + 15) / 16) * 16;
  }
  const cuuint32_t box[5] = {kPanel, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t unit[5] = {1, 1, 1, 1, 1};
  const CUresult r = encode(
      &out->map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
      t.data, dims, strides, box, unit, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Can TMA read t? Unit feature stride, 16-byte aligned rows, strides below 2^40 bytes.
inline bool mappable(const Problem& p, const Tensor& t) {
  if (t.col != 1 || (reinterpret_cast<uintptr_t>(t.data) & 15) != 0) return false;
  const int64_t limit = int64_t(1) << 39;
  auto legal = [&](int64_t stride) { return stride % 8 == 0 && stride >= 0 && stride < limit; };
  bool ok = legal(t.row) && legal(t.head);
  for (int d = 0; d < p.batch_dims; ++d) ok = ok && (p.batch_size[d] == 1 || legal(t.batch[d]));
  return ok;
}

}  // namespace jft::hopper
