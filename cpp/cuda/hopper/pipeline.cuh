// A ring of shared-memory buffers: position of one user of the ring.
#pragma once

#include "device/mbarrier.cuh"

namespace jft::hopper {

// One thread, before the block's first barrier: `full` completes with the producer's copies,
// `empty` with one arrival per user warp.
__device__ __forceinline__ void init_ring(uint32_t full, uint32_t empty, int stages, int users) {
  for (int s = 0; s < stages; ++s) {
    mbarrier_init(full + 8 * s, 1);
    mbarrier_init(empty + 8 * s, users);
  }
}

// full[s] and empty[s] are 8-byte barriers in two arrays; a cursor walks the ring in step with its
// peers.
template <int kStages>
struct Ring {
  uint32_t full, empty;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring(uint32_t full_, uint32_t empty_) : full(full_), empty(empty_) {}
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full + 8 * stage, parity); }
  __device__ __forceinline__ void wait_empty() const {
    mbarrier_wait(empty + 8 * stage, parity ^ 1);
  }
  __device__ __forceinline__ void expect(uint32_t bytes) const {
    mbarrier_arrive_expect(full + 8 * stage, bytes);
  }
  // One arrival per consumer warp: lane 0, after the whole warp is done with the buffer.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty + 8 * stage);
  }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace jft::hopper
