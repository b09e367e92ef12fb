// The GPU of this process: device, queue, compiled kernels, scratch buffers, and the threads that
// wait for command buffers and complete the calls.
#pragma once

#include <Metal/Metal.hpp>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "encode.h"
#include "pipelines.h"

namespace jft::metal {

// Scratch that survives calls: fresh MTLBuffers cost about 60 us per MB.
class ScratchCache {
 public:
  explicit ScratchCache(MTL::Device* device) : device_(device) {}
  NS::SharedPtr<MTL::Buffer> take(std::size_t bytes);  // null when out of memory
  void give_back(NS::SharedPtr<MTL::Buffer> buffer);
  void clear();

 private:
  MTL::Device* device_;
  std::mutex mutex_;
  std::vector<NS::SharedPtr<MTL::Buffer>> free_;
};

// Everything that must live until the GPU is done with one call.
struct Pending {
  struct Copy {
    void* to;
    MTL::Buffer* from;
    std::size_t bytes;
  };
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> commands;
  std::vector<NS::SharedPtr<MTL::Buffer>> buffers;
  std::vector<NS::SharedPtr<MTL::Buffer>> scratch;
  std::vector<Copy> copies;  // staged results
  std::function<void(std::string error)> done;
};

class Device {
 public:
  // The device, or null and why there is none (decided once per process).
  static Device* get(std::string* error);

  Pipelines& pipelines() { return *pipelines_; }
  ScratchCache& scratch() { return *scratch_; }
  MTL::Device* handle() { return device_.get(); }
  NS::SharedPtr<MTL::CommandBuffer> command_buffer();
  // Waits on a completion thread, then calls `done`. XLA may run the rest of the program inside
  // `done`, even a collective that waits for other devices' calls: so a call never queues behind a
  // busy thread.
  void complete(Pending pending);

 private:
  Device() = default;
  std::string open();
  std::string probe_layout();
  void run();

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  std::unique_ptr<Pipelines> pipelines_;
  std::unique_ptr<ScratchCache> scratch_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Pending> pending_;
  std::size_t idle_ = 0;  // completion threads that wait for a call
};

}  // namespace jft::metal
