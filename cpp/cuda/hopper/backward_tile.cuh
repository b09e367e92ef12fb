// One warpgroup's share of a backward tile in transposed form: 64 keys on the M dimension, kRows
// queries on N. S^T = K Q^T and dP^T = V dO^T come out so that P^T and dS^T are register A operands
// of dV += P^T dO and dK += dS^T Q.
#pragma once

#include "backward_work.cuh"
#include "bias.cuh"
#include "device/wgmma.cuh"

namespace jft::hopper {

template <class Traits>
struct TransposedTile {
  using T = typename Traits::T;
  static constexpr int kRows = Traits::kRows, kDim = Traits::kDim;

  const BackwardParams& p;
  const BackwardWork<Traits>& w;
  uint32_t smem;
  int wg;   // 0 or 1, warp-uniform
  int own;  // first of this warpgroup's 64 keys in the CTA's tile
  Ring<Traits::kStages> q, d_o;
  const TileInfo* infos;      // general: of the Q stages
  float factor;               // plain: power of two per unit of S; general: logit per unit
  int m_now, m_next;          // query tile in work, and the one whose S^T is made
  int g_now = 0, g_next = 0;  // their query heads in the group
  int mixed_next = 0;

  uint32_t visible[2];  // of the mask, for m_next
  KeyBias bias;
  float s[kRows / 2], dp[kRows / 2];  // S^T, then P^T; dP^T, then dS^T

  __device__ __forceinline__ TransposedTile(const BackwardParams& p_,
                                            const BackwardWork<Traits>& w_, const TileInfo* infos_,
                                            uint32_t smem_, int wg_, int own_)
      : p(p_),
        w(w_),
        smem(smem_),
        wg(wg_),
        own(own_),
        q(smem_ + Traits::kQFull, smem_ + Traits::kQEmpty),
        d_o(smem_ + Traits::kDOFull, smem_ + Traits::kDOEmpty),
        infos(infos_),
        factor(!Traits::kGeneral  ? p_.logit.scale_log2
               : p_.logit.natural ? 1.f
                                  : p_.logit.scale),
        m_now(w_.m_start),
        m_next(w_.m_start) {}

  __device__ __forceinline__ int key(int r) const {
    return w.k0 + own + 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2) + 8 * r;
  }

  // C^T[64 keys, kRows] = A[64 keys, kDim] B[kRows, kDim]^T, for K Q^T and V dO^T
  __device__ __forceinline__ void issue_scores(float (&c)[kRows / 2], uint32_t a_tile,
                                               uint32_t b_tile) {
    const uint64_t a = descriptor_k_major(a_tile + own * 128), b = descriptor_k_major(b_tile);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<kRows>::template ss<T, 0, 0>(
          c, descriptor_advance(a, k_major_step(i, Traits::kKvPanel)),
          descriptor_advance(b, k_major_step(i, Traits::kQPanel)), i > 0);
    wgmma_commit();
  }

  // acc[64 keys, kDim] += A[64 keys, queries] B[queries, kDim] for panels of 64 queries from
  // `panel` on: dV += P^T dO and dK += dS^T Q, A from registers.
  template <int kFragments>
  __device__ __forceinline__ void issue_gradient(float (&acc)[kDim / 2],
                                                 const uint32_t (&a)[kFragments], uint32_t tile,
                                                 int panel) {
    const uint64_t b = descriptor_mn_major(tile + panel * 64 * 128, Traits::kQPanel);
#pragma unroll
    for (int i = 0; i < kFragments / 4; ++i)
      Wgmma<kDim>::template rs<T, 1>(acc, a + 4 * i, descriptor_advance(b, i * kMnMajorStep), 1);
    wgmma_commit();
  }

  __device__ __forceinline__ uint32_t q_tile() const {
    return smem + Traits::kQ + q.stage * Traits::kQBytes;
  }
  __device__ __forceinline__ uint32_t do_tile() const {
    return smem + Traits::kDO + d_o.stage * Traits::kQBytes;
  }

  // Rows that see no key may hold NaN. General: found by their marks, `marks` + 4 * row (c or
  // delta).
  struct LiveRows {
    int begin, end;
    uint32_t marks;
    int stride;  // bytes per pair of rows

    __device__ __forceinline__ bool has(int i) const {
      if (!Traits::kGeneral) return i >= begin && i < end;
      float x0, x1;
      load_shared(marks + (i >> 1) * stride, x0, x1);
      return !(((i & 1) ? x1 : x0) >= kDeadDelta);
    }
  };

