// dbias [1 or B, 1 or H, Sq, Sk] = dS summed over the batch elements and heads that share it.
//
// A CTA owns a tile of 128 queries (64 per warpgroup) x kKeys keys of dbias and walks the batch
// elements and heads that are summed into it: S = Q K^T and dP = dO V^T once more, dS added in
// registers in a fixed order, every element written once. No scratch of the size of dS, no atomics.
// The ring carries two pairs per step: Q with K, then dO with V.
#pragma once

#include "../../core/attrs.h"
#include "backward_params.h"
#include "backward_query_tile.cuh"
#include "device/mbarrier.cuh"
#include "device/sync.cuh"
#include "pipeline.cuh"

namespace jft::hopper {

struct BiasGradientParams {
  TileMap q, k, v, d_o;
  const float *gauge, *delta;  // as in BackwardParams
  int rows_pitch;              // rows of gauge and delta per head
  Shape shape;
  PositionArgs positions;
  LogitArgs logit;
  Hidden hidden;  // lines are queries
  BiasArgs out;   // strides of 0: summed
  int q_tiles, k_tiles;
};

// One step of the walk, made by the producer.
struct BiasStep {
  ForwardWork work;
  TileInfo tile;  // index -1: the walk is over
};

template <class T_, int kDim_>
struct BiasGradientTraits {
  using T = T_;
  static constexpr int kDim = kDim_;
  static constexpr bool kGeneral = true, kBias = true, kEarlyBias = true;
  static constexpr int kRows = kBiasRows, kKeys = bias_keys(kDim);
  static constexpr int kStages = kDim <= 64 ? 4 : kDim <= 192 ? 3 : 2;
  static constexpr int kThreads = 384, kConsumers = 2, kPanels = panels(kDim);
  static constexpr uint32_t kQPanel = kRows * 128, kKvPanel = kKeys * 128;
  static constexpr uint32_t kQBytes = kQPanel * kPanels, kKvBytes = kKvPanel * kPanels;
  static constexpr uint32_t kPairBytes = kQBytes + kKvBytes;
  // A step's description is read until its logits are made: while the ring already holds up to two
  // later ones.
  static constexpr int kSteps = 3;

  static constexpr uint32_t kFull = kStages * kPairBytes, kEmpty = kFull + 8 * kStages;
  static constexpr uint32_t kStep = (kEmpty + 8 * kStages + 15) / 16 * 16;
  static constexpr uint32_t kSharedBytes = kStep + kSteps * sizeof(BiasStep) + 1024;
  static_assert(kSharedBytes <= kSharedLimit, "dbias tile does not fit shared memory");

  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

// The tile of dbias that a CTA owns; b0, b1 and h are 0 where they are summed.
struct BiasTile {
  int j, q0, h, b0, b1;

  template <class Traits>
  __device__ __forceinline__ static BiasTile of(const BiasGradientParams& p) {
    BiasTile t;
    int rest = blockIdx.x;
    t.j = rest % p.k_tiles;
    rest /= p.k_tiles;
    t.q0 = rest % p.q_tiles * Traits::kRows;
    rest /= p.q_tiles;
    const int heads = p.out.head ? p.shape.Hq : 1, n1 = p.out.b1 ? p.shape.B1 : 1;
    t.h = rest % heads;
    rest /= heads;
    t.b1 = rest % n1;
    t.b0 = rest / n1;
    return t;
  }
};

template <class Traits>
__device__ __forceinline__ void bias_gradient_producer(const BiasGradientParams& p, BiasStep* steps,
                                                       uint32_t smem) {
  tma_prefetch_map(&p.q.map);
  tma_prefetch_map(&p.k.map);
  tma_prefetch_map(&p.d_o.map);
  tma_prefetch_map(&p.v.map);
  const BiasTile own = BiasTile::of<Traits>(p);
  Ring<Traits::kStages> ring(smem + Traits::kFull, smem + Traits::kEmpty);
  const auto load_pair = [&](const TileMap& rows, const TileMap& keys, int h, int b0, int b1) {
    ring.expect(Traits::kPairBytes);
    const uint32_t at = smem + ring.stage * Traits::kPairBytes;
    load_tile<Traits::kPanels, Traits::kQPanel>(at, rows, ring.full_barrier(), own.q0, h, b0, b1);
    load_tile<Traits::kPanels, Traits::kKvPanel>(at + Traits::kQBytes, keys, ring.full_barrier(),
                                                 own.j * Traits::kKeys, h / p.shape.G, b0, b1);
    ring.advance();
  };
  const int last0 = p.out.b0 ? own.b0 + 1 : p.shape.B0, last1 = p.out.b1 ? own.b1 + 1 : p.shape.B1;
  const int last_head = p.out.head ? own.h + 1 : p.shape.Hq;
  int n = 0;
  ring.wait_empty();
  for (int b0 = own.b0; b0 < last0; ++b0)
    for (int b1 = own.b1; b1 < last1; ++b1)
      for (int h = own.h; h < last_head; ++h) {
        BiasStep& step = steps[n];
        fill_work<Traits>(step.work, p, b0, b1, h, own.q0);
        const MapRow map(p.hidden, b0, b1, h, own.q0 / Traits::kRows);
        if (own.j < step.work.n_begin || own.j >= step.work.n_end ||
            map.next(own.j, own.j + 1) != own.j)
          continue;
        step.tile = describe_keys<Traits>(p, step.work, map, own.j);
        load_pair(p.q, p.k, h, b0, b1);
        ring.wait_empty();
        load_pair(p.d_o, p.v, h, b0, b1);
        n = n + 1 == Traits::kSteps ? 0 : n + 1;
        ring.wait_empty();
      }
  steps[n].tile.index = -1;
  mbarrier_arrive(ring.full_barrier());
}

template <class Traits>
struct BiasGradientConsumer : QueryTile<Traits, BiasGradientParams> {
  using Base = QueryTile<Traits, BiasGradientParams>;
  using Base::c, Base::delta, Base::dp, Base::is_dead, Base::issue_scores, Base::load_facts,
      Base::make_logits, Base::p, Base::prefetch, Base::probability, Base::row, Base::s, Base::tile,
      Base::w, Base::wg;
  static constexpr int kKeys = Traits::kKeys;

