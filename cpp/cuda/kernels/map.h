// The visibility map: what bool mask and segment ids do to each cell of 64 x 64 logits, one warp
// per cell. The kernels then skip cells that are hidden and take the plain path where all is
// visible.
#pragma once

#include "../device/call.h"
#include "../device/load.h"

namespace jft::cuda {

constexpr int kMapThreads = 128;

JFT_DEV u32 warp_min(u32 x) {
  for (int mask = 16; mask > 0; mask /= 2) {
    const u32 other = shuffle_xor(x, mask);
    x = other < x ? other : x;
  }
  return x;
}

// Smallest and largest id of 64 positions, as unsigned numbers in the order of the ids.
JFT_DEV void id_range(const int* ids, int first, int size, u32* lo, u32* hi) {
  const int lane = thread_index() & 31;
  u32 low = 0xffffffffu, inverse = 0xffffffffu;  // inverse = ~largest
  JFT_UNROLL
  for (int n = 0; n < 2; ++n) {
    const int at = first + lane + 32 * n;
    if (at < size) {
      const u32 id = static_cast<u32>(ids[at]) ^ 0x80000000u;
      low = id < low ? id : low;
      inverse = ~id < inverse ? ~id : inverse;
    }
  }
  *lo = warp_min(low);
  *hi = ~warp_min(inverse);
}

JFT_DEV void map_block(const Params& params) {
  const Problem& p = params.p;
  const VisibilityMap& map = params.map;
  const i64 per_head = static_cast<i64>(map.query_cells) * map.key_cells;
  const i64 cell = block_index() * (kMapThreads / 32) + (thread_index() >> 5);
  if (cell >= map.batches * map.heads * per_head) return;  // whole warps leave
  const int kc = static_cast<int>(cell % map.key_cells);
  const int qc = static_cast<int>(cell / map.key_cells % map.query_cells);
  const i64 h = cell / per_head % map.heads;
  i64 kept = cell / per_head / map.heads, b = 0, stride = 1;
  for (int d = p.batch_dims - 1; d >= 0;
       --d) {  // map.batch is 0 where nothing depends on the dimension
    if (map.batch[d] != 0) {
      b += kept % p.batch_size[d] * stride;
      kept /= p.batch_size[d];
    }
    stride *= p.batch_size[d];
  }
  const int i0 = qc * kCell, j0 = kc * kCell;
  const int i1 = min_int(i0 + kCell, static_cast<int>(p.Sq));
  const int j1 = min_int(j0 + kCell, static_cast<int>(p.Sk));
  bool any = true, all = true;
  if (p.in[kQSegmentIds].data) {
    const Tensor &q = p.in[kQSegmentIds], &k = p.in[kKvSegmentIds];
    u32 q_lo, q_hi, k_lo, k_hi;
    id_range(static_cast<const int*>(q.data) + batch_at(p, q, b), i0, i1, &q_lo, &q_hi);
    id_range(static_cast<const int*>(k.data) + batch_at(p, k, b), j0, j1, &k_lo, &k_hi);
    any = q_lo <= k_hi && k_lo <= q_hi;
    all = q_lo == q_hi && k_lo == k_hi && q_lo == k_lo;
  }
  if (p.in[kMask].data && any) {
    const Tensor& t = p.in[kMask];
    const unsigned char* mask = head_pointer<const unsigned char>(p, t, b, h);
    const int lane = thread_index() & 31;
    bool some = false, every = true;
    const int rows = t.row ? i1 - i0 : 1, cols = t.col ? j1 - j0 : 1;
    const unsigned char* from = mask + static_cast<i64>(i0) * t.row + static_cast<i64>(j0) * t.col;
    const bool chunks = t.col == 1 && cols == kCell && t.row % 16 == 0 &&
                        reinterpret_cast<unsigned long long>(from) % 16 == 0;
    if (chunks) {
      for (int at = lane; at < rows * (kCell / 16); at += 32) {
        const Chunk c = *reinterpret_cast<const Chunk*>(
            from + static_cast<i64>(at / (kCell / 16)) * t.row + at % (kCell / 16) * 16);
        JFT_UNROLL
        for (int w = 0; w < 4; ++w) {
          some |= c.w[w] != 0;
          // A byte of 0 anywhere in the word: XLA stores booleans as 0 and 1.
          every &= (c.w[w] & 0x01010101u) == 0x01010101u;
        }
      }
    } else {
      for (int at = lane; at < rows * cols; at += 32) {
        const bool set =
            from[static_cast<i64>(at / cols) * t.row + static_cast<i64>(at % cols) * t.col] != 0;
        some |= set;
        every &= set;
      }
    }
    any = ballot(some) != 0;
    all = all && ballot(!every) == 0;
  }
  if ((thread_index() & 31) == 0) {
    map.data[cell] = any ? (all ? kCellVisible : kCellMixed) : kCellHidden;
  }
}

JFT_KERNEL(kMapThreads, 1) map_kernel(JFT_PARAMS params) { map_block(params); }

}  // namespace jft::cuda
