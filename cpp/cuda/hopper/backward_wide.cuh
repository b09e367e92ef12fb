// Backward pass for head sizes beyond 128, as two kernels: the accumulators of dk, dv and dq do not
// fit one CTA. 7 products instead of 5, but no atomics and no f32 scratch: every result is written
// once, in a fixed order.
//
// Keys (dk, dv): a CTA owns 64 keys and walks tiles of 64 queries. One warpgroup makes dV, the
// other dK, each with 64 x kDim accumulators:
//     0:  S^T  = K Q^T     P^T = exp2((S^T factor - g) - c), handed over   dV += P^T dO
//     1:  dP^T = V dO^T    dS^T = P^T (dP^T - delta)                       dK += dS^T Q
// They run staggered by the handover, so that one computes while the other's products run.
//
// Queries (dq): a CTA owns 128 queries (64 per warpgroup) and walks tiles of 64 keys:
//     S = Q K^T, dP = dO V^T, dS = P (dP - delta), dQ += dS K; dS never leaves the registers.
#pragma once

#include "backward_query_tile.cuh"
#include "backward_tile.cuh"

namespace jft::hopper {

// ---- dk, dv ----

template <class T_, int kDim_, Road kRoad>
struct KeyGradientTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kRoad != Road::kPlain, kBias = kRoad == Road::kBias;
  static constexpr int kRows = WideTile::kRows, kKeys = WideTile::kKeys, kStages = 2;
  static constexpr int kThreads = 384, kConsumers = 2;
  static constexpr int kPanels = panels(kDim), kRowPanels = 1;

  static constexpr uint32_t kKvPanel = kKeys * 128, kQPanel = kRows * 128;
  static constexpr uint32_t kKvBytes = kKvPanel * kPanels, kQBytes = kQPanel * kPanels;
  static constexpr uint32_t kPBytes = kRows * kKeys * 4;  // P^T in f32, fragment order
  static constexpr uint32_t kGaugeBytes = kRows * 8, kDeltaBytes = kRows * 4;

  static constexpr uint32_t kK = 0, kV = kK + kKvBytes, kQ = kV + kKvBytes;
  static constexpr uint32_t kDO = kQ + kStages * kQBytes, kP = kDO + kStages * kQBytes;
  static constexpr uint32_t kGauge = kP + 2 * kPBytes, kDelta = kGauge + kStages * kGaugeBytes;
  static constexpr uint32_t kKvFull = kDelta + kStages * kDeltaBytes;
  static constexpr uint32_t kQFull = kKvFull + 8, kQEmpty = kQFull + 8 * kStages;
  static constexpr uint32_t kDOFull = kQEmpty + 8 * kStages, kDOEmpty = kDOFull + 8 * kStages;
  static constexpr uint32_t kInfo = kDOEmpty + 8 * kStages;  // a TileInfo per Q stage
  static constexpr uint32_t kWork = kInfo + kStages * sizeof(TileInfo);
  static constexpr uint32_t kSharedBytes = kWork + kWorkBytes + 1024;
  static_assert(kSharedBytes <= kSharedLimit, "dk, dv tile does not fit shared memory");

  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  // Named barriers: a warpgroup; P^T buffer written; P^T buffer free.
  static constexpr int kGroupBarrier = 1, kFullBarrier = 3, kFreeBarrier = 5;
};

template <class Traits>
struct KeyGradientConsumer : TransposedTile<Traits> {
  using Base = TransposedTile<Traits>;
  using T = typename Traits::T;
  using Base::d_o, Base::do_tile, Base::dp, Base::g_now, Base::infos, Base::issue_gradient,
      Base::key, Base::look_ahead, Base::prefetch, Base::m_next, Base::m_now, Base::make_ds,
      Base::move_on, Base::p, Base::q, Base::q_tile, Base::s, Base::scrub_do, Base::scrub_q,
      Base::smem, Base::softmax, Base::start_dp, Base::start_scores, Base::w, Base::wg;
  static constexpr int kDim = Traits::kDim;

  int turn = 0;         // P^T buffer of the tile in work
  float acc[kDim / 2];  // 64 keys x kDim: dV (warpgroup 0) or dK (warpgroup 1)