  __device__ __forceinline__ void scrub_queries(uint32_t tile, int m, uint32_t marks, int stride) {
    const LiveRows live{w.row_begin, w.row_end, marks, stride};
    if (Traits::kGeneral) {
      bool alive = true;
#pragma unroll
      for (int n = 0; n < kRows; n += 32) alive = alive && live.has(n + (threadIdx.x & 31));
      if (__all_sync(0xffffffffu, alive)) return;
      scrub_rows<kRows, Traits::kPanels, 128>(tile, 0, live);
    } else {
      const int q0 = m * kRows;
      if (q0 >= w.row_begin && q0 + kRows <= w.row_end) return;
      scrub_rows<kRows, Traits::kPanels, 128>(tile, q0, live);
    }
    named_sync(Traits::kGroupBarrier + wg, 128);
  }
  __device__ __forceinline__ void scrub_q(int m) {
    scrub_queries(q_tile(), m, smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 8, 16);
  }
  __device__ __forceinline__ void scrub_do(int m) {
    scrub_queries(do_tile(), m, smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes, 8);
  }

  // S^T of m_next, which the general road learns here.
  __device__ __forceinline__ void start_scores() {
    q.wait_full();
    if (Traits::kGeneral) {
      const TileInfo tile = infos[q.stage];
      m_next = tile.index;
      g_next = tile.flags / kTileHead;
      mixed_next = tile.flags & kTileMixed;
    }
    scrub_q(m_next);
    wgmma_fence();
    issue_scores(s, smem + Traits::kK, q_tile());
  }
  // Plain: the tile after m_now is the next one.
  __device__ __forceinline__ void look_ahead() {
    if (Traits::kGeneral) return;
    m_next = w.next(m_now);
    if (m_next == w.m_start) ++g_next;
  }
  __device__ __forceinline__ void move_on() {
    m_now = m_next;
    g_now = g_next;
  }

  // Loads this thread's part of m_next's mask and bias, while products run; tiles of 128 queries
  // leave no registers for the bias.
  static constexpr bool kEarlyBias = kRows == 64;
  __device__ __forceinline__ void prefetch() {
    if (!Traits::kGeneral) return;
    if (mixed_next && p.hidden.bits.data) {
      const int line[2] = {key(0), key(1)};
      load_visible(visible, p.hidden, w.b0, w.b1, w.kv_head * p.shape.G + g_next, line, p.shape.Sk,
                   m_next);
    }
    if (Traits::kBias && kEarlyBias) bias.start(p.logit.bias, bias_place(0), p.shape);
  }
  __device__ __forceinline__ BiasPlace bias_place(int panel) const {
    return {p.logit.bias,
            w.b0,
            w.b1,
            w.kv_head * p.shape.G + g_next,
            key(0),
            key(1),
            m_next * kRows + 64 * panel};
  }

