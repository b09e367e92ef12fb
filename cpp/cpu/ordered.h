// Waiting for the progress of an earlier task. Compiler builtins, not std::atomic: see simd.h.
#pragma once

#include <sched.h>

#include <cstdint>

#include "simd.h"

namespace jft::cpu::JFT_ISA {

constexpr int64_t kFinished = INT64_MAX;

JFT_INLINE void publish(int64_t* progress, int64_t value) {
  __atomic_store_n(progress, value, __ATOMIC_RELEASE);
}

JFT_INLINE void add_one(int64_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

// The task waited for has started on another thread (tasks start in order), so this ends.
JFT_INLINE void wait_for(const int64_t* progress, int64_t value) {
  for (int spins = 0; __atomic_load_n(progress, __ATOMIC_ACQUIRE) < value; ++spins) {
    if (spins < 200) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
      sched_yield();  // more threads than cores: let the other one run
    }
  }
}

}  // namespace jft::cpu::JFT_ISA
