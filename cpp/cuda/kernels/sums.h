// Fixed-order sums that finish the small gradients: dsinks, dalibi_slopes, dbias.
#pragma once

#include "bias_gradient.h"

namespace jft::cuda {

constexpr int kSumThreads = 128;

// Sum over the block; every thread gets it. The order does not depend on timing.
JFT_DEV float block_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  sync_block();
  if ((thread_index() & 31) == 0) shared<float>((thread_index() >> 5) * 4) = x;
  sync_block();
  float sum = 0.0f;
  for (int w = 0; w < kSumThreads / 32; ++w) sum += shared<float>(w * 4);
  return sum;
}

// One block per (batch element of the result, head). `alibi`: dalibi_slopes, else dsinks.
JFT_DEV void head_sum_block(const Params& params, bool alibi) {
  const Problem& p = params.p;
  const Tensor& result = p.out[alibi ? kResDAlibi : kResDSinks];
  const i64 kept = block_index() / p.Hq, h = block_index() % p.Hq;
  float total = 0.0f;
  i64 b = kept;
  for (i64 summed = 0; summed < params.batches_summed; ++summed) {
    if (params.batches_summed > 1) b = batch_of_result(p, result, kept, summed);
    if (alibi) {
      for (int n = thread_index(); n < params.q_tiles; n += kSumThreads) {
        total += params.alibi_parts[(b * p.Hq + h) * params.q_tiles + n];
      }
    } else {
      const RowFacts* rows = params.rows + (b * p.Hq + h) * params.rows_pitch;
      for (i64 i = thread_index(); i < p.Sq; i += kSumThreads) total += rows[i].dsink;
    }
  }
  total = block_sum(total);
  if (thread_index() == 0) *head_pointer<float>(p, result, b, h) = total;
}

// dbias from its partial sums.
JFT_DEV void bias_sum_block(const Params& params) {
  const i64 at = block_index() * kSumThreads + thread_index();
  if (at >= params.bias_elements) return;
  float sum = 0.0f;
  for (int split = 0; split < params.splits; ++split) {
    sum += params.bias_parts[split * params.bias_elements + at];
  }
  const Tensor& result = params.p.out[kResDBias];
  store_float(result.data, result.dtype, at, sum);
}

JFT_KERNEL(kSumThreads, 1) head_sum_kernel(JFT_PARAMS params, bool alibi) {
  head_sum_block(params, alibi);
}
JFT_KERNEL(kSumThreads, 1) bias_sum_kernel(JFT_PARAMS params) { bias_sum_block(params); }

}  // namespace jft::cuda
