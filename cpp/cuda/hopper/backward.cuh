// Backward pass, main kernel: dk, dv in registers, dq added up in f32 scratch.
//
// A CTA owns kKeys = 128 keys of one kv head (64 per consumer warpgroup; K, V resident) and walks
// the query tiles of all G query heads. Everything is transposed, keys on the M dimension, so that
// P^T and dS^T come out as register A operands:
//     S^T  = K Q^T            P^T = exp2((S^T factor - g) - c)    g, c: per query (pre-pass)
//     dP^T = V dO^T           dV += P^T dO
//     dS^T = P^T (dP^T - delta)
//     dK  += dS^T Q           issued before the barrier behind which both warpgroups' dS is visible
//     dQ   = dS K             each warpgroup a 64 x 64 part; added to scratch in fragment order
#pragma once

#include "backward_tile.cuh"

namespace jft::hopper {

// ---- Consumer: one warpgroup, 64 keys ----

template <class Traits>
struct BackwardConsumer : TransposedTile<Traits> {
  using Base = TransposedTile<Traits>;
  using T = typename Traits::T;
  using Base::d_o, Base::do_tile, Base::dp, Base::g_now, Base::issue_gradient, Base::key,
      Base::look_ahead, Base::prefetch, Base::m_next, Base::m_now, Base::make_ds, Base::move_on,
      Base::p, Base::pack_panel, Base::q, Base::q_tile, Base::s, Base::smem, Base::softmax,
      Base::start_dp, Base::start_scores, Base::w, Base::wg;
  static constexpr int kRows = Traits::kRows, kDim = Traits::kDim;

  int ds_stage = 0;
  int* semaphore = nullptr;  // deterministic: counter of the query tile that dQ was last added to
  float dk[kDim / 2], dv[kDim / 2];  // 64 keys x kDim

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p_,
                                              const BackwardWork<Traits>& w_,
                                              const TileInfo* infos_, uint32_t smem_, int wg_)
      : Base(p_, w_, infos_, smem_, wg_, 64 * wg_) {}

  // dQ part of this warpgroup = dS[64 queries, 128 keys] K[128 keys, 64 columns]. Two panels of
  // queries (D 64): one each; two panels of columns (D 128): one each.
  __device__ __forceinline__ void issue_dq(float (&dq)[32]) {
    const uint32_t ds = smem + Traits::kDs + ds_stage * Traits::kDsBytes;
    const uint64_t a =
        descriptor_mn_major(ds + (Traits::kRowPanels == 2 ? wg * Traits::kDsPanel : 0), 0);
    const uint64_t b = descriptor_mn_major(
        smem + Traits::kK + (Traits::kPanels == 2 ? wg * Traits::kKvPanel : 0), 0);
#pragma unroll
    for (int i = 0; i < Traits::kKeys / 16; ++i)
      Wgmma<64>::template ss<T, 1, 1>(dq, descriptor_advance(a, i * kMnMajorStep),
                                      descriptor_advance(b, i * kMnMajorStep), i > 0);
    wgmma_commit();
  }

  // Plain loop: query tile m_now (on entry its S^T is complete). Nothing may be in flight across
  // the loop's back edge, else ptxas serialises every product (C7514). Products in order of issue:
  // dP, dV, dK, dQ of m_now, S of m_next.
  template <bool kLast>
  __device__ __forceinline__ void plain_step() {
    const int m = m_now;
    // dV starts before dP is awaited where registers allow P^T twice, in f32 and packed.
    constexpr bool kEarlyDv = kRows == 64;
    uint32_t p_frag[kRows / 4], ds_frag[kRows / 4];
    start_dp(m);
    softmax(m);
    if (kEarlyDv) {
      pack_fragments<T>(p_frag, s);
      pin(p_frag);
      pin(dv);
      wgmma_fence();
      issue_gradient(dv, p_frag, do_tile(), 0);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    pin(dp);
#pragma unroll
    for (int panel = 0; panel < Traits::kRowPanels; ++panel) make_ds(m, panel);
    if (!kEarlyDv) pack_fragments<T>(p_frag, s);
    pack_fragments<T>(ds_frag, dp);
    if (!kEarlyDv) {
      pin(p_frag);
      pin(dv);
      wgmma_fence();
      issue_gradient(dv, p_frag, do_tile(), 0);
    }
#pragma unroll
    for (int panel = 0; panel < Traits::kRowPanels; ++panel) store_ds(ds_frag + 16 * panel, panel);
    pin(ds_frag);
    pin(dk);
    wgmma_fence();
    issue_gradient(dk, ds_frag, q_tile(), 0);
    fence_async_shared();
    wgmma_wait<1>();  // dV is done: frees its operand's registers; dK still runs
    d_o.release();
    d_o.advance();
    if ((threadIdx.x & 127) == 0) bulk_wait_read<0>();  // this warpgroup's dQ buffer is free again
    named_sync(Traits::kPairBarrier, 256);
    float dq[32];
    wgmma_fence();
    issue_dq(dq);
    if (kLast) {
      wgmma_wait<0>();
    } else {
      wgmma_wait<1>();  // dK is done
      pin(dk);
      q.release();
      q.advance();
      start_scores();
      wgmma_wait<1>();
    }
    pin(dq);
    ds_stage ^= 1;
    bulk_dq(dq, m);
    if (!kLast) {
      wgmma_wait<0>();
      pin(s);
    }
  }

  // Rotated loop: finishes query tile m_now (on entry s = P^T, dp = dP^T) and brings m_next to the
  // same point. Products in order of issue: dV, dK, dQ of m_now, S and dP of m_next.
  template <bool kLast>
  __device__ __forceinline__ void rotated_step() {
    const int m = m_now;
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
    issue_dq(dq);     // dQ = dS K
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
      start_scores();
      wgmma_wait<1>();
    }
    pin(dq);
    reduce_dq(dq, m);
    ds_stage ^= 1;
    if (!kLast) {
      prefetch();
      start_dp(m_next);
      wgmma_wait<1>();
      pin(s);
      softmax(m_next);
      wgmma_wait<0>();
      pin(dp);
    }
  }

