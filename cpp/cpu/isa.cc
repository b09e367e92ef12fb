#include "isa.h"

#include <atomic>

namespace jft::cpu {

#if defined(__x86_64__)
extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512;
#else
extern const Kernels kernels_neon;
#endif

namespace {

struct Level {
  const char* name;
  const Kernels* kernels;
  bool supported;
};

const std::vector<Level>& levels() {
#if defined(__x86_64__)
  static const std::vector<Level> all = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return std::vector<Level>{{"avx512", &kernels_avx512, avx512},
                              {"avx2", &kernels_avx2, avx2},
                              {"baseline", &kernels_baseline, true}};
  }();
#else
  static const std::vector<Level> all{{"neon", &kernels_neon, true}};
#endif
  return all;
}

const Level* find(const std::string& name) {
  for (const Level& level : levels()) {
    if (level.supported && (name.empty() || name == level.name)) return &level;
  }
  return nullptr;
}

std::atomic<const Level*>& current() {
  static std::atomic<const Level*> level{find("")};
  return level;
}

}  // namespace

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) {
    if (level.supported) names.push_back(level.name);
  }
  return names;
}

std::string isa() { return current().load()->name; }

const Kernels& kernels() { return *current().load()->kernels; }

bool set_isa(const std::string& name) {
  const Level* level = find(name);
  if (level && !name.empty()) current().store(level);
  return level && !name.empty();
}

}  // namespace jft::cpu
