#include "support.h"

#include "device.h"

namespace jft::metal {

std::pair<std::string, std::string> explain(const Facts& facts) {
  const auto at = [&](const char* name) {
    auto found = facts.find(name);
    return found == facts.end() ? -1 : found->second;
  };
  const auto refuse = [](const std::string& text) { return std::make_pair(std::string(), text); };
  if (at("dtype") == 3)
    return refuse("the Metal kernels take float16, bfloat16 and float32, got float64");
  if (at("D") > 256 || at("Dv") > 256) {
    return refuse("the Metal kernels take head sizes up to 256, got " + std::to_string(at("D")) +
                  " and " + std::to_string(at("Dv")));
  }
  if (at("bias_dtype") == 3) {
    return refuse("the Metal kernels take a float16, bfloat16 or float32 bias, got float64");
  }
  std::string error;
  if (!Device::get(&error)) return refuse(error);
#if defined(JFT_METAL_EMULATED)
  return {"metal (emulated)", ""};
#else
  return {"metal (verified by emulation, not on hardware)", ""};
#endif
}

bool preferred(const Facts& facts) {
#if defined(JFT_METAL_EMULATED)
  (void)facts;
  return false;
#else
  const auto at = [&](const char* name) {
    auto found = facts.find(name);
    return found == facts.end() || found->second < 0 ? 0 : found->second;
  };
  return at("Sq") >= 512 && at("Sk") >= 512;
#endif
}

}  // namespace jft::metal
