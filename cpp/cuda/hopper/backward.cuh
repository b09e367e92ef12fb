// Backward pass, main kernel: dk, dv in registers, dq added up in f32 scratch by bulk reductions.
//
// A CTA owns kKeys = 128 keys of one kv head (64 per consumer warpgroup; K, V resident) and walks the query
// tiles of all G query heads. Everything is transposed, keys on the M dimension, so that P^T and dS^T come
// out as register A operands:
//     S^T  = K Q^T           P^T = exp2((S^T factor - g) - c)        g, c: per query, from the pre-pass
//     dP^T = V dO^T          dV += P^T dO       (issued before dP is awaited)
//     dS^T = P^T (dP^T - delta)
//     dK  += dS^T Q          (issued before the barrier behind which both warpgroups' dS is visible)
//     dQ   = dS K            each warpgroup a 64 x 64 part; added to scratch in fragment order
// The next tile's S^T product runs while dQ goes to shared memory.
#pragma once

#include "../../core/attrs.h"
#include "backward_params.h"
#include "device/fragment.cuh"
#include "device/mbarrier.cuh"
#include "device/sync.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "pipeline.cuh"
#include "tile_ops.cuh"
#include "tiles.h"

namespace jft::hopper {

template <class T_, int kDim_, bool kExtras_>
struct BackwardTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kExtras = kExtras_;  // softcap, alibi
  static constexpr int kRows = BackwardTile<kDim>::kRows, kKeys = BackwardTile<kDim>::kKeys;
  static constexpr int kStages = BackwardTile<kDim>::kStages;
  static constexpr int kConsumers = 2, kThreads = 384;
  static constexpr int kPanels = panels(kDim), kRowPanels = kRows / 64;
  // dV may start before dP is awaited where registers allow P^T twice (f32 and packed).
  static constexpr bool kEarlyDv = kRows == 64 && !kExtras;
  // The next S^T under this tile's dQ epilogue; softcap and alibi need the registers themselves.
  static constexpr bool kPrefetch = !kExtras;
  static_assert(kKeys == 64 * kConsumers && kRows * kDim == 2 * 64 * 64, "each warpgroup makes 64 x 64 of dQ");

  static constexpr uint32_t kKvPanel = kKeys * 128, kQPanel = kRows * 128;
  static constexpr uint32_t kKvBytes = kKvPanel * kPanels, kQBytes = kQPanel * kPanels;
  static constexpr uint32_t kDsPanel = kKeys * 128, kDsBytes = kDsPanel * kRowPanels;  // [key][64 queries]
  static constexpr uint32_t kDqBytes = 64 * 64 * 4;                                    // per warpgroup
  static constexpr uint32_t kGaugeBytes = kRows * 8, kDeltaBytes = kRows * 4;

  static constexpr uint32_t kK = 0, kV = kK + kKvBytes, kQ = kV + kKvBytes;
  static constexpr uint32_t kDO = kQ + kStages * kQBytes, kDs = kDO + kStages * kQBytes;
  static constexpr uint32_t kDq = kDs + 2 * kDsBytes;
  static constexpr uint32_t kGauge = kDq + kConsumers * kDqBytes, kDelta = kGauge + kStages * kGaugeBytes;
  static constexpr uint32_t kKvFull = kDelta + kStages * kDeltaBytes;
  static constexpr uint32_t kQFull = kKvFull + 8, kQEmpty = kQFull + 8 * kStages;
  static constexpr uint32_t kDOFull = kQEmpty + 8 * kStages, kDOEmpty = kDOFull + 8 * kStages;
  static constexpr uint32_t kSharedBytes = kDOEmpty + 8 * kStages + 1024;
  static_assert(kSharedBytes <= kSharedLimit, "backward tile does not fit shared memory");

  // 24 + 2 x 240 = 3 x 168, what 384 threads get at launch.
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kGroupBarrier = 1, kPairBarrier = 3;  // named barriers: a warpgroup, both
};

// What a CTA works on (the grid has one CTA per tile): made by one thread, read from shared memory.
template <class Traits>
struct BackwardWork {
  int b0, b1, kv_head, k0;
  int m_begin, m_end;          // query tiles that see some key of this tile
  int live_begin, live_end;    // keys that some query sees
  int row_begin, row_end;      // queries that see some key; others may hold NaN
  RowLimits rows;

