// The FFI targets of the Metal backend. They are registered on JAX's CPU platform: memory is
// unified, so the GPU reads and writes XLA's host buffers, and an ffi::Future completes when it is
// done.
#include "handlers.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

#include "device.h"
#include "encode.h"
#include "ffi_problem.h"

namespace jft::metal {
namespace {

std::atomic<long long> wrapped{0}, staged{0};

enum class Use { kRead, kWrite };

// One call: maps XLA's buffers, and owns what the GPU needs until it is done.
class Job : public Commands {
 public:
  explicit Job(Device& device) : device_(device) {}
  ~Job() override {
    if (encoder_) encoder_->endEncoding();
    // After an error, what was already committed must not outlive XLA's buffers.
    for (auto& commands : pending_.commands) commands->waitUntilCompleted();
  }

  // Binds the pages around an XLA buffer; copies where Metal does not take them. XLA aligns to 16
  // or 64 bytes, never to pages, and reuses addresses: nothing is cached by address.
  bool map(void* data, std::size_t bytes, Use use, Slice* slice) {
    if (bytes == 0) {
      *slice = dummy();
      return slice->buffer != nullptr;
    }
    const auto page = static_cast<std::uintptr_t>(getpagesize());
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t first = begin / page * page,
                         last = (begin + bytes + page - 1) / page * page;
    auto buffer = NS::TransferPtr(device_.handle()->newBuffer(
        reinterpret_cast<void*>(first), last - first, MTL::ResourceStorageModeShared, nullptr));
    if (buffer) {
      ++wrapped;
      *slice = {buffer.get(), begin - first};
    } else {
      ++staged;
      buffer = NS::TransferPtr(device_.handle()->newBuffer(bytes, MTL::ResourceStorageModeShared));
      if (!buffer) return false;
      if (use == Use::kRead) {
        std::memcpy(buffer->contents(), data, bytes);
      } else {
        pending_.copies.push_back({data, buffer.get(), bytes});
      }
      *slice = {buffer.get(), 0};
    }
    pending_.buffers.push_back(buffer);
    return true;
  }

  Slice dummy() {
    if (!dummy_) {
      dummy_ = device_.scratch().take(16);
      if (dummy_) pending_.scratch.push_back(dummy_);
    }
    return {dummy_.get(), 0};
  }

  bool scratch(std::size_t bytes, Slice* slice) {
    if (bytes == 0) {
      *slice = dummy();
      return slice->buffer != nullptr;
    }
    auto buffer = device_.scratch().take(bytes);
    if (!buffer) {
      device_.scratch().clear();
      buffer = device_.scratch().take(bytes);
    }
    if (!buffer) return false;
    pending_.scratch.push_back(buffer);
    *slice = {buffer.get(), 0};
    return true;
  }

  MTL::ComputeCommandEncoder* encoder() override {
    if (!encoder_) {
      commands_ = device_.command_buffer();
      encoder_ =
          NS::RetainPtr(commands_->computeCommandEncoder());  // serial: dispatches are ordered
    }
    return encoder_.get();
  }

  void cut() override {
    if (!encoder_) return;
    encoder_->endEncoding();
    commands_->commit();
    pending_.commands.push_back(commands_);
    encoder_.reset();
    commands_.reset();
  }

  // Hands everything to the completion thread, which calls `done`.
  void finish(std::function<void(std::string)> done) {
    cut();
    pending_.done = std::move(done);
    device_.complete(std::move(pending_));
  }

 private:
  Device& device_;
  Pending pending_;
  NS::SharedPtr<MTL::CommandBuffer> commands_;
  NS::SharedPtr<MTL::ComputeCommandEncoder> encoder_;
  NS::SharedPtr<MTL::Buffer> dummy_;
};

struct Pool {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  ~Pool() { pool->release(); }
};

// Runs a call; what goes wrong before the GPU starts comes back as an error.
ffi::Error start(Pass pass, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                 const ffi::Dictionary& attrs, const ffi::Promise& promise, bool* pending) {
  Problem p;
  if (auto e = problem_from_ffi(pass, args, rets, attrs, 0, p); e.failure()) return e;
  if (auto text = unsupported(p); !text.empty()) return ffi::Error::InvalidArgument(text);
  Pool pool;
  std::string failure;
  Device* device = Device::get(&failure);
  if (!device) return ffi::Error(ffi::ErrorCode::kUnavailable, failure);
  const auto exhausted = [](const std::string& what, std::size_t bytes) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "flash_attention: the Metal device has no memory for " + what + " (" +
                          std::to_string(bytes) + " bytes)");
  };

  Job job(*device);
  CallBuffers buffers;
  buffers.dummy = job.dummy();
  if (!buffers.dummy.buffer) return exhausted("scratch", 16);
  std::size_t index = 0;
  for (int op = 0; op < kNumOperands; ++op) {
    if (!has(p.attrs.present, static_cast<Operand>(op))) continue;
    const ffi::AnyBuffer b = *args.get<ffi::AnyBuffer>(index++);
    if (!job.map(b.untyped_data(), b.size_bytes(), Use::kRead, &buffers.in[op])) {
      return exhausted(operand_name(op), b.size_bytes());
    }
  }
  index = 0;
  for (int result = 0; result < kNumResults; ++result) {
    if (!p.out[result].data) continue;
    ffi::Result<ffi::AnyBuffer> b = *rets.get<ffi::AnyBuffer>(index++);
    if (!job.map(b->untyped_data(), b->size_bytes(), Use::kWrite, &buffers.out[result])) {
      return exhausted("a result", b->size_bytes());
    }
    // an empty result needs no kernel
    if (b->size_bytes() == 0 && result >= kResDBias) p.out[result].data = nullptr;
  }
  if (pass == Pass::kBackward) {
    const std::size_t bytes = scratch_bytes(p);
    if (!job.scratch(bytes, &buffers.delta) ||
        (needs_sink_terms(p) && !job.scratch(bytes, &buffers.sink_terms)) ||
        (needs_alibi_terms(p) && !job.scratch(bytes, &buffers.alibi_terms))) {
      return exhausted("scratch", bytes);
    }
  }
  const std::string error = pass == Pass::kForward
                                ? encode_forward(p, buffers, device->pipelines(), job)
                                : encode_backward(p, buffers, device->pipelines(), job);
  if (!error.empty()) return ffi::Error::Internal(error);
  job.finish([result = ffi::Promise(promise)](std::string text) mutable {
    if (text.empty()) {
      result.SetAvailable();
    } else {
      result.SetError(ffi::Error::Internal(text));
    }
  });
  *pending = true;
  return ffi::Error::Success();
}

template <Pass pass>
ffi::Future handle(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  ffi::Promise promise;
  ffi::Future future(promise);
  bool pending = false;
  ffi::Error error = start(pass, args, rets, attrs, promise, &pending);
  if (!pending) {
    if (error.failure()) {
      promise.SetError(error);
    } else {
      promise.SetAvailable();
    }
  }
  return future;
}

}  // namespace

BufferCounts take_buffer_counts() { return {wrapped.exchange(0), staged.exchange(0)}; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(MetalForwardHandler, handle<Pass::kForward>,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MetalBackwardHandler, handle<Pass::kBackward>,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace jft::metal
