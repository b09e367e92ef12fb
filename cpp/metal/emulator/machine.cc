#include "machine.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "fibers.h"
#include "memory.h"

namespace jft::emu {
namespace {

enum class State : std::uint8_t { kReady, kCollective, kSimdBarrier, kBarrier, kDone };

struct Lane {
  void* sp = nullptr;
  State state = State::kReady;
  void (*compute)(void* const*, void* const*) = nullptr;
  const char* op = "";
  int line = 0;
  void *in = nullptr, *out = nullptr;
  EmuThread ids;
};

// What happened last to two bytes of threadgroup memory. Epochs count barriers, so an access is
// ordered after another one iff a barrier that covers both threads lies between them.
struct Cell {
  std::uint32_t write_epoch = 0, write_simd_epoch = 0, read_epoch = 0, read_simd_epoch = 0;
  std::uint32_t generation = 0;    // threadgroup that this is about, else all fields are stale
  std::int16_t writer = -1;        // thread; -1 = never written
  std::int16_t reader = -1;        // thread; -1 = nobody in this epoch
  std::int16_t reader_group = -1;  // simdgroup of all readers, -2 = several
  bool many_readers = false;
};

class Machine {
 public:
  std::string run(const Dispatch& dispatch, std::uint64_t seed, Counters* counters);

  void collective(void (*compute)(void* const*, void* const*), const char* name, int line, void* in,
                  void* out);
  void barrier(State kind, int line);
  void device_access(std::uintptr_t address, std::size_t bytes, bool write);
  void threadgroup_access(std::uintptr_t address, std::size_t bytes, bool write);
  void matrix_op() { ++count_.matrix_ops; }
  unsigned lane() const { return current_ % kSimdWidth; }
  void fault(const std::string& what);  // from inside a fiber: never returns
  void signal_fault(void* address);     // from the SIGSEGV handler: never returns

 private:
  static void fiber_entry();
  void yield();
  void run_threadgroup();
  bool step(unsigned group);  // runs every lane of a simdgroup to its next stop; true = progress
  std::uint64_t random();
  std::string where() const;

