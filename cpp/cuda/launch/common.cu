// Launchers of the kernels that do not depend on the head size.
#include "../kernels/map.h"
#include "../kernels/rows.h"
#include "../kernels/sums.h"
#include "dispatch.h"
#include "launch.h"

namespace jft::cuda {

template <class T>
Status RowKernels<T>::rows(const Params& params, Stream stream) {
  const int64_t total = params.p.B * params.p.Hq * params.rows_pitch;
  if (total == 0) return kSuccess;
  int lanes = 1;  // lanes per row: one 16-byte chunk each, as far as that goes
  while (lanes < 32 && lanes * 16 < params.p.Dv * T::kBytes) lanes *= 2;
  const int64_t per_block = kRowThreads / lanes;
  Status status;
  JFT_LAUNCH(status, rows_kernel<T>, (total + per_block - 1) / per_block, kRowThreads, 0, stream,
             params, lanes);
  return status;
}
template struct RowKernels<F16>;
template struct RowKernels<BF16>;
template struct RowKernels<TF32>;

Status launch_map(const Params& params, Stream stream) {
  const int64_t cells = params.map.batches * params.map.heads *
                        static_cast<int64_t>(params.map.query_cells) * params.map.key_cells;
  if (cells == 0) return kSuccess;
  constexpr int kWarps = kMapThreads / 32;
  Status status;
  JFT_LAUNCH(status, map_kernel, (cells + kWarps - 1) / kWarps, kMapThreads, 0, stream, params);
  return status;
}

Status launch_head_sum(const Params& params, bool alibi, int64_t blocks, Stream stream) {
  if (blocks == 0) return kSuccess;
  Status status;
  JFT_LAUNCH(status, head_sum_kernel, blocks, kSumThreads, kSumThreads / 32 * 4, stream, params,
             alibi);
  return status;
}

Status launch_bias_sum(const Params& params, Stream stream) {
  if (params.bias_elements == 0) return kSuccess;
  Status status;
  JFT_LAUNCH(status, bias_sum_kernel, (params.bias_elements + kSumThreads - 1) / kSumThreads,
             kSumThreads, 0, stream, params);
  return status;
}

}  // namespace jft::cuda
