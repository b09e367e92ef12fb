// dsinks and dalibi_slopes: the terms of all rows of a head, and of the batch elements in which the
// result has size 1, summed in a fixed order. One threadgroup per element of the result.
#include "common.h"

kernel void flash_sum_rows(
    device const float* terms [[buffer(kBufRowTerms)]], device float* sum_out [[buffer(kBufSum)]],
    constant MetalParams& p [[buffer(kBufParams)]], threadgroup float* partial [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  const i64 pair = p.first_group + group.y;
  const i64 head = pair % p.Hq;
  float sum = 0.0f;
  for (i64 r = 0; r < p.reduced_batches; ++r) {
    const BatchIndex b = batch_index(p, pair / p.Hq, r);
    const i64 at = batch_offset(p, p.scratch, b) + head * p.scratch.head;
    for (i64 i = tid; i < p.Sq; i += kThreads) sum += terms[at + i];
  }
  sum = simd_sum(sum);
  if (lane == 0) partial[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (tid != 0) return;
  float total = 0.0f;
  for (int s = 0; s < kSimdgroups; ++s) total += partial[s];
  sum_out[batch_offset(p, p.sum, batch_index(p, pair / p.Hq, 0)) + head * p.sum.head] = total;
}
