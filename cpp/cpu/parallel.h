// Runs numbered tasks on a thread pool, in order of their numbers, with the caller working too:
// there is no deadlock when the caller sits on the pool's only thread and nothing else ever starts.
#pragma once

#include <cstdint>
#include <functional>

namespace jft::cpu {

// A pool seen from here: XLA's in the handlers, std::thread in the C++ tests.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int64_t threads() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

// Calls task(n, scratch) for n in [0, count); each worker has a block of `scratch_bytes` of its
// own, aligned to 64. Tasks start in ascending order. False when memory ran out.
bool run_tasks(Executor& pool, int64_t count, int64_t scratch_bytes,
               const std::function<void(int64_t, void*)>& task);

}  // namespace jft::cpu
