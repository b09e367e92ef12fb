#include "isa.h"

#include <atomic>

#if defined(JFT_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jft::cpu {

#if defined(__x86_64__)
extern const Kernels kernels_baseline, kernels_avx2, kernels_avx512;
#if defined(JFT_AMX)
extern const Kernels kernels_amx;
#endif
#else
extern const Kernels kernels_neon;
#endif

namespace {

#if defined(JFT_AMX)
// Whether the processor has AMX tiles with bf16, the system saves them, and lets this process use
// them: Linux wants to be asked once, since the tiles make the frames of signal handlers 8 KB
// larger (it refuses where an alternate signal stack is too small for that).
bool amx_ready() {
#if defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return false;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d & (1u << 22)) || !(d & (1u << 24))) return false;  // AMX-BF16, AMX-TILE
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTiles = 3u << 17;  // XTILECFG, XTILEDATA
  if ((low & kTiles) != kTiles) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
    return std::vector<Level>{
#if defined(JFT_AMX)
        {"amx", &kernels_amx, avx512 && amx_ready()},
#endif
        {"avx512", &kernels_avx512, avx512},
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
