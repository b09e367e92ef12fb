// Forward pass: o = softmax(logits) v, and per row the maximum m and ln sum exp(s - m).
//
// One persistent CTA per SM: a producer thread feeds K and V tiles through the copy engine,
// consumer warpgroups own 64 query rows each. Per key tile j (descending):
//     S(j) = Q K(j)^T            issued together with   O += P(j+1) V(j+1)
//     softmax of S(j) runs under the products of the other warpgroups (named barriers keep the
//     turn)
// The plain road splits the loop where masks end: tiles that every row sees in full take a body
// without them. On the general road (softcap, bias, alibi, mask, segment ids) the producer walks
// the tiles that are not hidden and describes each to the consumers.
#pragma once

#include "../../core/attrs.h"
#include "bias.cuh"
#include "device/fragment.cuh"
#include "device/mbarrier.cuh"
#include "device/sync.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "forward_work.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "schedule.cuh"
#include "tile_ops.cuh"
#include "tiles.h"

namespace jft::hopper {

struct ForwardParams {
  TileMap q, k, v, o;
  Strided<float> row_max, row_log_sum;  // head, row strides set
  Shape shape;
  PositionArgs positions;
  LogitArgs logit;
  Hidden hidden;
  Schedule schedule;
};

template <class T_, class Tile, Road kRoad>
struct ForwardTraits {
  using T = T_;
  static constexpr int kDim = Tile::kDim;  // D and Dv, rounded up; the copy engine fills with zeros
  static constexpr bool kGeneral = kRoad != Road::kPlain, kBias = kRoad == Road::kBias;
  static constexpr int kConsumers = Tile::kConsumers, kKeys = Tile::kKeys, kStages = Tile::kStages;
  static constexpr bool kAliasO = Tile::kAliasO;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kPanels = panels(kDim);
  static constexpr uint32_t kQPanel = kRows * 128, kKvPanel = kKeys * 128, kOPanel = 64 * 128;
  static constexpr uint32_t kQBytes = kQPanel * kPanels, kKvBytes = kKvPanel * kPanels;
  // setmaxnreg only moves registers inside what the block got at launch: 65536 / kThreads, rounded
  // down to a multiple of 8, for each of its threads. Asking for more waits forever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  // Shared memory, from a 1024-byte aligned base: q, (o), k stages, v stages, barriers.
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kO = kAliasO ? 0 : kQBytes;
  static constexpr uint32_t kK = kO + kQBytes;
  static constexpr uint32_t kV = kK + kStages * kKvBytes;
  static constexpr uint32_t kBarriers = kV + kStages * kKvBytes;
  static constexpr uint32_t kQFull = kBarriers, kQEmpty = kQFull + 8;
  static constexpr uint32_t kKFull = kQEmpty + 8, kKEmpty = kKFull + 8 * kStages;
  static constexpr uint32_t kVFull = kKEmpty + 8 * kStages, kVEmpty = kVFull + 8 * kStages;
  static constexpr uint32_t kWorkFull = kVEmpty + 8 * kStages, kWorkEmpty = kWorkFull + 16;
  static constexpr uint32_t kWork = kWorkEmpty + 16;
  static constexpr uint32_t kInfo = kWork + 2 * kWorkBytes;  // a TileInfo per K stage
  static constexpr uint32_t kSharedBytes =
      kInfo + kStages * sizeof(TileInfo) + 1024;  // 1024: alignment by hand
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    (kConsumers + 1) * kLaunchRegisters,
                "setmaxnreg would wait forever");
  static_assert(kSharedBytes <= kSharedLimit, "forward tile does not fit shared memory");
  static_assert(kKvPanel % 1024 == 0 && kQPanel % 1024 == 0,
                "swizzled panels need 1024-byte alignment");

  // Named barriers: 1.. inside a warpgroup, 5.. turn of a warpgroup at the tensor cores.
  static constexpr int kGroupBarrier = 1, kTurnBarrier = 5;
};

// ---- Scheduler: one thread ----

template <class Traits>
__device__ __forceinline__ void forward_scheduler(const ForwardParams& p, uint32_t smem,
                                                  ForwardWork* slots) {
  Ring<2> slot(smem + Traits::kWorkFull, smem + Traits::kWorkEmpty);
  for (int t = blockIdx.x;; t = next_tile(p.schedule, t)) {
    slot.wait_empty();
    const bool valid = t < p.schedule.total;
    if (valid)
      make_work<Traits>(slots[slot.stage], p, t);
    else
      slots[slot.stage].valid = 0;
    mbarrier_arrive(slot.full_barrier());
    if (!valid) return;
    slot.advance();
  }
}

