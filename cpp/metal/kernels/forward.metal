// Forward: o, row_max m and row_log_sum c of FlashAttention-2.
//
// One threadgroup per 32 query rows of a (batch element, query head); a simdgroup owns 8 rows. Per
// step of kKeys keys:   S = scale Q K^T   m' = max(m, rowmax S)   P = exp(S - m')
//                       l = l exp(m - m') + rowsum P              O = O exp(m - m') + P V
// At the end o = O / l and c = ln l (natural units, L = m + c).
#include "logits.h"

constant constexpr int kKeys = metal_forward_keys(kDP, kDVP, kBytes);
constant constexpr int kN = kKeys / 8;

kernel void flash_forward(device const JFT_T* q [[buffer(kBufQ)]],
                          device const JFT_T* k [[buffer(kBufK)]],
                          device const JFT_T* v [[buffer(kBufV)]], JFT_OPTION_ARGUMENTS,
                          device const float* sinks
                          [[buffer(kBufSinks), function_constant(kHasSinks)]],
                          device JFT_T* o [[buffer(kBufO)]],
                          device float* max_out [[buffer(kBufRowMax)]],
                          device float* log_sum_out [[buffer(kBufRowLogSum)]],
                          constant MetalParams& p [[buffer(kBufParams)]], JFT_THREAD_ARGUMENTS) {
  const Options options = JFT_OPTIONS;
  const i64 pair = p.first_group + group.y;
  const i64 head = pair % p.Hq;
  const BatchIndex b = batch_index(p, pair / p.Hq, 0);
  const Scene scene = make_scene(p, options, b, head);
  const At at = fragment_position(lane);
  const i64 tile0 = (p.first_tile + group.x) * kForwardRows,
            tile1 = min(tile0 + kForwardRows, p.Sq);
  const i64 row0 = tile0 + simd * 8, row = row0 + at.x;

  q += batch_offset(p, p.in[kBufQ], b) + head * p.in[kBufQ].head;
  k += batch_offset(p, p.in[kBufK], b) + head / p.G * p.in[kBufK].head;
  v += batch_offset(p, p.in[kBufV], b) + head / p.G * p.in[kBufV].head;
  threadgroup JFT_T* k_tile = shared;
  threadgroup JFT_T* v_tile = shared + kKeys * kLdK;

  Fragment q_rows[kDF * kSplit], out[kDVF * kSplit];
  load_rows(q_rows, q, p.in[kBufQ].row, row0, p.Sq, 0, p.D, at);
  clear(out);
  float m = -INFINITY, l = 0.0f;

  const Range keys = visible_keys_any(scene.pos, tile0, tile1);
  IdRange ids = {0, 0};
  if (kHasSegments) ids = segment_range(scene.q_segments, tile0, tile1, lane);
  for (i64 j0 = keys.begin / kKeys * kKeys; j0 < keys.end; j0 += kKeys) {
    const i64 j1 = min(j0 + kKeys, p.Sk);
    if (kHasSegments && segments_apart(ids, segment_range(scene.kv_segments, j0, j1, lane)))
      continue;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has read its tiles
    stage(k_tile, kLdK, kKeys, kDP, k, p.in[kBufK].row, j0, p.Sk, p.D, tid);
    stage(v_tile, kLdV, kKeys, kDVP, v, p.in[kBufV].row, j0, p.Sk, p.Dv, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // S = Q K^T, in the halves in which the backward sums it, so that it is the same to the last
    // bit
    Fragment s[kN];
    clear(s);
    multiply_transposed<kDF>(s, q_rows, 0, k_tile, kLdK, at);
    if (kSplit == 2) {
      Fragment upper[kN];
      clear(upper);
      multiply_transposed<kDF>(upper, q_rows, kDF, k_tile + kDF * 8, kLdK, at);
      for (int n = 0; n < kN; ++n) {
        for (int e = 0; e < 2; ++e) put(s[n], e, get(s[n], e) + get(upper[n], e));
      }
    }

    const bool edge = !all_visible(scene, tile0, tile0 + kForwardRows, j0, j0 + kKeys);
    uint seen = ~0u;
    float top = -INFINITY;
    for (int n = 0; n < kN; ++n) {
      for (int e = 0; e < 2; ++e) {
        const i64 j = j0 + n * 8 + at.y + e;
        float x = -INFINITY;
        if (!edge || visible(scene, row, j)) {
          x = logit(p, scene, get(s[n], e), row, j).s;
        } else {
          seen &= ~(1u << (2 * n + e));
        }
        put(s[n], e, x);
        top = max(top, x);
      }
    }
    const float m_new = max(m, row_max(top));
    const float base = m_new == -INFINITY ? 0.0f : m_new;  // -inf - -inf is NaN
    const float rescale = exp_natural(m - base);
    float sum = 0.0f;
    for (int n = 0; n < kN; ++n) {
      for (int e = 0; e < 2; ++e) {
        float weight = exp_natural(get(s[n], e) - base);
        sum += weight;
        if (kHasDropout) weight *= dropout_factor(p, scene, row, j0 + n * 8 + at.y + e);
        put(s[n], e, weight);
      }
    }
    l = l * rescale + row_sum(sum);
    m = m_new;
    for (int d = 0; d < kDVF * kSplit; ++d) {
      for (int e = 0; e < 2; ++e) put(out[d], e, get(out[d], e) * rescale);
    }
    multiply(out, s, v_tile, kLdV, edge ? any_in_column(seen, at) : ~0u, at);  // O += P V
  }

  float factor = 1.0f;
  if (kHasSinks) {
    const float sink = sinks[batch_offset(p, p.in[kBufSinks], b) + head * p.in[kBufSinks].head];
    const float m_new = max(m, sink);
    if (m_new > -INFINITY) {
      factor = exp_natural(m - m_new);
      l = l * factor + exp_natural(sink - m_new);
      m = m_new;
    }
  }
  const bool empty = l == 0.0f;
  // A row that sees nothing: its accumulator may hold 0 * NaN of keys that other rows see.
  const bool blank = empty || (kHasSinks && factor == 0.0f);
  for (int d = 0; d < kDVF * kSplit; ++d) {
    for (int e = 0; e < 2; ++e) put(out[d], e, blank ? 0.0f : get(out[d], e) * factor / l);
  }
  o += batch_offset(p, p.in[kBufO], b) + head * p.in[kBufO].head;
  store_rows(out, 1.0f, o, p.in[kBufO].row, row0, p.Sq, 0, p.Dv, at);
  if (at.y == 0 && row < p.Sq) {
    const i64 index = batch_offset(p, p.in[kBufRowMax], b) + head * p.in[kBufRowMax].head +
                      row * p.in[kBufRowMax].row;
    max_out[index] = empty ? 0.0f : m;
    log_sum_out[index] = empty ? kMetalEmptyRow : precise::log(l);
  }
}
