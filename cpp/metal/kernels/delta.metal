// delta_i = rowsum(o_i * do_i) - dL_i, one simdgroup per row; 0 for a row that sees nothing. With
// sinks also what the row adds to dsink: -exp(sink - L_i) delta_i.
#include "common.h"

constant bool kHasDLse [[function_constant(kFlagDLse)]];
constant bool kRowTerms [[function_constant(kFlagRowTerms)]];

kernel void flash_delta(
    device const JFT_T* o [[buffer(kBufO)]], device const JFT_T* d_out [[buffer(kBufDO)]],
    device const float* max_in [[buffer(kBufRowMax)]],
    device const float* log_sum_in [[buffer(kBufRowLogSum)]],
    device const float* dlse [[buffer(kBufDLse), function_constant(kHasDLse)]],
    device const float* sinks [[buffer(kBufSinks), function_constant(kRowTerms)]],
    device float* delta_out [[buffer(kBufDelta)]],
    device float* terms [[buffer(kBufRowTerms), function_constant(kRowTerms)]],
    constant MetalParams& p [[buffer(kBufParams)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  const i64 pair = p.first_group + group.y;
  const i64 head = pair % p.Hq;
  const i64 row = (p.first_tile + group.x) * kSimdgroups + simd;
  if (row >= p.Sq) return;  // the whole simdgroup, and no barrier follows
  const BatchIndex b = batch_index(p, pair / p.Hq, 0);

  const float log_sum = log_sum_in[batch_offset(p, p.in[kBufRowLogSum], b) +
                                   head * p.in[kBufRowLogSum].head + row * p.in[kBufRowLogSum].row];
  o += batch_offset(p, p.in[kBufO], b) + head * p.in[kBufO].head + row * p.in[kBufO].row;
  d_out += batch_offset(p, p.in[kBufDO], b) + head * p.in[kBufDO].head + row * p.in[kBufDO].row;
  float sum = 0.0f;
  for (i64 d = lane; d < p.Dv; d += 32) {
    // o is exactly 0 in a row without keys, whose do may hold anything
    const float x = float(o[d]);
    if (x != 0.0f) sum += x * float(d_out[d]);
  }
  float delta = simd_sum(sum);
  if (kHasDLse) {
    delta -= dlse[batch_offset(p, p.in[kBufDLse], b) + head * p.in[kBufDLse].head +
                  row * p.in[kBufDLse].row];
  }
  if (log_sum >= kMetalEmptyTest) delta = 0.0f;
  if (lane != 0) return;
  const i64 at = batch_offset(p, p.scratch, b) + head * p.scratch.head + row;
  delta_out[at] = delta;
  if (kRowTerms) {
    const float m = max_in[batch_offset(p, p.in[kBufRowMax], b) + head * p.in[kBufRowMax].head +
                           row * p.in[kBufRowMax].row];
    const float sink = sinks[batch_offset(p, p.in[kBufSinks], b) + head * p.in[kBufSinks].head];
    // an empty row has a sink of -inf: no weight, whatever its delta
    const bool none = log_sum >= kMetalEmptyTest || sink == -INFINITY;
    terms[at] = none ? 0.0f : -fast::exp2(((sink - m) - log_sum) * M_LOG2E_F) * delta;
  }
}