// ---- Producer: one thread ----

template <class Traits>
__device__ __forceinline__ void forward_producer(const ForwardParams& p, uint32_t smem,
                                                 const ForwardWork* slots, TileInfo* infos) {
  tma_prefetch_map(&p.q.map);
  tma_prefetch_map(&p.k.map);
  tma_prefetch_map(&p.v.map);
  tma_prefetch_map(&p.o.map);
  Ring<Traits::kStages> k(smem + Traits::kKFull, smem + Traits::kKEmpty);
  Ring<Traits::kStages> v(smem + Traits::kVFull, smem + Traits::kVEmpty);
  Ring<1> q(smem + Traits::kQFull, smem + Traits::kQEmpty);
  Ring<2> slot(smem + Traits::kWorkFull, smem + Traits::kWorkEmpty);
  while (true) {
    slot.wait_full();
    const ForwardWork& w = slots[slot.stage];
    if (!w.valid) return;
    const int q0 = w.q0, h = w.h, b0 = w.b0, b1 = w.b1, n_begin = w.n_begin, n_end = w.n_end;
    const MapRow map(p.hidden, b0, b1, h, q0 / Traits::kRows);

    const int kv_head = h / p.shape.G;
    auto load_k = [&](int j) {
      TileInfo tile;
      if (Traits::kGeneral) tile = describe_keys<Traits>(p, w, map, j);  // while it would only wait
      k.wait_empty();
      if (Traits::kGeneral) infos[k.stage] = tile;
      k.expect(Traits::kKvBytes);
      load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kK + k.stage * Traits::kKvBytes,
                                                   p.k, k.full_barrier(), j * Traits::kKeys,
                                                   kv_head, b0, b1);
      k.advance();
    };
    auto load_v = [&](int j) {
      v.wait_empty();
      v.expect(Traits::kKvBytes);
      load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kV + v.stage * Traits::kKvBytes,
                                                   p.v, v.full_barrier(), j * Traits::kKeys,
                                                   kv_head, b0, b1);
      v.advance();
    };
    const bool any = n_begin < n_end;
    if (any) load_k(n_end - 1);
    if (any || Traits::kAliasO) {  // with kAliasO the q buffer also carries the o of an empty tile
      q.wait_empty();
      q.expect(Traits::kQBytes);
      load_tile<Traits::kPanels, Traits::kQPanel>(smem + Traits::kQ, p.q, q.full_barrier(), q0, h,
                                                  b0, b1);
      q.advance();
    }
    if (any) {
      int last = n_end - 1;
      for (int j = last - 1; j >= n_begin; --j) {
        if (Traits::kGeneral) j = map.previous(j, n_begin);  // n_begin is visible
        load_k(j);
        load_v(last);
        last = j;
      }
      load_v(n_begin);
    }
    mbarrier_arrive(slot.empty + 8 * slot.stage);
    slot.advance();
  }
}

// ---- Consumer: one warpgroup, 64 query rows ----

template <class Traits>
struct ForwardConsumer {
  using T = typename Traits::T;
  static constexpr int kKeys = Traits::kKeys, kDim = Traits::kDim;
  static constexpr float kNegInf = -INFINITY;

  const ForwardParams& p;
  const TileInfo* infos;  // general: of the K stages
  uint32_t smem;
  int wg;  // 0 .. kConsumers - 1, warp-uniform
  Ring<Traits::kStages> k, v;
  Ring<1> q;

  float o[kDim / 2];         // O, unnormalised
  uint32_t prob[kKeys / 4];  // P of the previous tile, A fragments
  float m[2], l[2];          // running maximum (units of S), this thread's share of the sum
  // The general road has no registers to keep facts of the work: it reads them where it needs them.
  int begin[2], end[2];  // plain: visible keys of this thread's two rows
  LiveKeys live;         // plain
  TileInfo previous;     // general: the tile of `prob`
  float factor;          // power of two per unit of S

  __device__ __forceinline__ ForwardConsumer(const ForwardParams& p_, const TileInfo* infos_,
                                             uint32_t smem_, int wg_)
      : p(p_),
        infos(infos_),
        smem(smem_),
        wg(wg_),
        k(smem_ + Traits::kKFull, smem_ + Traits::kKEmpty),
        v(smem_ + Traits::kVFull, smem_ + Traits::kVEmpty),
        q(smem_ + Traits::kQFull, smem_ + Traits::kQEmpty) {}

