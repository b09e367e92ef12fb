// The device, and compiled kernels by (kernel, element type, padded head sizes, flags). Sources are
// compiled at first use, so users need no Xcode.
#pragma once

#include <Metal/Metal.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "problem.h"

namespace jft::metal {

enum class KernelId : int { kForward, kDelta, kDq, kDkdv, kDbias, kSumRows, kProbe };

const char* kernel_name(KernelId id);

struct Variant {
  KernelId kernel;
  DType dtype;
  int dp, dvp;          // padded head sizes (tiles.h)
  std::uint32_t flags;  // bit `1 << FunctionConstant`; kFlagBiasType is in bias_type
  std::uint32_t bias_type;

  auto key() const {
    return std::make_tuple(static_cast<int>(kernel), dtype, dp, dvp, flags, bias_type);
  }
};

class Pipelines {
 public:
  explicit Pipelines(MTL::Device* device) : device_(device) {}

  // The pipeline, or null and the reason (with the compiler's message).
  MTL::ComputePipelineState* get(const Variant& variant, std::string* error);
  void clear();

 private:
  MTL::Library* library(const Variant& variant, std::string* error);

  MTL::Device* device_;
  std::mutex mutex_;
  std::map<std::tuple<int, DType, int, int>, NS::SharedPtr<MTL::Library>> libraries_;
  std::map<decltype(Variant().key()), NS::SharedPtr<MTL::ComputePipelineState>> pipelines_;
};

}  // namespace jft::metal
