// dk_j = scale sum_i ds_ij q_i and dv_j = sum_i p_ij Z_ij do_i, summed over the G query heads of
// the kv head and over the batch dimensions in which the results have size 1. One threadgroup per
// kRows keys of a kv head; a simdgroup owns 8 keys (split: with a neighbour, half of the features
// each). The products are transposed (keys are rows): S^T = K Q^T, dP^T = V dO^T.
#include "backward.h"

constant bool kWantDK [[function_constant(kFlagDK)]];
constant bool kWantDV [[function_constant(kFlagDV)]];

kernel void flash_dkdv(JFT_BACKWARD_ARGUMENTS,
                       device JFT_T* dk [[buffer(kBufDK), function_constant(kWantDK)]],
                       device JFT_T* dv [[buffer(kBufDV), function_constant(kWantDV)]],
                       constant MetalParams& p [[buffer(kBufParams)]], JFT_THREAD_ARGUMENTS) {
  const Options options = JFT_OPTIONS;
  const i64 pair = p.first_group + group.y;
  const i64 kv_heads = p.Hq / p.G, kv_head = pair % kv_heads;
  const At at = fragment_position(lane);
  const i64 tile0 = (p.first_tile + group.x) * kRows, tile1 = min(tile0 + kRows, p.Sk);
  const i64 key0 = tile0 + simd / kSplit * 8, key = key0 + at.x;
  const int half_q = int(simd % kSplit) * kDF * 8, half_v = int(simd % kSplit) * kDVF * 8;
  threadgroup JFT_T* q_tile = shared;
  threadgroup JFT_T* do_tile = shared + kStaged * kLdK;
  threadgroup float* stats = reinterpret_cast<threadgroup float*>(do_tile + kStaged * kLdV);
  threadgroup float* scratch = stats + 3 * kStaged;

  Fragment dk_acc[kDF], dv_acc[kDVF];
  clear(dk_acc);
  clear(dv_acc);
  for (i64 r = 0; r < p.reduced_batches; ++r) {
    const BatchIndex b = batch_index(p, pair / kv_heads, r);
    Fragment k_rows[kDF], v_rows[kDVF];
    load_rows(k_rows, k + batch_offset(p, p.in[kBufK], b) + kv_head * p.in[kBufK].head,
              p.in[kBufK].row, key0, p.Sk, half_q, p.D, at);
    load_rows(v_rows, v + batch_offset(p, p.in[kBufV], b) + kv_head * p.in[kBufV].head,
              p.in[kBufV].row, key0, p.Sk, half_v, p.Dv, at);
    for (i64 head = kv_head * p.G; head < (kv_head + 1) * p.G; ++head) {
      const Scene scene = make_scene(p, options, b, head);
      device const JFT_T* q_head = q + batch_offset(p, p.in[kBufQ], b) + head * p.in[kBufQ].head;
      device const JFT_T* do_head =
          d_out + batch_offset(p, p.in[kBufDO], b) + head * p.in[kBufDO].head;
      const Range rows = visible_queries_any(scene.pos, tile0, tile1);
      IdRange ids = {0, 0};
      if (kHasSegments) ids = segment_range(scene.kv_segments, tile0, tile1, lane);
      for (i64 i0 = rows.begin / kStaged * kStaged; i0 < rows.end; i0 += kStaged) {
        const i64 i1 = min(i0 + kStaged, p.Sq);
        if (kHasSegments && segments_apart(ids, segment_range(scene.q_segments, i0, i1, lane)))
          continue;
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has read its tiles
        if (int(tid) < kStaged) {
          const RowStats row = load_stats(p, max_in, log_sum_in, delta_in, b, head, i0 + tid);
          stats[tid] = row.m;
          stats[kStaged + tid] = row.c;
          stats[2 * kStaged + tid] = row.delta;
        }
        stage(q_tile, kLdK, kStaged, kDP, q_head, p.in[kBufQ].row, i0, p.Sq, p.D, tid);
        stage(do_tile, kLdV, kStaged, kDVP, do_head, p.in[kBufDO].row, i0, p.Sq, p.Dv, tid);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        Fragment s[kN], dp[kN];
        clear(s);
        clear(dp);
        multiply_transposed<kDF>(s, k_rows, 0, q_tile + half_q, kLdK, at);     // S^T = K Q^T
        multiply_transposed<kDVF>(dp, v_rows, 0, do_tile + half_v, kLdV, at);  // dP^T = V dO^T
        if (kSplit == 2) exchange_halves(s, dp, scratch, simd, lane);

        const bool edge = !all_visible(scene, i0, i0 + kStaged, tile0, tile0 + kRows);
        uint seen = ~0u;
        for (int n = 0; n < kN; ++n) {
          for (int e = 0; e < 2; ++e) {
            const int local = n * 8 + at.y + e;
            const i64 i = i0 + local;
            RowStats row;
            row.m = stats[local];
            row.c = stats[kStaged + local];
            row.delta = stats[2 * kStaged + local];
            float weight = 0.0f, ds = 0.0f;
            if (is_empty(row) || (edge && !visible(scene, i, key))) {
              seen &= ~(1u << (2 * n + e));
            } else {
              const Weights w = weights(p, scene, get(s[n], e), get(dp[n], e), row, i, key);
              weight = w.weight;
              ds = w.ds * w.slope;
            }
            put(s[n], e, weight);
            put(dp[n], e, ds);
          }
        }
        // rows that none of these 8 keys sees, and empty rows, may hold NaN in do and q
        const uint keep = any_in_column(seen, at);
        if (kWantDV) multiply(dv_acc, s, do_tile + half_v, kLdV, keep, at);  // dV += P^T dO
        if (kWantDK) multiply(dk_acc, dp, q_tile + half_q, kLdK, keep, at);  // dK += dS^T Q
      }
    }
  }
  const BatchIndex b = batch_index(p, pair / kv_heads, 0);
  if (kWantDK) {
    store_rows(dk_acc, p.scale, dk + batch_offset(p, p.out[1], b) + kv_head * p.out[1].head,
               p.out[1].row, key0, p.Sk, half_q, p.D, at);
  }
  if (kWantDV) {
    store_rows(dv_acc, 1.0f, dv + batch_offset(p, p.out[2], b) + kv_head * p.out[2].head,
               p.out[2].row, key0, p.Sk, half_v, p.Dv, at);
  }
}
