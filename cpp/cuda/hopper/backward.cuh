// Backward pass, main kernel: dk, dv in registers, dq added up in f32 scratch by vector reductions.
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
  static_assert(kKeys == 64 * kConsumers && kRows * kDim == 2 * 64 * 64, "each warpgroup makes 64 x 64 of dQ");

  static constexpr uint32_t kKvPanel = kKeys * 128, kQPanel = kRows * 128;
  static constexpr uint32_t kKvBytes = kKvPanel * kPanels, kQBytes = kQPanel * kPanels;
  static constexpr uint32_t kDsPanel = kKeys * 128, kDsBytes = kDsPanel * kRowPanels;  // [key][64 queries]
  static constexpr uint32_t kGaugeBytes = kRows * 8, kDeltaBytes = kRows * 4;

  static constexpr uint32_t kK = 0, kV = kK + kKvBytes, kQ = kV + kKvBytes;
  static constexpr uint32_t kDO = kQ + kStages * kQBytes, kDs = kDO + kStages * kQBytes;
  static constexpr uint32_t kGauge = kDs + 2 * kDsBytes, kDelta = kGauge + kStages * kGaugeBytes;
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
  int n, m_begin, m_end;       // key tile; query tiles that see some key of it
  int m_start;                 // the walk starts here and wraps inside [m_begin, m_end)
  int q_length;
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
    n = tile.index;
    k0 = n * Traits::kKeys;
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
    q_length = static_cast<int>(pos.q_length);
    m_start = m_begin;
    if (p.rotate) m_start = static_cast<int>(int64_t(n) * p.q_tiles / p.schedule.tiles);
  }

  __device__ __forceinline__ int next(int m) const { return m + 1 == m_end ? m_begin : m + 1; }

  // Deterministic order of the additions to query tile m: key tiles in descending order, with rotation (full
  // masks) those that start at or before m first. A CTA reaches m before its successors do, so nobody waits
  // long: causal walks start at their diagonals, rotated ones at staggered tiles.
  __device__ __forceinline__ int rank(const BackwardParams& p, int m) const {
    if (p.rotate) {
      const int last = static_cast<int>((int64_t(m + 1) * p.schedule.tiles - 1) / p.q_tiles);
      return n <= last ? last - n : p.schedule.tiles + last - n;
    }
    const int i = min(m * Traits::kRows + Traits::kRows, q_length) - 1;
    return (rows.end(i) + Traits::kKeys - 1) / Traits::kKeys - 1 - n;
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
    int m = w.m_start;
    for (int count = m_begin; count < m_end; ++count, m = w.next(m)) {
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
  float factor;
  int* semaphore = nullptr;  // deterministic: counter of the query tile that dQ was last added to
  int g_now = 0, g_next = 0;  // query head (of the group) of the tile in work, and of the next one

  float s[kRows / 2], dp[kRows / 2];  // S^T, then P^T; dP^T, then dS^T
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

  // acc[64 keys, kDim] += A[64 keys, 64 queries] B[64 queries, kDim] for one panel of queries: dV += P^T dO and
  // dK += dS^T Q, A from registers.
  __device__ __forceinline__ void issue_gradient(float (&acc)[kDim / 2], const uint32_t (&a)[16], uint32_t tile,
                                                 int panel) {
    const uint64_t b = descriptor_mn_major(tile + panel * 64 * 128, Traits::kQPanel);
#pragma unroll
    for (int i = 0; i < 4; ++i)
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
    const bool capped = p.logit.softcap > 0.f;
    if (capped) apply_softcap(s, p.logit);
    if (!p.logit.alibi.data) return;
    const float scale = capped ? 1.f : p.logit.scale, slope = slope_of(g_next);
    const float first = first_distance(m);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) s[i] = fmaf(-slope, distance(first, i), s[i] * scale);
  }

  __device__ __forceinline__ float slope_of(int g) const {
    return *p.logit.alibi.at(w.b0, w.b1, w.kv_head * p.shape.G + g);
  }

  // i + offset - j for this thread's first query and key; |... | of accumulator element e follows from it.
  __device__ __forceinline__ float first_distance(int m) const {
    return static_cast<float>(m * kRows + 2 * static_cast<int>(threadIdx.x & 3) - key(0)) + w.rows.offset;
  }
  __device__ __forceinline__ static float distance(float first, int e) {
    return fabsf(first + float(8 * (e / 4) + (e & 1) - 4 * (e & 2)));
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
  __device__ __forceinline__ void cap_factor(int m, int panel) {
    const uint32_t at = smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 16 * (threadIdx.x & 3);
    const float to_cap = 0.69314718f / p.logit.softcap;
    const float slope = p.logit.alibi.data ? slope_of(g_now) * 1.44269504f : 0.f, first = first_distance(m);
#pragma unroll
    for (int g = 8 * panel; g < 8 * panel + 8; ++g) {
      float gauge[2], c[2];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(gauge[0]), "=f"(gauge[1]), "=f"(c[0]), "=f"(c[1])
                   : "r"(at + 64 * g));
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        float x = fmaxf(__log2f(s[e]), -126.f) + (gauge[e & 1] + fminf(c[e & 1], 1e9f));
        if (p.logit.alibi.data) x = fmaf(slope, distance(first, e), x);
        x *= to_cap;
        dp[e] *= fmaf(-x, x, 1.f);
      }
    }
  }

  __device__ __forceinline__ void start_dp(int m) {
    d_o.wait_full();
    scrub_queries(do_tile(), m);
    wgmma_fence();
    issue_scores(dp, smem + Traits::kV, do_tile());
  }

  // S^T -> P^T of tile m, its products complete.
  __device__ __forceinline__ void softmax(int m) {
    if (Traits::kExtras) transform(m);
    if (needs_mask(m)) mask(m);
    probabilities();
  }

  // dS^T = P^T (dP^T - delta), in place of dP^T, for one panel of 64 queries
  __device__ __forceinline__ void make_ds(int m, int panel) {
    const uint32_t at = smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes + 8 * (threadIdx.x & 3);
#pragma unroll
    for (int g = 8 * panel; g < 8 * panel + 8; ++g) {
      float d0, d1;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(d0), "=f"(d1) : "r"(at + 32 * g));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        dp[4 * g + 2 * r] = s[4 * g + 2 * r] * (dp[4 * g + 2 * r] - d0);
        dp[4 * g + 2 * r + 1] = s[4 * g + 2 * r + 1] * (dp[4 * g + 2 * r + 1] - d1);
      }
    }
    if (Traits::kExtras && p.logit.softcap > 0.f) cap_factor(m, panel);
  }

  // Finishes query tile m (on entry s = P^T, dp = dP^T) and brings m_next to the same point. Nothing is in
  // flight across the loop's back edge, else ptxas serialises every product (C7514). Products in order of
  // issue: dV(m), dQ(m), S(next), dP(next), dK(m); the exponentials of `next` run under the last two.
  template <bool kLast>
  __device__ __forceinline__ void step(int m, int m_next) {
#pragma unroll
    for (int panel = 0; panel < Traits::kRowPanels; ++panel) {
      uint32_t p_frag[16], ds_frag[16];
      pack_panel(p_frag, s, panel);
      pin(p_frag);
      pin(dv);
      wgmma_fence();
      issue_gradient(dv, p_frag, do_tile(), panel);
      make_ds(m, panel);
      pack_panel(ds_frag, dp, panel);
      store_ds(ds_frag, panel);
      pin(ds_frag);
      pin(dk);
      wgmma_fence();
      issue_gradient(dk, ds_frag, q_tile(), panel);
    }
    fence_async_shared();
    pair_sync_and_signal();
    float dq[32];
    wgmma_fence();
    issue_dq(dq);  // dQ = dS K
    wgmma_wait<1>();  // dV, dK are done
    pin(dv);
    pin(dk);
    d_o.release();
    d_o.advance();
    q.release();
    q.advance();
    if (kLast) {
      wgmma_wait<0>();
    } else {
      start_scores(m_next);
      wgmma_wait<1>();
    }
    pin(dq);
    store_dq(dq, m);
    ds_stage ^= 1;
    if (!kLast) {
      start_dp(m_next);
      wgmma_wait<1>();
      pin(s);
      softmax(m_next);
      wgmma_wait<0>();
      pin(dp);
    }
  }

  __device__ __forceinline__ static void pack_panel(uint32_t (&f)[16], const float (&x)[kRows / 2], int panel) {
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = pack<T>(x[32 * panel + 2 * i], x[32 * panel + 2 * i + 1]);
  }

  // dS^T to its [key][64 queries] panel: the A operand of dQ, MN-major.
  __device__ __forceinline__ void store_ds(const uint32_t (&f)[16], int panel) {
    const int lane = threadIdx.x & 31, row = 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + (lane & 15);
    const uint32_t base = smem + Traits::kDs + ds_stage * Traits::kDsBytes + panel * Traits::kDsPanel;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      stmatrix_x4(base + swizzle128(row, 2 * i + (lane >> 4)), f[4 * i], f[4 * i + 1], f[4 * i + 2], f[4 * i + 3]);
  }

  // Added to scratch straight from registers: the way through shared memory and a bulk reduction costs 512
  // clocks of shared-memory bandwidth per tile, and this kernel is bound by that.
  __device__ __forceinline__ void store_dq(const float (&dq)[32], int m) {
    if (p.semaphore) wait_turn(m);
    float* out = p.dq + (int64_t(scratch_tile(g_now, m)) * 2 + wg) * (64 * 64) + 4 * (threadIdx.x & 127);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      reduce_add_v4(out + 512 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  // deterministic: until every earlier key tile has added to query tile m. The counter is raised one tile later
  // (pair_sync_and_signal), when the additions have long been performed and the fence costs nothing.
  __device__ __forceinline__ void wait_turn(int m) {
    semaphore = p.semaphore + scratch_tile(g_now, m);
    if ((threadIdx.x & 127) == 0) {
      const int turn = w.rank(p, m);
      int seen;
      do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(semaphore) : "memory");
      while (seen != turn);
    }
    named_sync(Traits::kGroupBarrier + wg, 128);
  }

  __device__ __forceinline__ void pair_sync_and_signal() {
    if (p.semaphore) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    named_sync(Traits::kPairBarrier, 256);
    if (p.semaphore && semaphore != nullptr && wg == 0 && (threadIdx.x & 127) == 0)
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
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
      int m = w.m_start;
      start_scores(m);
      start_dp(m);
      wgmma_wait<1>();
      pin(s);
      softmax(m);
      wgmma_wait<0>();
      pin(dp);
      const int total = (w.m_end - w.m_begin) * p.shape.G;
      for (int it = 0; it + 1 < total; ++it) {
        const int next = w.next(m);
        if (next == w.m_start) ++g_next;
        step<false>(m, next);
        m = next;
        g_now = g_next;
      }
      step<true>(m, m);
    }
    epilogue();
  }

  __device__ __forceinline__ int scratch_tile(int g, int m) const {
    const int head = (w.b0 * p.shape.B1 + w.b1) * p.shape.Hq + w.kv_head * p.shape.G + g;
    return head * p.q_tiles + m;
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
    pair_sync_and_signal();  // the other warpgroup's dQ product reads all of k
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
