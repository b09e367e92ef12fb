#include "parallel.h"

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <memory>

namespace jft::cpu {
namespace {

// Scratch that a thread keeps from call to call, so that its pages are mapped once.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* get(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
      size_ = data_ ? bytes : 0;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// Lives as long as its last helper: one may start after everything is done.
struct Work {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> active{0};
  std::atomic<bool> closed{false};
  int64_t count, scratch_bytes;
  const std::function<void(int64_t, void*)>* task;  // the caller's, valid until `closed`

  void run() {
    thread_local Scratch memory;
    void* scratch = memory.get(scratch_bytes);
    if (!scratch) return;
    for (int64_t n; (n = next.fetch_add(1)) < count;) (*task)(n, scratch);
  }
};

}  // namespace

bool run_tasks(Executor& pool, int64_t count, int64_t scratch_bytes,
               const std::function<void(int64_t, void*)>& task) {
  if (count <= 0) return true;
  auto work = std::make_shared<Work>();
  work->count = count;
  work->scratch_bytes = scratch_bytes > 0 ? scratch_bytes : 64;
  work->task = &task;
  const int64_t workers = pool.threads() < count ? pool.threads() : count;
  for (int64_t n = 1; n < workers; ++n) {
    pool.schedule([work] {
      work->active.fetch_add(1);
      if (!work->closed) work->run();
      work->active.fetch_sub(1);
    });
  }
  work->run();
  work->closed = true;
  // A helper is in here only with a task in hand; one that starts now sees `closed`.
  while (work->active.load() > 0) sched_yield();
  // The caller takes every task unless it got no memory itself.
  return work->next.load() >= count;
}

}  // namespace jft::cpu
