// dbias = ds summed over every dimension in which the bias has size 1. One threadgroup per tile of
// the result ([kRows or 1, kStaged or 1] of a bias head); it walks over everything that is summed
// into it, so there are no atomics and no [Sq, Sk] scratch for a bias that is broadcast along a
// sequence.
#include "backward.h"

inline void write_bias(device uchar* out, i64 at, float x) {
  if (kBiasType == 0) {
    reinterpret_cast<device float*>(out)[at] = x;
  } else if (kBiasType == 1) {
    reinterpret_cast<device half*>(out)[at] = half(x);
  } else {
    reinterpret_cast<device bfloat*>(out)[at] = bfloat(x);
  }
}

kernel void flash_dbias(JFT_BACKWARD_ARGUMENTS, device uchar* dbias [[buffer(kBufDBias)]],
                        constant MetalParams& p [[buffer(kBufParams)]], JFT_THREAD_ARGUMENTS) {
  const Options options = JFT_OPTIONS;
  const At at = fragment_position(lane);
  const bool rows_kept = p.bias_rows != 1 || p.Sq == 1, cols_kept = p.bias_cols != 1 || p.Sk == 1;
  const bool heads_kept = p.bias_heads != 1 || p.Hq == 1;
  const i64 row_tiles = (p.Sq + kRows - 1) / kRows, col_tiles = (p.Sk + kStaged - 1) / kStaged;
  const i64 out_cols = cols_kept ? col_tiles : 1;
  const i64 tile_index = p.first_tile + group.x;
  const i64 out_row = tile_index / out_cols, out_col = tile_index % out_cols;
  const i64 pair = p.first_group + group.y;
  const i64 out_head = pair % p.bias_heads;
  const int half_q = int(simd % kSplit) * kDF * 8, half_v = int(simd % kSplit) * kDVF * 8;
  threadgroup JFT_T* k_tile = shared;
  threadgroup JFT_T* v_tile = shared + kStaged * kLdK;
  threadgroup float* scratch = reinterpret_cast<threadgroup float*>(v_tile + kStaged * kLdV);

  Fragment acc[kN];
  clear(acc);
  for (i64 r = 0; r < p.reduced_batches; ++r) {
    const BatchIndex b = batch_index(p, pair / p.bias_heads, r);
    for (i64 head = heads_kept ? out_head : 0; head < (heads_kept ? out_head + 1 : p.Hq); ++head) {
      const Scene scene = make_scene(p, options, b, head);
      device const JFT_T* k_head =
          k + batch_offset(p, p.in[kBufK], b) + head / p.G * p.in[kBufK].head;
      device const JFT_T* v_head =
          v + batch_offset(p, p.in[kBufV], b) + head / p.G * p.in[kBufV].head;
      for (i64 tile = rows_kept ? out_row : 0; tile < (rows_kept ? out_row + 1 : row_tiles);
           ++tile) {
        const i64 tile0 = tile * kRows, tile1 = min(tile0 + kRows, p.Sq);
        const i64 row0 = tile0 + simd / kSplit * 8, row = row0 + at.x;
        Fragment q_rows[kDF], do_rows[kDVF];
        load_rows(q_rows, q + batch_offset(p, p.in[kBufQ], b) + head * p.in[kBufQ].head,
                  p.in[kBufQ].row, row0, p.Sq, half_q, p.D, at);
        load_rows(do_rows, d_out + batch_offset(p, p.in[kBufDO], b) + head * p.in[kBufDO].head,
                  p.in[kBufDO].row, row0, p.Sq, half_v, p.Dv, at);
        const RowStats stats = load_stats(p, max_in, log_sum_in, delta_in, b, head, row);
        Range keys = visible_keys_any(scene.pos, tile0, tile1);
        if (cols_kept) {
          keys.begin = max(keys.begin, out_col * kStaged);
          keys.end = min(keys.end, (out_col + 1) * kStaged);
        }
        for (i64 j0 = keys.begin / kStaged * kStaged; j0 < keys.end; j0 += kStaged) {
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
          for (int n = 0; n < kN; ++n) {
            for (int e = 0; e < 2; ++e) {
              const i64 j = j0 + n * 8 + at.y + e;
              if (is_empty(stats) || !visible(scene, row, j)) continue;
              put(acc[n], e,
                  get(acc[n], e) +
                      weights(p, scene, get(s[n], e), get(dp[n], e), stats, row, j).ds);
            }
          }
        }
      }
    }
  }

  // Sums inside the tile: over its columns in the simdgroup, over its rows across simdgroups.
  if (!cols_kept) {
    float sum = 0.0f;
    for (int n = 0; n < kN; ++n) sum += get(acc[n], 0) + get(acc[n], 1);
    clear(acc);
    put(acc[0], 0, row_sum(sum));
  }
  const bool writer = simd % kSplit == 0 && (cols_kept || at.y == 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the tiles become scratch
  threadgroup float* sums = reinterpret_cast<threadgroup float*>(shared);  // [kRows][kStaged]
  if (!rows_kept && writer) {
    for (int n = 0; n < kN; ++n) {
      for (int e = 0; e < 2; ++e) {
        sums[(simd / kSplit * 8 + at.x) * kStaged + n * 8 + at.y + e] = get(acc[n], e);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const i64 base =
      batch_offset(p, p.out[3], batch_index(p, pair / p.bias_heads, 0)) + out_head * p.out[3].head;
  if (!rows_kept) {
    const int cols = cols_kept ? kStaged : 1;
    if (int(tid) >= cols) return;
    float sum = 0.0f;
    for (int row = 0; row < kRows; ++row) sum += sums[row * kStaged + tid];
    const i64 col = out_col * kStaged + tid;
    if (col < p.bias_cols) write_bias(dbias, base + col * p.out[3].col, sum);
    return;
  }
  const i64 row = out_row * kRows + simd / kSplit * 8 + at.x;
  if (!writer || row >= p.Sq) return;
  for (int n = 0; n < (cols_kept ? kN : 1); ++n) {
    for (int e = 0; e < (cols_kept ? 2 : 1); ++e) {
      const i64 col = out_col * kStaged + n * 8 + at.y + e;
      if (col < p.bias_cols) {
        write_bias(dbias, base + row * p.out[3].row + col * p.out[3].col, get(acc[n], e));
      }
    }
  }
}