  __device__ __forceinline__ KeyGradientConsumer(const BackwardParams& p_,
                                                 const BackwardWork<Traits>& w_,
                                                 const TileInfo* infos_, uint32_t smem_, int wg_)
      : Base(p_, w_, infos_, smem_, wg_, 0) {}

  __device__ __forceinline__ uint32_t exchange() const {
    return smem + Traits::kP + turn * Traits::kPBytes + 16 * (threadIdx.x & 127);
  }

  // dV, query tile m_now; its S^T is complete. Nothing is in flight across the loop's back edge.
  template <bool kLast>
  __device__ __forceinline__ void value_step() {
    softmax(m_now);
    q.release();
    q.advance();
    named_sync(Traits::kFreeBarrier + turn, 256);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_shared(exchange() + 2048 * i, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    named_arrive(Traits::kFullBarrier + turn, 256);
    turn ^= 1;
    uint32_t fragment[16];
    pack_fragments<T>(fragment, s);
    d_o.wait_full();
    scrub_do(m_now);
    pin(fragment);
    pin(acc);
    wgmma_fence();
    issue_gradient(acc, fragment, do_tile(), 0);
    if (!kLast) {
      start_scores();
      prefetch();
    }
    wgmma_wait<0>();
    pin(acc);
    if (!kLast) pin(s);
    d_o.release();
    d_o.advance();
  }

  // dK, query tile m_now; its dP^T is complete.
  template <bool kLast>
  __device__ __forceinline__ void key_step() {
    q.wait_full();
    if (Traits::kGeneral) {  // this warpgroup makes no S^T: it learns of its tile here
      m_now = infos[q.stage].index;
      g_now = infos[q.stage].flags / kTileHead;
    }
    scrub_q(m_now);
    named_sync(Traits::kFullBarrier + turn, 256);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      load_shared(exchange() + 2048 * i, s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    named_arrive(Traits::kFreeBarrier + turn, 256);
    turn ^= 1;
    make_ds(m_now, 0);
    d_o.release();
    d_o.advance();
    uint32_t fragment[16];
    pack_fragments<T>(fragment, dp);
    pin(fragment);
    pin(acc);
    wgmma_fence();
    issue_gradient(acc, fragment, q_tile(), 0);
    if (!kLast) start_dp(m_next);
    wgmma_wait<0>();
    pin(acc);
    if (!kLast) pin(dp);
    q.release();
    q.advance();
  }

  // Walks the query tiles of all heads of the group.
  template <bool kValue>
  __device__ __forceinline__ void walk() {
    if (kValue) {
      start_scores();
      move_on();
      prefetch();
      wgmma_wait<0>();
      pin(s);
    } else {
      named_arrive(Traits::kFreeBarrier, 256);
      named_arrive(Traits::kFreeBarrier + 1, 256);
      start_dp(m_now);
      wgmma_wait<0>();
      pin(dp);
    }
    for (int it = w.total - 1; it > 0; --it) {
      look_ahead();
      if (kValue)
        value_step<false>();
      else
        key_step<false>();
      move_on();
    }
    if (kValue)
      value_step<true>();
    else
      key_step<true>();
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i] = 0.f;
    if (w.total > 0) {
      mbarrier_wait(smem + Traits::kKvFull, 0);
      if (wg == 0)
        walk<true>();
      else
        walk<false>();
    }
    epilogue();
  }

  // To 16 bits through the buffer that only this warpgroup read: K's for dV, V's for dK. Dead keys
  // by selection: their rows of K and V may hold NaN.
  __device__ __forceinline__ void epilogue() {
    const LiveKeys live = w.live(p);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (!live.has(key(r))) {
#pragma unroll
        for (int c = 0; c < kDim / 4; ++c) acc[4 * (c / 2) + 2 * r + (c & 1)] = 0.f;
      }
    const float scale = wg == 0 ? 1.f : p.logit.scale;
    const uint32_t buffer = smem + (wg == 0 ? Traits::kK : Traits::kV);
    store_fragments<T, kDim>(buffer, Traits::kKvPanel, acc, scale, scale);
    fence_async_shared();
    named_sync(Traits::kGroupBarrier + wg, 128);
    if ((threadIdx.x & 127) == 0) {
      const TileMap& out = wg == 0 ? p.dv : p.dk;
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel)
        tma_store(&out.map, buffer + panel * Traits::kKvPanel, panel * kPanel, w.k0, w.kv_head,
                  w.b1 * out.has_b1, w.b0 * out.has_b0);
      bulk_commit();
      bulk_wait<0>();
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    key_gradient_kernel(const __grid_constant__ BackwardParams p) {
  uint8_t* raw = dynamic_shared();
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  uint8_t* aligned = raw + (base - shared_address(raw));
  auto& work = *reinterpret_cast<BackwardWork<Traits>*>(aligned + Traits::kWork);
  auto* infos = reinterpret_cast<TileInfo*>(aligned + Traits::kInfo);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kConsumers;
    mbarrier_init(base + Traits::kKvFull, 1);
    init_ring(base + Traits::kQFull, base + Traits::kQEmpty, Traits::kStages, kWarps);
    init_ring(base + Traits::kDOFull, base + Traits::kDOEmpty, Traits::kStages, kWarps);
    mbarrier_init_fence();
  }
  if (threadIdx.x == 32) work.make(p);
  __syncthreads();
  const int group = warpgroup_index();
  if (group == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) backward_producer<Traits>(p, work, infos, base);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    KeyGradientConsumer<Traits> consumer(p, work, infos, base, group - 1);
    consumer.run();
  }
}

// ---- dq ----

struct QueryGradientParams {
  TileMap q, k, v, d_o, dq;
  const float *gauge, *delta;  // as in BackwardParams
  int rows_pitch;              // rows of gauge and delta per head
  Shape shape;
  PositionArgs positions;
  LogitArgs logit;
  Hidden hidden;  // lines are queries
  Schedule schedule;
};

template <class T_, int kDim_, Road kRoad>
struct QueryGradientTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = kRoad != Road::kPlain, kBias = kRoad == Road::kBias;
  static constexpr bool kEarlyBias = kDim <= 192;
  static constexpr int kRows = WideTile::kQueryRows, kKeys = WideTile::kKeys;
  static constexpr int kKStages = 2, kVStages = kDim > 192 ? 1 : 2;
  static constexpr int kThreads = 384, kConsumers = 2;
  static constexpr int kPanels = panels(kDim);
  static constexpr uint32_t kQPanel = kRows * 128, kKvPanel = kKeys * 128;
  static constexpr uint32_t kQBytes = kQPanel * kPanels, kKvBytes = kKvPanel * kPanels;