  __device__ __forceinline__ int row_in_tile(int r) const {
    return 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2) + 8 * r;
  }

  // S = Q K^T
  __device__ __forceinline__ void issue_scores(float (&s)[kKeys / 2]) {
    const uint64_t a = descriptor_k_major(smem + Traits::kQ + wg * 64 * 128);
    const uint64_t b = descriptor_k_major(smem + Traits::kK + k.stage * Traits::kKvBytes);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      Wgmma<kKeys>::template ss<T, 0, 0>(s, descriptor_advance(a, k_major_step(i, Traits::kQPanel)),
                                         descriptor_advance(b, k_major_step(i, Traits::kKvPanel)),
                                         i > 0);
    wgmma_commit();
  }

  // O += P V
  __device__ __forceinline__ void issue_output() {
    const uint64_t b =
        descriptor_mn_major(smem + Traits::kV + v.stage * Traits::kKvBytes, Traits::kKvPanel);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)
      Wgmma<kDim>::template rs<T, 1>(o, prob + 4 * i, descriptor_advance(b, i * kMnMajorStep), 1);
    wgmma_commit();
  }

  // Rows of V that no query may see are in bounds and may hold NaN; 0 * NaN is NaN.
  __device__ __forceinline__ void scrub_v(const ForwardWork& w, int j) {
    const int k0 = j * kKeys;
    if (Traits::kGeneral ? !(previous.flags & kTileDead)
                         : k0 >= live.begin && k0 + kKeys <= live.end)
      return;
    if (Traits::kGeneral)
      live = {w.live_begin, w.live_end, live_words(p.hidden, w.b0, w.b1, w.h / p.shape.G)};
    scrub_rows<kKeys, Traits::kPanels, 128>(smem + Traits::kV + v.stage * Traits::kKvBytes, k0,
                                            live);
    named_sync(Traits::kGroupBarrier + wg, 128);
  }

  __device__ __forceinline__ bool is_natural() const { return Traits::kGeneral && p.logit.natural; }

  // Loads this thread's part of the bias; beyond head size 128 registers are too few to do so
  // before the products end.
  static constexpr bool kEarlyBias = kDim <= 128;
  __device__ __forceinline__ BiasPlace bias_place(const ForwardWork& w, int j) const {
    return {p.logit.bias, w.b0, w.b1, w.h, w.q0 + row_in_tile(0), w.q0 + row_in_tile(1), j * kKeys};
  }

  // softcap, bias and alibi: S becomes the logit in natural units.
  __device__ __forceinline__ void transform(float (&s)[kKeys / 2], QueryBias<kKeys>& bias,
                                            const ForwardWork& w, int j) {
    if (!p.logit.natural) return;
    if (p.logit.softcap > 0.f) apply_softcap(s, p.logit);
    float scale = p.logit.softcap > 0.f ? 1.f : p.logit.scale;
    if (Traits::kBias) {
      if (!kEarlyBias) bias.start(p.logit.bias, bias_place(w, j), p.shape);
      bias.add(s, scale, p.logit.bias, bias_place(w, j), p.shape);
      scale = 1.f;
    }
    if (!p.logit.alibi.data) return;
    const float slope = *p.logit.alibi.at(w.b0, w.b1, w.h);
    const float k0 = static_cast<float>(j * kKeys + 2 * (threadIdx.x & 3));
    const float to0 = static_cast<float>(w.q0 + row_in_tile(0)) + w.rows.offset - k0,
                to1 = static_cast<float>(w.q0 + row_in_tile(1)) + w.rows.offset -
                      k0;  // distance to this thread's first key
    // Off the diagonal the penalty is linear in the key: two FMAs per logit.
    const float sign = to0 >= kKeys ? 1.f : (to1 <= 0.f ? -1.f : 0.f);
    if (__all_sync(0xffffffffu, sign != 0.f)) {
      const float step = slope * sign, base0 = -step * to0, base1 = -step * to1;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        s[i] = fmaf(s[i], scale, fmaf(step, float(8 * (i / 4) + (i & 1)), (i & 2) ? base1 : base0));
    } else {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i)
        s[i] =
            fmaf(-slope, fabsf(((i & 2) ? to1 : to0) - float(8 * (i / 4) + (i & 1))), s[i] * scale);
    }
  }

  // Rows past q_length are discarded in the epilogue.
  __device__ __forceinline__ void find_span(const ForwardWork& w, int r) {
    const int i = w.q0 + row_in_tile(r);
    begin[r] = w.rows.begin(i);
    end[r] = w.rows.end(i);
  }

  __device__ __forceinline__ void mask(float (&s)[kKeys / 2], const ForwardWork& w, int j) {
    const int k0 = j * kKeys + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (Traits::kGeneral) find_span(w, r);
      const int lo = begin[r] - k0, hi = end[r] - k0;
#pragma unroll
      for (int g = 0; g < kKeys / 8; ++g)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (8 * g + c < lo || 8 * g + c >= hi) s[4 * g + 2 * r + c] = kNegInf;
    }
  }

  // General: mask and segment ids. `visible`: of the mask, loaded while the products ran.
  __device__ __forceinline__ void load_bits(uint32_t (&visible)[2], const ForwardWork& w,
                                            const TileInfo& tile) const {
    if (!(tile.flags & kTileMixed) || p.hidden.bits.data == nullptr) return;
    const int line[2] = {w.q0 + row_in_tile(0), w.q0 + row_in_tile(1)};
    load_visible(visible, p.hidden, w.b0, w.b1, w.h, line, p.shape.Sq, tile.index);
  }
  __device__ __forceinline__ void hide(float (&s)[kKeys / 2], const uint32_t (&visible)[2],
                                       const ForwardWork& w, const TileInfo& tile) const {
    if (!(tile.flags & kTileMixed)) return;
    if (p.hidden.bits.data) hide_masked(s, visible);
    if (p.hidden.line_ids.data == nullptr) return;
    const int line[2] = {w.q0 + row_in_tile(0), w.q0 + row_in_tile(1)};
    hide_other_segments(s, p.hidden, w.b0, w.b1, line, p.shape.Sq, tile.index * kKeys, p.shape.Sk);
  }

  // S -> P (still f32, in s), new maximum and sum; alpha = factor for what was summed before.
  // The gauge m * factor is rounded once, so that P, alpha and the residual all use the same
  // number.
  template <bool kEdge>
  __device__ __forceinline__ void softmax(float (&s)[kKeys / 2], float (&alpha)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = m[r];
#pragma unroll
      for (int g = 0; g < kKeys / 8; ++g)
        top = fmaxf(top, fmaxf(s[4 * g + 2 * r], s[4 * g + 2 * r + 1]));
      top = quad_max(top);
      // Bias: the maximum is subtracted before the change of base; finfo.min * log2 e overflows.
      const float old_gauge = Traits::kBias ? m[r] : __fmul_rn(m[r], factor);
      const float gauge =
          kEdge && top == kNegInf ? 0.f : (Traits::kBias ? top : __fmul_rn(top, factor));
      const float change = __fadd_rn(old_gauge, -gauge);
      alpha[r] = exp2_fast(Traits::kBias ? __fmul_rn(change, factor) : change);
      m[r] = top;
      float sum0 = 0.f, sum1 = 0.f;
#pragma unroll
      for (int g = 0; g < kKeys / 8; ++g) {
        float& x0 = s[4 * g + 2 * r];
        float& x1 = s[4 * g + 2 * r + 1];
        x0 = exp2_fast(Traits::kBias ? __fmul_rn(__fadd_rn(x0, -gauge), factor)
                                     : fmaf(x0, factor, -gauge));
        x1 = exp2_fast(Traits::kBias ? __fmul_rn(__fadd_rn(x1, -gauge), factor)
                                     : fmaf(x1, factor, -gauge));
        sum0 += x0;
        sum1 += x1;
      }
      l[r] = fmaf(l[r], alpha[r], sum0 + sum1);
    }
  }

  __device__ __forceinline__ void rescale(const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] *= alpha[(i >> 1) & 1];
  }

  // One key tile; general: the next one of the producer's walk, the returned one. kEdge: this tile
  // may need masks, or the previous one a scrub.
  template <bool kEdge>
  __device__ __forceinline__ int step(const ForwardWork& w, int j, bool needs_mask) {
    float s[kKeys / 2], alpha[2];
    uint32_t visible[2];
    QueryBias<kKeys> bias;
    TileInfo tile;
    k.wait_full();
    if (Traits::kGeneral) {
      tile = infos[k.stage];
      j = tile.index;
      needs_mask = tile.flags & kTileEdge;
    }
    named_sync(Traits::kTurnBarrier + wg, 256);
    wgmma_fence();
    issue_scores(s);
    v.wait_full();
    if (kEdge) scrub_v(w, Traits::kGeneral ? previous.index : j + 1);
    pin(prob);
    pin(o);
    wgmma_fence();
    issue_output();
    named_arrive(Traits::kTurnBarrier + (wg + 1 == Traits::kConsumers ? 0 : wg + 1), 256);
    if (Traits::kGeneral) load_bits(visible, w, tile);
    if (Traits::kBias && kEarlyBias) bias.start(p.logit.bias, bias_place(w, j), p.shape);
    wgmma_wait<1>();
    pin(s);
    k.release();
    k.advance();
    if (Traits::kGeneral) transform(s, bias, w, j);
    if (kEdge && needs_mask) mask(s, w, j);
    if (Traits::kGeneral) hide(s, visible, w, tile);
    softmax<kEdge>(s, alpha);
    wgmma_wait<0>();
    pin(o);
    v.release();
    v.advance();
    pack_fragments<T>(prob, s);
    rescale(alpha);
    if (Traits::kGeneral) previous = tile;
    return j;
  }

  __device__ __forceinline__ void run_tile(const ForwardWork& w) {
    const int n_begin = w.n_begin, n_end = w.n_end;
    const int full_begin = w.full_begin, full_end = w.full_end;
    if (!Traits::kGeneral) live = {w.live_begin, w.live_end, nullptr};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!Traits::kGeneral) find_span(w, r);
      m[r] = kNegInf;
      l[r] = 0.f;
    }
    factor = is_natural() ? 1.4426950408889634f : p.logit.scale_log2;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.f;

    if (n_begin < n_end) {
      int j = n_end - 1;
      {  // first tile: scores only
        float s[kKeys / 2], alpha[2];
        uint32_t visible[2];
        QueryBias<kKeys> bias;
        q.wait_full();
        k.wait_full();
        if (Traits::kGeneral) previous = infos[k.stage];
        wgmma_fence();
        issue_scores(s);
        if (Traits::kGeneral) load_bits(visible, w, previous);
        if (Traits::kBias && kEarlyBias) bias.start(p.logit.bias, bias_place(w, j), p.shape);
        wgmma_wait<0>();
        pin(s);
        k.release();
        k.advance();
        if (Traits::kGeneral) transform(s, bias, w, j);
        if (j >= full_end || j < full_begin) mask(s, w, j);
        if (Traits::kGeneral) hide(s, visible, w, previous);
        softmax<true>(s, alpha);
        pack_fragments<T>(prob, s);
      }
      if constexpr (Traits::kGeneral) {
        while (j != n_begin) j = step<true>(w, 0, false);
      } else {
        --j;
        // Edge steps on the right (one more than masked, for the scrub of the tile before), plain,
        // left.
        for (; j >= n_begin && j >= full_end - 1; --j)
          step<true>(w, j, j >= full_end || j < full_begin);
        for (; j >= n_begin && j >= full_begin; --j) step<false>(w, j, false);
        for (; j >= n_begin; --j) step<true>(w, j, true);
      }
      if (!Traits::kAliasO) q.release();
      v.wait_full();
      scrub_v(w, n_begin);
      pin(prob);
      pin(o);
      wgmma_fence();
      issue_output();
      wgmma_wait<0>();
      pin(o);
      v.release();
      v.advance();
    } else if (Traits::kAliasO) {
      q.wait_full();
    }
    epilogue(w);
    if (Traits::kAliasO) q.release();
    if (Traits::kAliasO || n_begin < n_end) q.advance();
  }

  // o = O / l, m and ln l in natural units; empty rows by selection.
  __device__ __forceinline__ void epilogue(const ForwardWork& w) {
    const bool leader = (threadIdx.x & 127) == 0;
    const int barrier = Traits::kGroupBarrier + wg;
    if (!Traits::kAliasO) {  // the store of the previous tile must have left the o buffer
      if (leader) bulk_wait_read<0>();
      named_sync(barrier, 128);
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = w.q0 + row_in_tile(r);
      const float sum = quad_sum(l[r]);
      const bool empty = !(sum > 0.f || sum != sum) || i >= w.q_length;
      // ln of the gauge, exactly as softmax() used it
      const double gauge =
          Traits::kBias ? double(m[r]) : double(__fmul_rn(m[r], factor)) * 0.69314718055994530942;
      float row_max = is_natural() ? m[r] : m[r] * p.logit.scale;
      float row_log_sum = logf(sum) + static_cast<float>(gauge - double(row_max));
      inverse[r] = 1.f / sum;
      if (p.logit.sinks.data) {
        const float sink = *p.logit.sinks.at(w.b0, w.b1, w.h);
        if (sink > kNegInf) {
          row_max = empty ? sink : fmaxf(row_max, sink);
          const float rest = empty ? 0.f : expf(static_cast<float>(gauge - double(row_max)));
          const float total = (empty ? 0.f : rest * sum) + expf(sink - row_max);
          row_log_sum = logf(total);
          inverse[r] = rest / total;
        } else if (empty) {
          row_max = 0.f;
          row_log_sum = static_cast<float>(kEmptyRow);
        }
      } else if (empty) {
        row_max = 0.f;
        row_log_sum = static_cast<float>(kEmptyRow);
      }
      if (empty) {
        inverse[r] = 0.f;
#pragma unroll
        for (int c = 0; c < kDim / 4; ++c) o[4 * (c / 2) + 2 * r + (c & 1)] = 0.f;
      }
      if ((threadIdx.x & 3) == 0 && i < p.shape.Sq) {
        p.row_max.at(w.b0, w.b1, w.h)[i * p.row_max.row] = row_max;
        p.row_log_sum.at(w.b0, w.b1, w.h)[i * p.row_log_sum.row] = row_log_sum;
      }
    }
    const uint32_t buffer = smem + (Traits::kAliasO ? Traits::kQ + wg * Traits::kOPanel
                                                    : Traits::kO + wg * Traits::kOPanel);
    store_fragments<T, kDim>(buffer, Traits::kQPanel, o, inverse[0], inverse[1]);
    fence_async_shared();
    named_sync(barrier, 128);
    if (leader) {
      const int row = w.q0 + 64 * wg;
      if (row < p.shape.Sq) {
#pragma unroll
        for (int panel = 0; panel < Traits::kPanels; ++panel)
          tma_store(&p.o.map, buffer + panel * Traits::kQPanel, panel * kPanel, row, w.h,
                    w.b1 * p.o.has_b1, w.b0 * p.o.has_b0);
      }
      bulk_commit();
      if (Traits::kAliasO) bulk_wait_read<0>();
    }
    if (Traits::kAliasO) named_sync(barrier, 128);
  }
};

