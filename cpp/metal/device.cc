#include "device.h"

#include <cstring>

#include "params.h"

namespace jft::metal {
namespace {

// An autorelease pool for a scope: metal-cpp returns temporaries into the current one.
struct Pool {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  ~Pool() { pool->release(); }
};

constexpr std::size_t kKeptScratch = 8;

}  // namespace

NS::SharedPtr<MTL::Buffer> ScratchCache::take(std::size_t bytes) {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if ((*it)->length() < bytes || (*it)->length() > 2 * bytes) continue;
      NS::SharedPtr<MTL::Buffer> found = *it;
      free_.erase(it);
      return found;
    }
  }
  return NS::TransferPtr(device_->newBuffer(bytes, MTL::ResourceStorageModeShared));
}

void ScratchCache::give_back(NS::SharedPtr<MTL::Buffer> buffer) {
  std::lock_guard<std::mutex> hold(mutex_);
  free_.push_back(buffer);
  if (free_.size() > kKeptScratch) free_.erase(free_.begin());
}

void ScratchCache::clear() {
  std::lock_guard<std::mutex> hold(mutex_);
  free_.clear();
}

Device* Device::get(std::string* error) {
  static std::mutex mutex;
  static Device* device = nullptr;  // never destroyed: its threads may outlive static destructors
  static std::string failure;
  std::lock_guard<std::mutex> hold(mutex);
  if (!device && failure.empty()) {
    Pool pool;
    auto* opened = new Device;
    failure = opened->open();
    if (failure.empty()) {
      device = opened;
    } else {
      delete opened;
    }
  }
  if (!device && error) *error = failure;
  return device;
}

std::string Device::open() {
  device_ = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (!device_) return "flash_attention: this machine has no Metal device";
  if (!device_->supportsFamily(MTL::GPUFamilyApple7)) {
    return std::string("flash_attention: the Metal kernels need an Apple M1 or newer, got ") +
           device_->name()->utf8String();
  }
  queue_ = NS::TransferPtr(device_->newCommandQueue());
  if (!queue_) return "flash_attention: the Metal device gave no command queue";
  pipelines_ = std::make_unique<Pipelines>(device_.get());
  scratch_ = std::make_unique<ScratchCache>(device_.get());
  return probe_layout();
}

std::string Device::probe_layout() {
  std::string error;
  MTL::ComputePipelineState* pipeline =
      pipelines_->get({KernelId::kProbe, DType::kF32, 8, 8, 0, 0}, &error);
  if (!pipeline) return error;
  auto out = scratch_->take(64 * sizeof(float));
  if (!out) return "flash_attention: the Metal device has no memory for scratch (256 bytes)";
  auto commands = command_buffer();
  MTL::ComputeCommandEncoder* encoder = commands->computeCommandEncoder();
  encoder->setComputePipelineState(pipeline);
  encoder->setBuffer(out.get(), 0, static_cast<NS::UInteger>(kBufO));
  encoder->setThreadgroupMemoryLength(64 * sizeof(float), 0);
  encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), MTL::Size(32, 1, 1));
  encoder->endEncoding();
  commands->commit();
  commands->waitUntilCompleted();
  if (commands->status() != MTL::CommandBufferStatusCompleted) {
    return "flash_attention: the Metal device did not run the layout probe";
  }
  for (int i = 0; i < 64; ++i) {
    if (static_cast<const float*>(out->contents())[i] == static_cast<float>(i)) continue;
    return "flash_attention: this GPU lays 8x8 matrices out in a way the Metal kernels do not know";
  }
  return "";
}

NS::SharedPtr<MTL::CommandBuffer> Device::command_buffer() {
  return NS::RetainPtr(queue_->commandBuffer());
}

void Device::complete(Pending pending) {
  std::lock_guard<std::mutex> hold(mutex_);
  pending_.push_back(std::move(pending));
  if (pending_.size() > idle_) std::thread([this] { run(); }).detach();
  wake_.notify_one();
}

void Device::run() {
  for (;;) {
    Pending call;
    {
      std::unique_lock<std::mutex> hold(mutex_);
      ++idle_;
      wake_.wait(hold, [this] { return !pending_.empty(); });
      --idle_;
      call = std::move(pending_.front());
      pending_.pop_front();
    }
    Pool pool;
    std::string error;
    for (auto& commands : call.commands) {
      commands->waitUntilCompleted();
      if (commands->status() == MTL::CommandBufferStatusCompleted || !error.empty()) continue;
      NS::Error* why = commands->error();
      error = std::string("flash_attention: the GPU did not finish the Metal kernels: ") +
              (why ? why->localizedDescription()->utf8String() : "no message");
    }
    if (error.empty()) {
      for (const Pending::Copy& copy : call.copies) {
        std::memcpy(copy.to, copy.from->contents(), copy.bytes);
      }
    }
    for (auto& buffer : call.scratch) scratch_->give_back(buffer);
    call.commands.clear();
    call.buffers.clear();
    call.done(error);
  }
}

}  // namespace jft::metal
