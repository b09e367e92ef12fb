#include "pipelines.h"

#include "params.h"
#include "sources.h"
#include "tiles.h"

namespace jft::metal {
namespace {

struct KernelText {
  const char* name;
  const char** source;
  bool sized;  // depends on the head sizes
};

const KernelText kKernels[] = {
    {"flash_forward", &kForwardSource, true}, {"flash_delta", &kDeltaSource, false},
    {"flash_dq", &kDqSource, true},           {"flash_dkdv", &kDkdvSource, true},
    {"flash_dbias", &kDbiasSource, true},     {"flash_sum_rows", &kSumRowsSource, false},
    {"flash_probe", &kProbeSource, false},
};

const KernelText& text_of(KernelId id) { return kKernels[static_cast<int>(id)]; }

const char* type_name(DType dtype) {
  return dtype == DType::kF16 ? "half" : dtype == DType::kBF16 ? "bfloat" : "float";
}

NS::String* string(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

std::string message(NS::Error* error) {
  return error && error->localizedDescription() ? error->localizedDescription()->utf8String()
                                                : "no message";
}

}  // namespace

const char* kernel_name(KernelId id) { return text_of(id).name; }

MTL::Library* Pipelines::library(const Variant& v, std::string* error) {
  const KernelText& text = text_of(v.kernel);
  const int dp = text.sized ? v.dp : 8, dvp = text.sized ? v.dvp : 8;
  auto& slot = libraries_[{static_cast<int>(v.kernel), v.dtype, dp, dvp}];
  if (slot) return slot.get();
  const std::string source = std::string("#define JFT_T ") + type_name(v.dtype) +
                             "\n#define JFT_DP " + std::to_string(dp) + "\n#define JFT_DVP " +
                             std::to_string(dvp) + "\n" + *text.source;
  auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setFastMathEnabled(false);
  options->setLanguageVersion(MTL::LanguageVersion3_1);  // bfloat
  NS::Error* problem = nullptr;
  slot = NS::TransferPtr(device_->newLibrary(string(source), options.get(), &problem));
  if (!slot) {
    *error = std::string("flash_attention: the Metal compiler refused ") + text.name + " for " +
             type_name(v.dtype) + ", head sizes " + std::to_string(dp) + " and " +
             std::to_string(dvp) + ": " + message(problem);
  }
  return slot.get();
}

void Pipelines::clear() {
  std::lock_guard<std::mutex> hold(mutex_);
  pipelines_.clear();
  libraries_.clear();
}

MTL::ComputePipelineState* Pipelines::get(const Variant& v, std::string* error) {
  std::lock_guard<std::mutex> hold(mutex_);
  auto& slot = pipelines_[v.key()];
  if (slot) return slot.get();
  MTL::Library* lib = library(v, error);
  if (!lib) return nullptr;
  auto constants = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  for (int index = 0; index <= kFlagRowTerms; ++index) {
    if (index == kFlagBiasType) {
      constants->setConstantValue(&v.bias_type, MTL::DataTypeUInt,
                                  static_cast<NS::UInteger>(index));
      continue;
    }
    const bool on = (v.flags >> index) & 1u;
    constants->setConstantValue(&on, MTL::DataTypeBool, static_cast<NS::UInteger>(index));
  }
  NS::Error* problem = nullptr;
  auto function =
      NS::TransferPtr(lib->newFunction(string(kernel_name(v.kernel)), constants.get(), &problem));
  if (function) slot = NS::TransferPtr(device_->newComputePipelineState(function.get(), &problem));
  if (!slot) {
    *error = std::string("flash_attention: no Metal pipeline for ") + kernel_name(v.kernel) + ": " +
             message(problem);
    return nullptr;
  }
  if (slot->maxTotalThreadsPerThreadgroup() < static_cast<NS::UInteger>(kThreads)) {
    *error = std::string("flash_attention: ") + kernel_name(v.kernel) + " needs " +
             std::to_string(kThreads) + " threads, this GPU has registers for " +
             std::to_string(slot->maxTotalThreadsPerThreadgroup());
    slot.reset();
    return nullptr;
  }
  return slot.get();
}

}  // namespace jft::metal