  static constexpr uint32_t kQ = 0, kDO = kQ + kQBytes, kK = kDO + kQBytes;
  static constexpr uint32_t kV = kK + kKStages * kKvBytes;
  static constexpr uint32_t kQFull = kV + kVStages * kKvBytes, kDOFull = kQFull + 8;
  static constexpr uint32_t kKFull = kDOFull + 8, kKEmpty = kKFull + 8 * kKStages;
  static constexpr uint32_t kVFull = kKEmpty + 8 * kKStages, kVEmpty = kVFull + 8 * kVStages;
  static constexpr uint32_t kInfo = kVEmpty + 8 * kVStages;  // a TileInfo per K stage
  static constexpr uint32_t kWork = kInfo + kKStages * sizeof(TileInfo);
  static constexpr uint32_t kSharedBytes = kWork + kWorkBytes + 1024;
  static_assert(kSharedBytes <= kSharedLimit, "dq tile does not fit shared memory");

  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kGroupBarrier = 1;
};

template <class Traits>
__device__ __forceinline__ void query_gradient_producer(const QueryGradientParams& p,
                                                        const ForwardWork& w, TileInfo* infos,
                                                        uint32_t smem) {
  tma_prefetch_map(&p.q.map);
  tma_prefetch_map(&p.k.map);
  tma_prefetch_map(&p.d_o.map);
  tma_prefetch_map(&p.v.map);
  if (w.n_begin >= w.n_end) return;
  Ring<Traits::kKStages> k(smem + Traits::kKFull, smem + Traits::kKEmpty);
  Ring<Traits::kVStages> v(smem + Traits::kVFull, smem + Traits::kVEmpty);
  const int kv_head = w.h / p.shape.G;
  auto load_own = [&](const TileMap& map, uint32_t tile, uint32_t bar) {
    mbarrier_arrive_expect(bar, Traits::kQBytes);
    load_tile<Traits::kPanels, Traits::kQPanel>(tile, map, bar, w.q0, w.h, w.b0, w.b1);
  };
  const MapRow map(p.hidden, w.b0, w.b1, w.h, w.q0 / Traits::kRows);
  const auto visible = [&](int j) { return Traits::kGeneral ? map.next(j, w.n_end) : j; };
  for (int j = w.n_begin; j < w.n_end; j = visible(j + 1)) {
    TileInfo tile;
    if (Traits::kGeneral) tile = describe_keys<Traits>(p, w, map, j);  // while it would only wait
    k.wait_empty();
    if (Traits::kGeneral) infos[k.stage] = tile;
    k.expect(Traits::kKvBytes);
    load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kK + k.stage * Traits::kKvBytes,
                                                 p.k, k.full_barrier(), j * Traits::kKeys, kv_head,
                                                 w.b0, w.b1);
    k.advance();
    if (j == w.n_begin) {  // in the order of use
      load_own(p.q, smem + Traits::kQ, smem + Traits::kQFull);
      load_own(p.d_o, smem + Traits::kDO, smem + Traits::kDOFull);
    }
    v.wait_empty();
    v.expect(Traits::kKvBytes);
    load_tile<Traits::kPanels, Traits::kKvPanel>(smem + Traits::kV + v.stage * Traits::kKvBytes,
                                                 p.v, v.full_barrier(), j * Traits::kKeys, kv_head,
                                                 w.b0, w.b1);
    v.advance();
  }
}