  __device__ __forceinline__ void make(const BackwardParams& p) {
    const Tile tile = decode_tile(p.schedule, blockIdx.x);
    const int heads = p.shape.Hq / p.shape.G;
    const int b = tile.head / heads;
    kv_head = tile.head - b * heads;
    b0 = b / p.shape.B1;
    b1 = b - b0 * p.shape.B1;
    k0 = tile.index * Traits::kKeys;
    const Positions pos = load_positions(p.positions, p.shape, b0, b1);
    const Range queries = visible_queries_any(pos, k0, k0 + Traits::kKeys);
    m_begin = static_cast<int>(queries.begin) / Traits::kRows;
    m_end = queries.begin < queries.end ? (static_cast<int>(queries.end) + Traits::kRows - 1) / Traits::kRows
                                        : m_begin;
    const Range keys = visible_keys_any(pos, 0, pos.Sq);
    live_begin = static_cast<int>(keys.begin);
    live_end = static_cast<int>(keys.end);
    const Range all = visible_queries_any(pos, 0, pos.Sk);
    row_begin = static_cast<int>(all.begin);
    row_end = static_cast<int>(all.end);
    rows = row_limits(pos);
  }
};

// ---- Producer: one thread ------------------------------------------------------------------------------

template <class Traits>
__device__ __forceinline__ void backward_producer(const BackwardParams& p, const BackwardWork<Traits>& w,
                                                  uint32_t smem) {
  tma_prefetch_map(&p.k.map);
  tma_prefetch_map(&p.v.map);
  tma_prefetch_map(&p.q.map);
  tma_prefetch_map(&p.d_o.map);
  const int b0 = w.b0, b1 = w.b1, kv_head = w.kv_head, k0 = w.k0, m_begin = w.m_begin, m_end = w.m_end;
  if (m_begin >= m_end) return;
  const uint32_t kv_full = smem + Traits::kKvFull;
  mbarrier_arrive_expect(kv_full, 2 * Traits::kKvBytes);
  load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kK, p.k, kv_full, k0, kv_head, b0, b1);

  Ring<Traits::kStages> q(smem + Traits::kQFull, smem + Traits::kQEmpty);
  Ring<Traits::kStages> d_o(smem + Traits::kDOFull, smem + Traits::kDOEmpty);
  bool first = true;
  for (int g = 0; g < p.shape.G; ++g) {
    const int h = kv_head * p.shape.G + g;
    const int64_t head = int64_t(b0 * p.shape.B1 + b1) * p.shape.Hq + h;
    for (int m = m_begin; m < m_end; ++m) {
      const int64_t row = (head * p.q_tiles + m) * Traits::kRows;  // in the padded per-row scratch
      q.wait_empty();
      q.expect(Traits::kQBytes + Traits::kGaugeBytes);
      load_tile<Traits::kPanels, Traits::kQPanel>(smem + Traits::kQ + q.stage * Traits::kQBytes, p.q,
                                                  q.full_barrier(), m * Traits::kRows, h, b0, b1);
      bulk_load(smem + Traits::kGauge + q.stage * Traits::kGaugeBytes, p.gauge + 2 * row, Traits::kGaugeBytes,
                q.full_barrier());
      q.advance();
      if (first) {  // after the first q: the first product needs only k and q
        load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kV, p.v, kv_full, k0, kv_head, b0, b1);
        first = false;
      }
      d_o.wait_empty();
      d_o.expect(Traits::kQBytes + Traits::kDeltaBytes);
      load_tile<Traits::kPanels, Traits::kQPanel>(smem + Traits::kDO + d_o.stage * Traits::kQBytes, p.d_o,
                                                  d_o.full_barrier(), m * Traits::kRows, h, b0, b1);
      bulk_load(smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes, p.delta + row, Traits::kDeltaBytes,
                d_o.full_barrier());
      d_o.advance();
    }
  }
}

// ---- Consumer: one warpgroup, 64 keys ------------------------------------------------------------------------