  // Logits in natural units (softcap, bias and alibi).
  __device__ __forceinline__ void transform(int m) {
    if (!p.logit.natural) return;
    if (p.logit.softcap > 0.f) apply_softcap(s, p.logit);
    float scale = p.logit.softcap > 0.f ? 1.f : p.logit.scale;
    if (Traits::kBias) {
#pragma unroll
      for (int panel = 0; panel < kRows / 64; ++panel) {
        if (!kEarlyBias) bias.start(p.logit.bias, bias_place(panel), p.shape);
        bias.add(s, 32 * panel, scale, p.logit.bias, bias_place(panel), p.shape);
      }
      scale = 1.f;
    }
    if (!p.logit.alibi.data) return;
    const float slope = slope_of(g_next);
    const float first = first_distance(m);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) s[i] = fmaf(-slope, distance(first, i), s[i] * scale);
  }

  __device__ __forceinline__ float slope_of(int g) const {
    return *p.logit.alibi.at(w.b0, w.b1, w.kv_head * p.shape.G + g);
  }

  // i + offset - j for this thread's first query and key; |... | of accumulator element e follows
  // from it.
  __device__ __forceinline__ float first_distance(int m) const {
    return static_cast<float>(m * kRows + 2 * static_cast<int>(threadIdx.x & 3) - key(0)) +
           w.rows.offset;
  }
  __device__ __forceinline__ static float distance(float first, int e) {
    return fabsf(first + float(8 * (e / 4) + (e & 1) - 4 * (e & 2)));
  }

  __device__ __forceinline__ bool needs_mask(int m) const {
    const int first = m * kRows, last = first + kRows - 1;
    if (Traits::kBias && last >= w.q_length) return true;  // the bias of empty rows may be NaN
    return w.k0 < w.rows.begin(last) || w.k0 + Traits::kKeys > w.rows.end(first);
  }

  // Key j sees queries i with begin(i) <= j < end(i): an interval of i.
  __device__ __forceinline__ void mask(int m) {
    const int q0 = m * kRows + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = key(r);
      const int lo = j < w.rows.kv_length ? j - w.rows.shift_end + 1 - q0 : kRows;
      int hi = j - w.rows.shift_begin - q0;  // inclusive
      if (Traits::kBias) hi = min(hi, w.q_length - 1 - q0);
#pragma unroll
      for (int g = 0; g < kRows / 8; ++g)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * g + c < lo || 8 * g + c > hi) s[4 * g + 2 * r + c] = -INFINITY;
    }
  }

  // Mask and segment ids.
  __device__ __forceinline__ void hide(int m) {
    const int line[2] = {key(0), key(1)};
    if (p.hidden.bits.data) hide_masked(s, visible);
    if (p.hidden.line_ids.data)
      hide_other_segments(s, p.hidden, w.b0, w.b1, line, p.shape.Sk, m * kRows, p.shape.Sq);
  }

  // P^T = exp2((S^T factor - g) - c). Two subtractions: L in one number loses ln l when |L| is
  // large.
  __device__ __forceinline__ float probability(float x, float gauge, float c) const {
    const float above = fmaf(x, factor, -gauge);
    return exp2_fast(Traits::kGeneral ? fmaf(above, 1.4426950408889634f, -c) : above - c);
  }
  __device__ __forceinline__ void probabilities() {
    const uint32_t at =
        smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 16 * (threadIdx.x & 3);
#pragma unroll
    for (int g = 0; g < kRows / 8; ++g) {
      float g0, g1, c0, c1;
      load_shared(at + 64 * g, g0, g1, c0, c1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[4 * g + 2 * r] = probability(s[4 * g + 2 * r], g0, c0);
        s[4 * g + 2 * r + 1] = probability(s[4 * g + 2 * r + 1], g1, c1);
      }
    }
  }

  // 1 - (capped / cap)^2, the capped logit recovered from P: ln P + L (+ alibi). P = 0 gives a
  // finite factor.
  __device__ __forceinline__ void cap_factor(int m, int panel) {
    const uint32_t at =
        smem + Traits::kGauge + q.stage * Traits::kGaugeBytes + 16 * (threadIdx.x & 3);
    const float slope = p.logit.alibi.data ? slope_of(g_now) : 0.f, first = first_distance(m);
#pragma unroll
    for (int g = 8 * panel; g < 8 * panel + 8; ++g) {
      float gauge[2], c[2];
      load_shared(at + 64 * g, gauge[0], gauge[1], c[0], c[1]);
#pragma unroll
      for (int e = 4 * g; e < 4 * g + 4; ++e) {
        float x =
            fmaf(fmaxf(__log2f(s[e]), -126.f) + fminf(c[e & 1], 1e9f), 0.69314718f, gauge[e & 1]);
        if (p.logit.alibi.data) x = fmaf(slope, distance(first, e), x);
        x *= p.logit.inverse_softcap;
        dp[e] *= fmaf(-x, x, 1.f);
      }
    }
  }

  __device__ __forceinline__ void start_dp(int m) {
    d_o.wait_full();
    scrub_do(m);
    wgmma_fence();
    issue_scores(dp, smem + Traits::kV, do_tile());
  }

  // S^T -> P^T of tile m, its products complete.
  __device__ __forceinline__ void softmax(int m) {
    if (Traits::kGeneral) transform(m);
    if (needs_mask(m)) mask(m);
    if (Traits::kGeneral && mixed_next) hide(m);
    probabilities();
  }

  // dS^T = P^T (dP^T - delta), in place of dP^T, for one panel of 64 queries
  __device__ __forceinline__ void make_ds(int m, int panel) {
    const uint32_t at =
        smem + Traits::kDelta + d_o.stage * Traits::kDeltaBytes + 8 * (threadIdx.x & 3);
#pragma unroll
    for (int g = 8 * panel; g < 8 * panel + 8; ++g) {
      float d0, d1;
      load_shared(at + 32 * g, d0, d1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        dp[4 * g + 2 * r] = s[4 * g + 2 * r] * (dp[4 * g + 2 * r] - d0);
        dp[4 * g + 2 * r + 1] = s[4 * g + 2 * r + 1] * (dp[4 * g + 2 * r + 1] - d1);
      }
    }
    if (Traits::kGeneral && p.logit.softcap > 0.f) cap_factor(m, panel);
  }

  __device__ __forceinline__ static void pack_panel(uint32_t* f, const float (&x)[kRows / 2],
                                                    int panel) {
#pragma unroll
    for (int i = 0; i < 16; ++i) f[i] = pack<T>(x[32 * panel + 2 * i], x[32 * panel + 2 * i + 1]);
  }
};

}  // namespace jft::hopper