template <class Traits>
struct QueryGradientConsumer : QueryTile<Traits, QueryGradientParams> {
  using Base = QueryTile<Traits, QueryGradientParams>;
  using T = typename Traits::T;
  using Base::dp, Base::is_dead, Base::issue_scores, Base::load_facts, Base::make_ds, Base::p,
      Base::prefetch, Base::s, Base::tile, Base::w, Base::wg;
  static constexpr int kDim = Traits::kDim, kKeys = Traits::kKeys;

  const TileInfo* infos;  // general: of the K stages
  uint32_t smem;
  // k_next runs one tile ahead: S of tile j + 1 is issued before K of tile j is released.
  Ring<Traits::kKStages> k, k_next;
  Ring<Traits::kVStages> v;
  float dq[kDim / 2];  // 64 queries x kDim

  __device__ __forceinline__ QueryGradientConsumer(const QueryGradientParams& p_,
                                                   const ForwardWork& w_, const TileInfo* infos_,
                                                   uint32_t smem_, int wg_)
      : Base(p_, &w_, wg_),
        infos(infos_),
        smem(smem_),
        k(smem_ + Traits::kKFull, smem_ + Traits::kKEmpty),
        k_next(smem_ + Traits::kKFull, smem_ + Traits::kKEmpty),
        v(smem_ + Traits::kVFull, smem_ + Traits::kVEmpty) {}

  // Dead keys may hold NaN, and a factor of 0 does not remove it from a product.
  __device__ __forceinline__ void scrub_keys(uint32_t buffer) {
    const int k0 = tile.index * kKeys;
    const LiveKeys live{
        w->live_begin, w->live_end,
        Traits::kGeneral ? live_words(p.hidden, w->b0, w->b1, w->h / p.shape.G) : nullptr};
    if (Traits::kGeneral ? !(tile.flags & kTileDead) : live.template has_all<kKeys>(k0)) return;
    scrub_rows<kKeys, Traits::kPanels, 128>(buffer, k0, live);
    named_sync(Traits::kGroupBarrier + wg, 128);
  }