  // dS^T to its [key][64 queries] panel: the A operand of dQ, MN-major.
  __device__ __forceinline__ void store_ds(const uint32_t* f, int panel) {
    const int lane = threadIdx.x & 31, row = 64 * wg + 16 * ((threadIdx.x >> 5) & 3) + (lane & 15);
    const uint32_t base =
        smem + Traits::kDs + ds_stage * Traits::kDsBytes + panel * Traits::kDsPanel;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      stmatrix_x4(base + swizzle128(row, 2 * i + (lane >> 4)), f[4 * i], f[4 * i + 1], f[4 * i + 2],
                  f[4 * i + 3]);
  }

  // dQ to scratch through shared memory and a bulk reduction.
  __device__ __forceinline__ void bulk_dq(const float (&dq)[32], int m) {
    const uint32_t buffer = smem + Traits::kDq + wg * Traits::kDqBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_shared(buffer + (i * 128 + (threadIdx.x & 127)) * 16, dq[4 * i], dq[4 * i + 1],
                   dq[4 * i + 2], dq[4 * i + 3]);
    fence_async_shared();
    named_sync(Traits::kGroupBarrier + wg, 128);
    if ((threadIdx.x & 127) == 0) {
      bulk_reduce_add_f32(p.dq + (int64_t(scratch_tile(g_now, m)) * 2 + wg) * (64 * 64), buffer,
                          Traits::kDqBytes);
      bulk_commit();
    }
  }

  // dQ to scratch straight from registers (unlike bulk_dq complete after a fence).
  __device__ __forceinline__ void reduce_dq(const float (&dq)[32], int m) {
    if (Traits::kOrdered) wait_turn(m);
    float* out =
        p.dq + (int64_t(scratch_tile(g_now, m)) * 2 + wg) * (64 * 64) + 4 * (threadIdx.x & 127);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      reduce_add_v4(out + 512 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
  }

  // deterministic: until every earlier key tile has added to query tile m. The counter is raised
  // one tile later (pair_sync_and_signal), when the additions have long been performed and the
  // fence costs nothing.
  __device__ __forceinline__ void wait_turn(int m) {
    semaphore = p.semaphore + scratch_tile(g_now, m);
    if ((threadIdx.x & 127) == 0) wait_for_count(semaphore, w.rank(p, m));
    named_sync(Traits::kGroupBarrier + wg, 128);
  }

  __device__ __forceinline__ void pair_sync_and_signal() {
    if (Traits::kOrdered) fence_global();
    named_sync(Traits::kPairBarrier, 256);
    if (Traits::kOrdered && semaphore != nullptr && wg == 0 && (threadIdx.x & 127) == 0)
      raise_count(semaphore);
  }

  template <bool kLast>
  __device__ __forceinline__ void step() {
    if constexpr (Traits::kRotated)
      rotated_step<kLast>();
    else
      plain_step<kLast>();
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0.f;
    if (w.total > 0) {
      mbarrier_wait(smem + Traits::kKvFull, 0);
      const LiveKeys live = w.live(p);
      if (!live.template has_all<Traits::kKeys>(w.k0)) {
        scrub_rows<Traits::kKeys, Traits::kPanels, 128>(smem + Traits::kK, w.k0, live);
        scrub_rows<Traits::kKeys, Traits::kPanels, 128>(smem + Traits::kV, w.k0, live);
        named_sync(Traits::kPairBarrier, 256);
      }
      start_scores();
      move_on();
      if (Traits::kRotated) {
        prefetch();
        start_dp(m_now);
        wgmma_wait<1>();
        pin(s);
        softmax(m_now);
        wgmma_wait<0>();
        pin(dp);
      } else {
        wgmma_wait<0>();
        pin(s);
      }
      for (int it = w.total - 1; it > 0; --it) {
        look_ahead();
        step<false>();
        move_on();
      }
      step<true>();
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
    const LiveKeys live = w.live(p);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool dead = !live.has(key(r));
      k_scale[r] = p.logit.scale;
      v_scale[r] = 1.f;
      if (dead) {
#pragma unroll
        for (int c = 0; c < kDim / 4; ++c)
          dk[4 * (c / 2) + 2 * r + (c & 1)] = dv[4 * (c / 2) + 2 * r + (c & 1)] = 0.f;
      }
    }
    pair_sync_and_signal();  // the other warpgroup's dQ product reads all of k
    const uint32_t k_buffer = smem + Traits::kK + wg * 64 * 128,
                   v_buffer = smem + Traits::kV + wg * 64 * 128;
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

// ---- Kernel ----

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p) {
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
    BackwardConsumer<Traits> consumer(p, work, infos, base, group - 1);
    consumer.run();
  }
}

}  // namespace jft::hopper