// ---- Kernel ----

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  uint8_t* raw = dynamic_shared();
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  uint8_t* aligned = raw + (base - shared_address(raw));
  auto* slots = reinterpret_cast<ForwardWork*>(aligned + Traits::kWork);
  auto* infos = reinterpret_cast<TileInfo*>(aligned + Traits::kInfo);

  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kConsumers;
    init_ring(base + Traits::kQFull, base + Traits::kQEmpty, 1, kWarps);
    init_ring(base + Traits::kKFull, base + Traits::kKEmpty, Traits::kStages, kWarps);
    init_ring(base + Traits::kVFull, base + Traits::kVEmpty, Traits::kStages, kWarps);
    // Consumers and the producer.
    init_ring(base + Traits::kWorkFull, base + Traits::kWorkEmpty, 2, kWarps + 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  const int group = warpgroup_index();
  if (group == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0)
      forward_producer<Traits>(p, base, slots, infos);
    else if (threadIdx.x == 32)
      forward_scheduler<Traits>(p, base, slots);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    const int wg = group - 1;
    ForwardConsumer<Traits> consumer(p, infos, base, wg);
    // The first turn is warpgroup 0's: the last one in the circle hands it over.
    if (wg == Traits::kConsumers - 1) named_arrive(Traits::kTurnBarrier, 256);
    Ring<2> slot(base + Traits::kWorkFull, base + Traits::kWorkEmpty);
    while (true) {
      slot.wait_full();
      const ForwardWork& w = slots[slot.stage];
      if (__shfl_sync(0xffffffffu, w.valid, 0) == 0) break;
      consumer.run_tile(w);
      slot.release();
      slot.advance();
    }
    if ((threadIdx.x & 127) == 0) bulk_wait<0>();
  }
}

}  // namespace jft::hopper
