// dq_i = scale sum_j ds_ij k_j: one threadgroup per kRows query rows of a query head; a simdgroup
// owns 8 rows (split: with a neighbour, half of the features each). Where dq has size 1 in a batch
// dimension, the threadgroup sums over that dimension.
#include "backward.h"

constant bool kRowTerms [[function_constant(kFlagRowTerms)]];

kernel void flash_dq(JFT_BACKWARD_ARGUMENTS, device JFT_T* dq [[buffer(kBufDQ)]],
                     device float* terms [[buffer(kBufRowTerms), function_constant(kRowTerms)]],
                     constant MetalParams& p [[buffer(kBufParams)]], JFT_THREAD_ARGUMENTS) {
  const Options options = JFT_OPTIONS;
  const i64 pair = p.first_group + group.y;
  const i64 head = pair % p.Hq;
  const At at = fragment_position(lane);
  const i64 tile0 = (p.first_tile + group.x) * kRows, tile1 = min(tile0 + kRows, p.Sq);
  const i64 row0 = tile0 + simd / kSplit * 8, row = row0 + at.x;
  const int half_q = int(simd % kSplit) * kDF * 8, half_v = int(simd % kSplit) * kDVF * 8;
  threadgroup JFT_T* k_tile = shared;
  threadgroup JFT_T* v_tile = shared + kStaged * kLdK;
  threadgroup float* scratch = reinterpret_cast<threadgroup float*>(v_tile + kStaged * kLdV);

  Fragment acc[kDF];
  clear(acc);
  for (i64 r = 0; r < p.reduced_batches; ++r) {
    const BatchIndex b = batch_index(p, pair / p.Hq, r);
    const Scene scene = make_scene(p, options, b, head);
    device const JFT_T* k_head =
        k + batch_offset(p, p.in[kBufK], b) + head / p.G * p.in[kBufK].head;
    device const JFT_T* v_head =
        v + batch_offset(p, p.in[kBufV], b) + head / p.G * p.in[kBufV].head;
    Fragment q_rows[kDF], do_rows[kDVF];
    load_rows(q_rows, q + batch_offset(p, p.in[kBufQ], b) + head * p.in[kBufQ].head,
              p.in[kBufQ].row, row0, p.Sq, half_q, p.D, at);
    load_rows(do_rows, d_out + batch_offset(p, p.in[kBufDO], b) + head * p.in[kBufDO].head,
              p.in[kBufDO].row, row0, p.Sq, half_v, p.Dv, at);
    const RowStats stats = load_stats(p, max_in, log_sum_in, delta_in, b, head, row);
    float distance_sum = 0.0f;  // sum_j ds_ij |i + offset - j|

    const Range keys = visible_keys_any(scene.pos, tile0, tile1);
    IdRange ids = {0, 0};
    if (kHasSegments) ids = segment_range(scene.q_segments, tile0, tile1, lane);
    for (i64 j0 = keys.begin / kStaged * kStaged; j0 < keys.end; j0 += kStaged) {
      const i64 j1 = min(j0 + kStaged, p.Sk);
      if (kHasSegments && segments_apart(ids, segment_range(scene.kv_segments, j0, j1, lane)))
        continue;
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has read its tiles
      stage(k_tile, kLdK, kStaged, kDP, k_head, p.in[kBufK].row, j0, p.Sk, p.D, tid);
      stage(v_tile, kLdV, kStaged, kDVP, v_head, p.in[kBufV].row, j0, p.Sk, p.Dv, tid);
      threadgroup_barrier(mem_flags::mem_threadgroup);

      Fragment s[kN], dp[kN];
      clear(s);
      clear(dp);
      multiply_transposed<kDF>(s, q_rows, 0, k_tile + half_q, kLdK, at);     // S = Q K^T
      multiply_transposed<kDVF>(dp, do_rows, 0, v_tile + half_v, kLdV, at);  // dP = dO V^T
      if (kSplit == 2) exchange_halves(s, dp, scratch, simd, lane);

      const bool edge = !all_visible(scene, tile0, tile0 + kRows, j0, j0 + kStaged);
      uint seen = ~0u;
      for (int n = 0; n < kN; ++n) {
        for (int e = 0; e < 2; ++e) {
          const i64 j = j0 + n * 8 + at.y + e;
          float ds = 0.0f;
          if (edge && !visible(scene, row, j)) {
            seen &= ~(1u << (2 * n + e));
          } else if (!is_empty(stats)) {
            const Weights w = weights(p, scene, get(s[n], e), get(dp[n], e), stats, row, j);
            ds = w.ds * w.slope;
            if (kRowTerms) distance_sum += w.ds * fabs(float(row + scene.pos.offset - j));
          }
          put(s[n], e, ds);
        }
      }
      multiply(acc, s, k_tile + half_q, kLdK, edge ? any_in_column(seen, at) : ~0u,
               at);  // dQ += dS K
    }
    if (kRowTerms) {
      const float sum = row_sum(distance_sum);
      if (at.y == 0 && simd % kSplit == 0 && row < p.Sq) {
        terms[batch_offset(p, p.scratch, b) + head * p.scratch.head + row] = -sum;
      }
    }
  }
  // `kept` chose the batch element, so a reduced dimension has stride 0 in dq
  dq += batch_offset(p, p.out[0], batch_index(p, pair / p.Hq, 0)) + head * p.out[0].head;
  store_rows(acc, p.scale, dq, p.out[0].row, row0, p.Sq, half_q, p.D, at);
}