template <class Traits>
struct BackwardConsumer {
  using T = typename Traits::T;
  static constexpr int kRows = Traits::kRows, kDim = Traits::kDim;

  const BackwardParams& p;
  const BackwardWork<Traits>& w;
  uint32_t smem;
  int wg;  // 0 or 1, warp-uniform
  Ring<Traits::kStages> q, d_o;
  int ds_stage = 0;
  float factor, slope;

  float s[kRows / 2];                // S^T, then P^T
  float dk[kDim / 2], dv[kDim / 2];  // 64 keys x kDim

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p_, const BackwardWork<Traits>& w_,
                                              uint32_t smem_, int wg_)
      : p(p_),
        w(w_),
        smem(smem_),
        wg(wg_),
        q(smem_ + Traits::kQFull, smem_ + Traits::kQEmpty),
        d_o(smem_ + Traits::kDOFull, smem_ + Traits::kDOEmpty) {}

  __device__ __forceinline__ int key(int r) const {
    return w.k0 + 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2) + 8 * r;
  }

  // C^T[64 keys, kRows] = A[64 keys, kDim] B[kRows, kDim]^T, for K Q^T and V dO^T
  __device__ __forceinline__ void issue_scores(float (&c)[kRows / 2], uint32_t a_tile, uint32_t b_tile) {
    const uint64_t a = descriptor_k_major(a_tile + wg * 64 * 128), b = descriptor_k_major(b_tile);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<kRows>::template ss<T, 0, 0>(c, descriptor_advance(a, k_major_step(i, Traits::kKvPanel)),
                                         descriptor_advance(b, k_major_step(i, Traits::kQPanel)), i > 0);
    wgmma_commit();
  }

  // acc[64 keys, kDim] += A[64 keys, kRows] B[kRows, kDim], for P^T dO and dS^T Q
  __device__ __forceinline__ void issue_gradient(float (&acc)[kDim / 2], const uint32_t (&a)[kRows / 4],
                                                 uint32_t b_tile) {
    const uint64_t b = descriptor_mn_major(b_tile, Traits::kQPanel);
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      Wgmma<kDim>::template rs<T, 1>(acc, a + 4 * i, descriptor_advance(b, i * kMnMajorStep), 1);
    wgmma_commit();
  }

  // dQ part of this warpgroup = dS[64 queries, 128 keys] K[128 keys, 64 columns]. Two panels of queries (D 64):
  // one each; two panels of columns (D 128): one each.
  __device__ __forceinline__ void issue_dq(float (&dq)[32]) {
    const uint32_t ds = smem + Traits::kDs + ds_stage * Traits::kDsBytes;
    const uint64_t a = descriptor_mn_major(ds + (Traits::kRowPanels == 2 ? wg * Traits::kDsPanel : 0), 0);
    const uint64_t b = descriptor_mn_major(smem + Traits::kK + (Traits::kPanels == 2 ? wg * Traits::kKvPanel : 0), 0);
#pragma unroll
    for (int i = 0; i < Traits::kKeys / 16; ++i)
      Wgmma<64>::template ss<T, 1, 1>(dq, descriptor_advance(a, i * kMnMajorStep),
                                      descriptor_advance(b, i * kMnMajorStep), i > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ uint32_t q_tile() const { return smem + Traits::kQ + q.stage * Traits::kQBytes; }
  __device__ __forceinline__ uint32_t do_tile() const { return smem + Traits::kDO + d_o.stage * Traits::kQBytes; }

  __device__ __forceinline__ void scrub_queries(uint32_t tile, int m) {
    const int q0 = m * kRows;
    if (q0 >= w.row_begin && q0 + kRows <= w.row_end) return;
    scrub_rows<kRows, Traits::kPanels, 128>(tile, q0, w.row_begin, w.row_end);
    named_sync(Traits::kGroupBarrier + wg, 128);
  }

  __device__ __forceinline__ void start_scores(int m) {
    q.wait_full();
    scrub_queries(q_tile(), m);
    wgmma_fence();
    issue_scores(s, smem + Traits::kK, q_tile());
  }

  // Logits in natural units (softcap and alibi).
  __device__ __forceinline__ void transform(int m) {
    const float scale = p.logit.scale, cap = p.logit.softcap;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      s[i] *= scale;
      if (cap > 0.f) s[i] = fmaf(-2.f * cap, __frcp_rn(1.f + exp2_fast(s[i] * p.logit.softcap_log2)), cap);
    }
    if (p.logit.alibi.data) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) s[i] = fmaf(-slope, distance(m, i), s[i]);
    }
  }

  // |i + offset - j| of accumulator element e
  __device__ __forceinline__ float distance(int m, int e) const {
    const int row = m * kRows + 2 * (threadIdx.x & 3) + 8 * (e / 4) + (e & 1);
    return fabsf(static_cast<float>(row) + w.rows.offset - static_cast<float>(key((e >> 1) & 1)));
  }

  __device__ __forceinline__ bool needs_mask(int m) const {
    const int first = m * kRows, last = first + kRows - 1;
    return w.k0 < w.rows.begin(last) || w.k0 + Traits::kKeys > w.rows.end(first);
  }

  // Key j sees queries i with begin(i) <= j < end(i): an interval of i.
  __device__ __forceinline__ void mask(int m) {
    const int q0 = m * kRows + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = key(r);
      const int lo = j < w.rows.kv_length ? j - w.rows.shift_end + 1 - q0 : kRows;
      const int hi = j - w.rows.shift_begin - q0;  // inclusive
#pragma unroll
      for (int g = 0; g < kRows / 8; ++g)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * g + c < lo || 8 * g + c > hi) s[4 * g + 2 * r + c] = -INFINITY;
    }
  }

  // P^T = exp2((S^T factor - g) - c). Two subtractions: L in one number loses ln l when |L| is large.
  __device__ __forceinline__ void probabilities() {
    const uint32_t at = smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 16 * (threadIdx.x & 3);
#pragma unroll
    for (int g = 0; g < kRows / 8; ++g) {
      float g0, g1, c0, c1;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(g0), "=f"(g1), "=f"(c0), "=f"(c1)
                   : "r"(at + 64 * g));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * g + 2 * r] = exp2_fast(fmaf(s[4 * g + 2 * r], factor, -g0) - c0);
        s[4 * g + 2 * r + 1] = exp2_fast(fmaf(s[4 * g + 2 * r + 1], factor, -g1) - c1);
      }
    }
  }

  // 1 - (capped / cap)^2, the capped logit recovered from P: ln P + L (+ alibi). P = 0 gives a finite factor.
  __device__ __forceinline__ void cap_factor(float (&dp)[kRows / 2], int m) {
    const uint32_t at = smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 16 * (threadIdx.x & 3);
    const float to_cap = 0.69314718f / p.logit.softcap;
#pragma unroll
    for (int g = 0; g < kRows / 8; ++g) {
      float gauge[2], c[2];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(gauge[0]), "=f"(gauge[1]), "=f"(c[0]), "=f"(c[1])
                   : "r"(at + 64 * g));
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        float x = fmaxf(__log2f(s[e]), -126.f) + (gauge[e & 1] + fminf(c[e & 1], 1e9f));
        if (p.logit.alibi.data) x = fmaf(slope * 1.44269504f, distance(m, e), x);
        x *= to_cap;
        dp[e] *= fmaf(-x, x, 1.f);
      }
    }
  }

  // One query tile. With kPrefetch its S^T is complete on entry: nothing may be in flight across the loop's back edge, else
  // ptxas serialises every product (C7514).
  template <bool kLast>
  __device__ __forceinline__ void step(int m, int m_next) {
    const bool leader = (threadIdx.x & 127) == 0;
    float dp[kRows / 2];
    uint32_t p_frag[kRows / 4], ds_frag[kRows / 4];
    if (!Traits::kPrefetch) start_scores(m);
    d_o.wait_full();
    scrub_queries(do_tile(), m);
    wgmma_fence();
    issue_scores(dp, smem + Traits::kV, do_tile());
    if (!Traits::kPrefetch) {
      wgmma_wait<1>();
      pin(s);
      transform(m);
    }
    if (needs_mask(m)) mask(m);
    probabilities();
    if (Traits::kEarlyDv) {
      pack_fragments<T>(p_frag, s);
      pin(p_frag);
      pin(dv);
      wgmma_fence();
      issue_gradient(dv, p_frag, do_tile());
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    pin(dp);
    {  // dS^T = P^T (dP^T - delta)
      const uint32_t at = smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes + 8 * (threadIdx.x & 3);
#pragma unroll
      for (int g = 0; g < kRows / 8; ++g) {
        float d0, d1;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(d0), "=f"(d1) : "r"(at + 32 * g));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          dp[4 * g + 2 * r] = s[4 * g + 2 * r] * (dp[4 * g + 2 * r] - d0);
          dp[4 * g + 2 * r + 1] = s[4 * g + 2 * r + 1] * (dp[4 * g + 2 * r + 1] - d1);
        }
      }
      if (Traits::kExtras && p.logit.softcap > 0.f) cap_factor(dp, m);
      if (!Traits::kEarlyDv) pack_fragments<T>(p_frag, s);
      pack_fragments<T>(ds_frag, dp);
    }
    if (!Traits::kEarlyDv) {
      pin(p_frag);
      pin(dv);
      wgmma_fence();
      issue_gradient(dv, p_frag, do_tile());
    }
    store_ds(ds_frag);
    pin(ds_frag);
    pin(dk);
    wgmma_fence();
    issue_gradient(dk, ds_frag, q_tile());
    fence_async_shared();
    wgmma_wait<1>();  // dV is done: frees its operand's registers; dK still runs
    d_o.release();
    d_o.advance();
    if (leader) bulk_wait_read<0>();  // this warpgroup's dQ buffer is free again
    named_sync(Traits::kPairBarrier, 256);
    float dq[32];
    wgmma_fence();
    issue_dq(dq);
    if (kLast || !Traits::kPrefetch) {
      wgmma_wait<0>();
      q.release();
      q.advance();
    } else {
      wgmma_wait<1>();  // dK is done
      pin(dk);
      q.release();
      q.advance();
      start_scores(m_next);
      wgmma_wait<1>();
    }
    pin(dq);
    ds_stage ^= 1;
    store_dq(dq);
    if (!kLast && Traits::kPrefetch) {
      wgmma_wait<0>();
      pin(s);
    }
  }

  // [key][query] panels: the A operand of dQ, MN-major.
  __device__ __forceinline__ void store_ds(const uint32_t (&f)[kRows / 4]) {
    const int lane = threadIdx.x & 31, row = 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + (lane & 15);
    const uint32_t base = smem + Traits::kDs + ds_stage * Traits::kDsBytes;
#pragma unroll
    for (int i = 0; i < kRows / 16; ++i)
      stmatrix_x4(base + (i / 4) * Traits::kDsPanel + swizzle128(row, 2 * (i % 4) + (lane >> 4)), f[4 * i],
                  f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
  }

  int dq_tile;  // scratch tile in work

  __device__ __forceinline__ void store_dq(const float (&dq)[32]) {
    const uint32_t buffer = smem + Traits::kDq + wg * Traits::kDqBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(buffer + (i * 128 + (threadIdx.x & 127)) * 16),
                   "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3])
                   : "memory");
    fence_async_shared();
    named_sync(Traits::kGroupBarrier + wg, 128);
    if ((threadIdx.x & 127) == 0) {
      bulk_reduce_add_f32(p.dq + (int64_t(dq_tile) * 2 + wg) * (64 * 64), buffer, Traits::kDqBytes);
      bulk_commit();
    }
  }

  __device__ __forceinline__ void run() {
    factor = Traits::kExtras ? 1.4426950408889634f : p.logit.scale_log2;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.f;
    if (w.m_begin < w.m_end) {
      mbarrier_wait(smem + Traits::kKvFull, 0);
      if (w.k0 < w.live_begin || w.k0 + Traits::kKeys > w.live_end) {
        scrub_rows<Traits::kKeys, Traits::kPanels, 128>(smem + Traits::kK, w.k0, w.live_begin, w.live_end);
        scrub_rows<Traits::kKeys, Traits::kPanels, 128>(smem + Traits::kV, w.k0, w.live_begin, w.live_end);
        named_sync(Traits::kPairBarrier, 256);
      }
      int m = w.m_begin, g = 0;
      set_head(0);
      if (Traits::kPrefetch) {
        start_scores(m);
        wgmma_wait<0>();
        pin(s);
      }
      const int total = (w.m_end - w.m_begin) * p.shape.G;
      for (int it = 0; it + 1 < total; ++it) {
        const bool wrap = m + 1 == w.m_end;
        const int next = wrap ? w.m_begin : m + 1;
        dq_tile = scratch_tile(g, m);
        step<!Traits::kPrefetch>(m, next);
        m = next;
        if (wrap && ++g < p.shape.G) set_head(g);
      }
      dq_tile = scratch_tile(g, m);
      step<true>(m, m);
    }
    epilogue();
  }

  __device__ __forceinline__ int scratch_tile(int g, int m) const {
    const int head = (w.b0 * p.shape.B1 + w.b1) * p.shape.Hq + w.kv_head * p.shape.G + g;
    return head * p.q_tiles + m;
  }

  __device__ __forceinline__ void set_head(int g) {
    if (Traits::kExtras && p.logit.alibi.data)
      slope = *p.logit.alibi.at(w.b0, w.b1, w.kv_head * p.shape.G + g);
  }

  // dk * scale and dv to 16 bits through the buffers of k and v; dead keys by selection.
  __device__ __forceinline__ void epilogue() {
    float k_scale[2], v_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool dead = key(r) < w.live_begin || key(r) >= w.live_end;
      k_scale[r] = p.logit.scale;
      v_scale[r] = 1.f;
      if (dead) {
#pragma unroll
        for (int c = 0; c < kDim / 4; ++c)
          dk[4 * (c / 2) + 2 * r + (c & 1)] = dv[4 * (c / 2) + 2 * r + (c & 1)] = 0.f;
      }
    }
    named_sync(Traits::kPairBarrier, 256);  // the other warpgroup's dQ product reads all of k
    const uint32_t k_buffer = smem + Traits::kK + wg * 64 * 128, v_buffer = smem + Traits::kV + wg * 64 * 128;
    store_fragments<T, kDim>(v_buffer, Traits::kKvPanel, dv, v_scale[0], v_scale[1]);
    store_fragments<T, kDim>(k_buffer, Traits::kKvPanel, dk, k_scale[0], k_scale[1]);
    fence_async_shared();
    named_sync(Traits::kGroupBarrier + wg, 128);
    const int row = w.k0 + 64 * wg;
    if ((threadIdx.x & 127) == 0) {
      if (row < p.shape.Sk) {
#pragma unroll
        for (int panel = 0; panel < Traits::kPanels; ++panel) {
          tma_store(&p.dv.map, v_buffer + panel * Traits::kKvPanel, panel * kPanel, row, w.kv_head,
                    w.b1 * p.dv.has_b1, w.b0 * p.dv.has_b0);
          tma_store(&p.dk.map, k_buffer + panel * Traits::kKvPanel, panel * kPanel, row, w.kv_head,
                    w.b1 * p.dk.has_b1, w.b0 * p.dk.has_b0);
        }
        bulk_commit();
      }
      bulk_wait<0>();
    }
  }
};

// ---- Kernel --------------------------------------------------------------------------------------------------

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ uint8_t raw[];
  __shared__ BackwardWork<Traits> work;
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kConsumers;
    mbarrier_init(base + Traits::kKvFull, 1);
    for (int s = 0; s < Traits::kStages; ++s) {
      mbarrier_init(base + Traits::kQFull + 8 * s, 1);
      mbarrier_init(base + Traits::kQEmpty + 8 * s, kWarps);
      mbarrier_init(base + Traits::kDOFull + 8 * s, 1);
      mbarrier_init(base + Traits::kDOEmpty + 8 * s, kWarps);
    }
    mbarrier_init_fence();
  }
  if (threadIdx.x == 32) work.make(p);
  __syncthreads();
  const int group = warpgroup_index();
  if (group == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) backward_producer<Traits>(p, work, base);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    BackwardConsumer<Traits> consumer(p, work, base, group - 1);
    consumer.run();
  }
}

}  // namespace jft::hopper