  const Dispatch* dispatch_ = nullptr;
  std::uint64_t random_ = 1;
  std::vector<std::unique_ptr<FiberStack>> stacks_;
  std::vector<Lane> lanes_;
  std::vector<std::unique_ptr<GuardedMemory>> threadgroup_;
  std::vector<std::vector<Cell>> shadow_;
  std::uint32_t epoch_ = 0, generation_ = 0;
  std::vector<std::uint32_t> simd_epoch_;
  void* scheduler_ = nullptr;
  unsigned current_ = 0;
  unsigned position_[3] = {0, 0, 0};
  std::string fault_;
  Counters count_;
};

thread_local Machine* active = nullptr;

std::uint64_t Machine::random() {  // splitmix64
  std::uint64_t z = (random_ += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

std::string Machine::where() const {
  char text[160];
  std::snprintf(text, sizeof text,
                " (kernel %s, threadgroup %u,%u,%u, thread %u, last stop line %d)",
                dispatch_->name.c_str(), position_[0], position_[1], position_[2], current_,
                lanes_[current_].line);
  return text;
}

void Machine::yield() { jft_emu_switch(&lanes_[current_].sp, scheduler_); }

void Machine::fiber_entry() {
  Machine* m = active;
  EmuArguments arguments = m->dispatch_->arguments;
  for (std::size_t i = 0; i < m->threadgroup_.size(); ++i) {
    arguments.arena[i] = m->threadgroup_[i] ? m->threadgroup_[i]->data() : nullptr;
  }
  arguments.ids = m->lanes_[m->current_].ids;
  m->dispatch_->entry(&arguments);
  m->lanes_[m->current_].state = State::kDone;
  m->yield();
}

void Machine::fault(const std::string& what) {
  fault_ = what + where();
  yield();  // the scheduler abandons all fibers; kernels own nothing
}

void Machine::signal_fault(void* address) {
  for (const auto& stack : stacks_) {
    if (stack->in_guard(address)) fault("a thread's stack overflowed");
  }
  fault("access to memory that is not bound to the kernel");
}

void Machine::collective(void (*compute)(void* const*, void* const*), const char* name, int line,
                         void* in, void* out) {
  Lane& lane = lanes_[current_];
  lane.state = State::kCollective;
  lane.compute = compute;
  lane.op = name;
  lane.line = line;
  lane.in = in;
  lane.out = out;
  yield();
}

void Machine::barrier(State kind, int line) {
  Lane& lane = lanes_[current_];
  lane.state = kind;
  lane.op = kind == State::kBarrier ? "threadgroup_barrier" : "simdgroup_barrier";
  lane.line = line;
  yield();
}

void Machine::device_access(std::uintptr_t address, std::size_t bytes, bool write) {
  (write ? count_.device_write_bytes : count_.device_read_bytes) += bytes;
  for (const Range& range : dispatch_->buffers) {
    auto begin = reinterpret_cast<std::uintptr_t>(range.begin);
    if (address >= begin && address + bytes <= begin + range.bytes) return;
  }
  fault(std::string(write ? "device write" : "device read") + " outside every bound buffer");
}

void Machine::threadgroup_access(std::uintptr_t address, std::size_t bytes, bool write) {
  count_.threadgroup_bytes += bytes;
  std::size_t arena = 0, begin = 0;
  for (;; ++arena) {
    if (arena == threadgroup_.size()) {
      fault(std::string("threadgroup ") + (write ? "write" : "read") + " outside the allocation");
    }
    if (!threadgroup_[arena]) continue;
    auto base = reinterpret_cast<std::uintptr_t>(threadgroup_[arena]->data());
    begin = address - base;
    if (address >= base && begin + bytes <= threadgroup_[arena]->bytes()) break;
  }
  const auto me = static_cast<std::int16_t>(current_);
  const auto group = static_cast<std::int16_t>(current_ / kSimdWidth);
  const std::uint32_t simd = simd_epoch_[static_cast<std::size_t>(group)];
  for (std::size_t i = begin / 2; i <= (begin + bytes - 1) / 2; ++i) {
    Cell& cell = shadow_[arena][i];
    if (cell.generation != generation_) {
      cell = Cell{};
      cell.generation = generation_;
    }
    if (!write && cell.writer < 0) fault("read of threadgroup memory that nobody wrote");
    const bool other_writer = cell.writer >= 0 && cell.writer != me && cell.write_epoch == epoch_;
    if (other_writer &&
        (cell.writer / static_cast<int>(kSimdWidth) != group || cell.write_simd_epoch == simd)) {
      fault(std::string(write ? "write after write" : "read after write") +
            " of threadgroup memory without a barrier between the threads");
    }
    if (write) {
      if (cell.reader >= 0 && cell.read_epoch == epoch_) {
        const bool same_thread = cell.reader == me && !cell.many_readers;
        const bool ordered = cell.reader_group == group && cell.read_simd_epoch != simd;
        if (!same_thread && !ordered) {
          fault("write after read of threadgroup memory without a barrier between the threads");
        }
      }
      cell.writer = me;
      cell.write_epoch = epoch_;
      cell.write_simd_epoch = simd;
      cell.reader = -1;
      continue;
    }
    if (cell.reader < 0 || cell.read_epoch != epoch_) {
      cell.reader = me;
      cell.reader_group = group;
      cell.many_readers = false;
    } else if (cell.reader != me) {
      cell.many_readers = true;
      if (cell.reader_group != group) cell.reader_group = -2;
    }
    cell.read_epoch = epoch_;
    cell.read_simd_epoch = simd;
  }
}

bool Machine::step(unsigned group) {
  const unsigned first = group * kSimdWidth;
  Lane* lanes = &lanes_[first];
  if (lanes[0].state == State::kBarrier || lanes[0].state == State::kDone) return false;
  const std::uint64_t bits = random();
  const unsigned stride = static_cast<unsigned>(bits) | 1u,
                 start = static_cast<unsigned>(bits >> 32);
  for (unsigned i = 0; i < kSimdWidth; ++i) {
    const unsigned lane = (start + i * stride) % kSimdWidth;
    if (lanes[lane].state != State::kReady) continue;
    current_ = first + lane;
    jft_emu_switch(&scheduler_, lanes[lane].sp);
    if (!fault_.empty()) return false;
  }
  for (unsigned i = 1; i < kSimdWidth; ++i) {
    const Lane &a = lanes[0], &b = lanes[i];
    if (a.state == b.state &&
        (a.state == State::kDone || (a.line == b.line && std::strcmp(a.op, b.op) == 0))) {
      continue;
    }
    auto describe = [](const Lane& l) {
      return l.state == State::kDone
                 ? std::string("has returned")
                 : std::string("waits in ") + l.op + " at line " + std::to_string(l.line);
    };
    current_ = first + i;
    fault_ = "divergence: lane 0 of simdgroup " + std::to_string(group) + " " + describe(a) +
             ", lane " + std::to_string(i) + " " + describe(b) + where();
    return false;
  }
  switch (lanes[0].state) {
    case State::kCollective: {
      void *in[kSimdWidth], *out[kSimdWidth];
      for (unsigned i = 0; i < kSimdWidth; ++i) {
        in[i] = lanes[i].in;
        out[i] = lanes[i].out;
        lanes[i].state = State::kReady;
      }
      lanes[0].compute(in, out);
      ++count_.collectives;
      return true;
    }
    case State::kSimdBarrier:
      ++simd_epoch_[group];
      for (unsigned i = 0; i < kSimdWidth; ++i) lanes[i].state = State::kReady;
      return true;
    default:
      return true;
  }
}

void Machine::run_threadgroup() {
  const unsigned* threads = dispatch_->threads;
  const unsigned count = threads[0] * threads[1] * threads[2];
  const unsigned groups = count / kSimdWidth;
  for (unsigned i = 0; i < count; ++i) {
    Lane& lane = lanes_[i];
    lane.state = State::kReady;
    lane.line = 0;
    lane.op = "";
    EmuThread& ids = lane.ids;
    std::memcpy(ids.threadgroup_position_in_grid, position_, sizeof position_);
    std::memcpy(ids.threads_per_threadgroup, threads, sizeof position_);
    std::memcpy(ids.threadgroups_per_grid, dispatch_->grid, sizeof position_);
    ids.thread_position_in_threadgroup[0] = i % threads[0];
    ids.thread_position_in_threadgroup[1] = i / threads[0] % threads[1];
    ids.thread_position_in_threadgroup[2] = i / threads[0] / threads[1];
    ids.thread_index_in_threadgroup = i;
    ids.thread_index_in_simdgroup = i % kSimdWidth;
    ids.simdgroup_index_in_threadgroup = i / kSimdWidth;
    lane.sp = stacks_[i]->prepare(&Machine::fiber_entry);
  }
  for (std::size_t i = 0; i < threadgroup_.size(); ++i) {
    if (threadgroup_[i]) threadgroup_[i]->poison();
  }
  ++generation_;
  epoch_ = 0;
  simd_epoch_.assign(groups, 0);
  for (;;) {
    unsigned waiting = 0, done = 0;
    for (unsigned g = 0; g < groups; ++g) {
      waiting += lanes_[g * kSimdWidth].state == State::kBarrier;
      done += lanes_[g * kSimdWidth].state == State::kDone;
    }
    if (done == groups) return;
    if (waiting == groups) {
      ++epoch_;
      ++count_.barriers;
      for (unsigned g = 1; g < groups; ++g) {
        if (lanes_[g * kSimdWidth].line == lanes_[0].line) continue;
        current_ = g * kSimdWidth;
        fault_ = "divergence: simdgroup 0 waits in threadgroup_barrier at line " +
                 std::to_string(lanes_[0].line) + ", another one at a different line" + where();
        return;
      }
      for (unsigned i = 0; i < count; ++i) lanes_[i].state = State::kReady;
      continue;
    }
    if (waiting + done == groups) {
      fault_ =
          "divergence: some simdgroups wait in threadgroup_barrier, others have returned" + where();
      return;
    }
    // A random simdgroup runs a random number of stops before the next one is drawn.
    const unsigned group = static_cast<unsigned>(random() % groups);
    for (std::uint64_t burst = random() % 32; step(group) && burst > 0; --burst) {
    }
    if (!fault_.empty()) return;
  }
}

struct sigaction old_segv, old_bus;

void on_signal(int number, siginfo_t* info, void*) {
  if (active) active->signal_fault(info->si_addr);
  sigaction(number, number == SIGSEGV ? &old_segv : &old_bus, nullptr);  // not ours: let it crash
}

std::string Machine::run(const Dispatch& dispatch, std::uint64_t seed, Counters* counters) {
  dispatch_ = &dispatch;
  random_ = seed * 2 + 1;
  fault_.clear();
  count_ = Counters{};
  const unsigned count = dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2];
  if (count == 0 || count > kMaxThreads || count % kSimdWidth != 0) {
    return "threads per threadgroup must be a multiple of 32 up to 1024, got " +
           std::to_string(count) + " (kernel " + dispatch.name + ")";
  }
  std::size_t total = 0;
  threadgroup_.clear();
  shadow_.clear();
  for (std::size_t bytes : dispatch.threadgroup_bytes) {
    if (bytes % 16 != 0) return "threadgroup memory lengths must be multiples of 16 bytes";
    total += bytes;
    threadgroup_.push_back(bytes ? std::make_unique<GuardedMemory>(bytes) : nullptr);
    shadow_.emplace_back((bytes + 1) / 2);
  }
  if (total > kThreadgroupMemoryLimit) {
    return "threadgroup memory of " + std::to_string(total) + " bytes exceeds 32768 (kernel " +
           dispatch.name + ")";
  }
  while (stacks_.size() < count) stacks_.push_back(std::make_unique<FiberStack>());
  lanes_.resize(count);
  current_ = 0;

  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  static thread_local char alternate[64 * 1024];
  stack_t signal_stack{}, old_stack{};
  signal_stack.ss_sp = alternate;
  signal_stack.ss_size = sizeof alternate;
  sigaltstack(&signal_stack, &old_stack);
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  Machine* outer = active;
  active = this;
  for (position_[2] = 0; position_[2] < dispatch.grid[2] && fault_.empty(); ++position_[2]) {
    for (position_[1] = 0; position_[1] < dispatch.grid[1] && fault_.empty(); ++position_[1]) {
      for (position_[0] = 0; position_[0] < dispatch.grid[0] && fault_.empty(); ++position_[0]) {
        run_threadgroup();
        ++count_.threadgroups;
      }
    }
  }
  active = outer;
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);

  ++counters->dispatches;
  counters->threadgroups += count_.threadgroups;
  counters->matrix_ops += count_.matrix_ops;
  counters->device_read_bytes += count_.device_read_bytes;
  counters->device_write_bytes += count_.device_write_bytes;
  counters->threadgroup_bytes += count_.threadgroup_bytes;
  counters->barriers += count_.barriers;
  counters->collectives += count_.collectives;
  if (total > counters->threadgroup_memory) counters->threadgroup_memory = total;
  return fault_;
}

}  // namespace

std::string run(const Dispatch& dispatch, std::uint64_t seed, Counters* counters) {
  static thread_local Machine machine;
  return machine.run(dispatch, seed, counters);
}

const EmuApi* api() {
  static const EmuApi table = {
      [](void (*compute)(void* const*, void* const*), const char* name, int line, void* in,
         void* out) { active->collective(compute, name, line, in, out); },
      [](int, int line) { active->barrier(State::kBarrier, line); },
      [](int, int line) { active->barrier(State::kSimdBarrier, line); },
      [](unsigned long a, unsigned long n, int w) { active->device_access(a, n, w != 0); },
      [](unsigned long a, unsigned long n, int w) { active->threadgroup_access(a, n, w != 0); },
      []() { active->matrix_op(); },
      []() { return active->lane(); },
  };
  return &table;
}

}  // namespace jft::emu