  // S = Q K^T and dP = dO V^T of the next tile; plain: of tile j
  __device__ __forceinline__ void start(int j) {
    const uint32_t k_tile = smem + Traits::kK + k_next.stage * Traits::kKvBytes;
    const uint32_t v_tile = smem + Traits::kV + v.stage * Traits::kKvBytes;
    k_next.wait_full();
    tile = Traits::kGeneral ? infos[k_next.stage] : TileInfo{j, 0};
    scrub_keys(k_tile);
    wgmma_fence();
    issue_scores(s, smem + Traits::kQ, k_tile);
    k_next.advance();
    v.wait_full();
    scrub_keys(v_tile);
    wgmma_fence();
    issue_scores(dp, smem + Traits::kDO, v_tile);
    prefetch();
  }

  // The tile whose S and dP are complete. Nothing is in flight across the loop's back edge.
  template <bool kLast>
  __device__ __forceinline__ void step() {
    v.release();
    v.advance();
    make_ds();
    uint32_t fragment[kKeys / 4];
    pack_fragments<T>(fragment, dp);
    pin(fragment);
    pin(dq);
    wgmma_fence();
    const uint64_t b =
        descriptor_mn_major(smem + Traits::kK + k.stage * Traits::kKvBytes, Traits::kKvPanel);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i)  // dQ += dS K
      Wgmma<kDim>::template rs<T, 1>(dq, fragment + 4 * i, descriptor_advance(b, i * kMnMajorStep),
                                     1);
    wgmma_commit();
    if (kLast) {
      wgmma_wait<0>();
      pin(dq);
      k.release();
    } else {
      start(tile.index + 1);
      wgmma_wait<2>();
      pin(dq);
      k.release();
      k.advance();
      wgmma_wait<0>();
      pin(s);
      pin(dp);
    }
  }

  __device__ __forceinline__ void run() {
    load_facts();
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dq[i] = 0.f;
    if (w->n_begin < w->n_end) {
      mbarrier_wait(smem + Traits::kQFull, 0);
      mbarrier_wait(smem + Traits::kDOFull, 0);
      start(w->n_begin);
      wgmma_wait<0>();
      pin(s);
      pin(dp);
      while (tile.index + 1 < w->n_end) step<false>();  // the last tile is visible
      step<true>();
    }
    epilogue();
  }

  // dq * scale to 16 bits through this warpgroup's rows of the q buffer; dead rows by selection.
  __device__ __forceinline__ void epilogue() {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (is_dead(r)) {
#pragma unroll
        for (int x = 0; x < kDim / 4; ++x) dq[4 * (x / 2) + 2 * r + (x & 1)] = 0.f;
      }
    const uint32_t buffer = smem + Traits::kQ + wg * 64 * 128;
    store_fragments<T, kDim>(buffer, Traits::kQPanel, dq, p.logit.scale, p.logit.scale);
    fence_async_shared();
    named_sync(Traits::kGroupBarrier + wg, 128);
    const int first = w->q0 + 64 * wg;
    if ((threadIdx.x & 127) == 0 && first < p.shape.Sq) {
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel)
        tma_store(&p.dq.map, buffer + panel * Traits::kQPanel, panel * kPanel, first, w->h,
                  w->b1 * p.dq.has_b1, w->b0 * p.dq.has_b0);
      bulk_commit();
      bulk_wait<0>();
    }
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    query_gradient_kernel(const __grid_constant__ QueryGradientParams p) {
  uint8_t* raw = dynamic_shared();
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  uint8_t* aligned = raw + (base - shared_address(raw));
  auto& work = *reinterpret_cast<ForwardWork*>(aligned + Traits::kWork);
  auto* infos = reinterpret_cast<TileInfo*>(aligned + Traits::kInfo);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kConsumers;
    mbarrier_init(base + Traits::kQFull, 1);
    mbarrier_init(base + Traits::kDOFull, 1);
    init_ring(base + Traits::kKFull, base + Traits::kKEmpty, Traits::kKStages, kWarps);
    init_ring(base + Traits::kVFull, base + Traits::kVEmpty, Traits::kVStages, kWarps);
    mbarrier_init_fence();
  }
  if (threadIdx.x == 32) make_work<Traits>(work, p, static_cast<int>(blockIdx.x));
  __syncthreads();
  const int group = warpgroup_index();
  if (group == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) query_gradient_producer<Traits>(p, work, infos, base);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    QueryGradientConsumer<Traits> consumer(p, work, infos, base, group - 1);
    consumer.run();
  }
}

}  // namespace jft::hopper