  uint32_t smem;
  Ring<Traits::kStages> ring;
  float sum[kKeys / 2];  // of dS

  __device__ __forceinline__ BiasGradientConsumer(const BiasGradientParams& p_, uint32_t smem_,
                                                  int wg_)
      : Base(p_, nullptr, wg_), smem(smem_), ring(smem_ + Traits::kFull, smem_ + Traits::kEmpty) {}

  __device__ __forceinline__ void issue_pair(float (&to)[kKeys / 2]) {
    const uint32_t at = smem + ring.stage * Traits::kPairBytes;
    wgmma_fence();
    issue_scores(to, at, at + Traits::kQBytes);
  }

  __device__ __forceinline__ void run(const BiasStep* steps) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) sum[i] = 0.f;
    for (int n = 0;; n = n + 1 == Traits::kSteps ? 0 : n + 1) {
      ring.wait_full();
      tile = steps[n].tile;
      if (__shfl_sync(0xffffffffu, tile.index, 0) < 0) break;
      w = &steps[n].work;
      issue_pair(s);
      const Ring<Traits::kStages> scores = ring;
      ring.advance();
      ring.wait_full();
      issue_pair(dp);
      load_facts();
      prefetch();
      wgmma_wait<1>();
      pin(s);
      scores.release();
      make_logits();
      wgmma_wait<0>();
      pin(dp);
      ring.release();
      ring.advance();
      // Select: products of dead rows and hidden keys may be NaN.
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int r = (i >> 1) & 1;
        const float x = probability(i);
        sum[i] += x == 0.f || is_dead(r) ? 0.f : x * (dp[i] - delta[r]);
      }
    }
    store();
  }

  __device__ __forceinline__ void store() {
    const BiasTile own = BiasTile::of<Traits>(p);
    const int64_t head = own.b0 * p.out.b0 + own.b1 * p.out.b1 + own.h * p.out.head;
    const int first = own.j * kKeys, t = threadIdx.x & 3;
    const int row0 = own.q0 + 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + ((threadIdx.x & 31) >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row0 + 8 * r;
      const int64_t line = head + i * p.out.row;
      if (p.out.chunks) {
#pragma unroll
        for (int n = 0; n < kKeys / 32; ++n) {
          uint32_t v[4];  // columns 2 t and 2 t + 1 of four groups of 8, then one whole group
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            const float* pair = sum + 4 * (4 * n + x) + 2 * r;
            v[x] = p.out.kind == kBiasF16 ? pack<__half>(pair[0], pair[1])
                                          : pack<__nv_bfloat16>(pair[0], pair[1]);
          }
          exchange_words(v);
          const int column = first + 32 * n + 8 * t;
          if (i < p.shape.Sq && column < p.shape.Sk)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(p.out.data)) + line +
                                      column) = {v[0], v[1], v[2], v[3]};
        }
      } else if (i < p.shape.Sq) {
#pragma unroll
        for (int g = 0; g < kKeys / 8; ++g)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = first + 8 * g + 2 * t + e;
            if (column < p.shape.Sk) put(line + column, sum[4 * g + 2 * r + e]);
          }
      }
    }
  }

  __device__ __forceinline__ void put(int64_t at, float x) const {
    void* data = const_cast<void*>(p.out.data);
    if (p.out.kind == kBiasF32)
      static_cast<float*>(data)[at] = x;
    else
      static_cast<uint16_t*>(data)[at] = static_cast<uint16_t>(
          p.out.kind == kBiasF16 ? pack<__half>(x, 0.f) : pack<__nv_bfloat16>(x, 0.f));
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BiasGradientParams p) {
  uint8_t* raw = dynamic_shared();
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;
  auto* steps = reinterpret_cast<BiasStep*>(raw + (base - shared_address(raw)) + Traits::kStep);
  if (threadIdx.x == 0) {
    init_ring(base + Traits::kFull, base + Traits::kEmpty, Traits::kStages, 4 * Traits::kConsumers);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int group = warpgroup_index();
  if (group == 0) {
    give_registers<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) bias_gradient_producer<Traits>(p, steps, base);
  } else {
    take_registers<Traits::kConsumerRegisters>();
    BiasGradientConsumer<Traits> consumer(p, base, group - 1);
    consumer.run(steps);
  }
}

}  // namespace jft::hopper
