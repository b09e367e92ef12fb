// Speed of the kernels on one thread, in GFLOP per second of CPU time, beside a bare FMA loop that
// is timed in between (the roof). Not a test: a tool for tuning.  kernels_bench [isa] [name part]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "isa.h"
#include "launch.h"
#include "problems.h"

namespace jft::testing {
namespace {

double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

#if defined(__x86_64__)
__attribute__((target("avx512f,fma"))) double fma_loop() {
  typedef float V __attribute__((vector_size(64)));
  V acc[24];
#pragma GCC unroll 24
  for (int n = 0; n < 24; ++n) acc[n] = V{} + static_cast<float>(n);
  const V a = V{} + 0.999f, b = V{} + 0.001f;
  const double start = cpu_seconds();
  for (int r = 0; r < 20000; ++r) {
#pragma GCC unroll 24
    for (int n = 0; n < 24; ++n) acc[n] = acc[n] * a + b;
    asm volatile("" ::: "memory");
  }
  const double seconds = cpu_seconds() - start;
  V sum{};
#pragma GCC unroll 24
  for (int n = 0; n < 24; ++n) sum += acc[n];
  volatile float sink = sum[0];
  (void)sink;
  return 20000.0 * 24 * 16 * 2 / seconds * 1e-9;
}
#else
double fma_loop() { return 0; }
#endif

struct Row {
  const char* name;
  Options o;
};

}  // namespace
}  // namespace jft::testing

int main(int argc, char** argv) {
  using namespace jft;
  using namespace jft::testing;
  if (argc > 1 && !cpu::set_isa(argv[1])) return 1;
  const std::string only = argc > 2 ? argv[2] : "";
  std::vector<Row> rows;
  const auto add = [&](const char* name, DType dtype, int64_t H, int64_t Hkv, int64_t S, int64_t D,
                       bool causal) -> Options& {
    Options o;
    o.dtype = dtype, o.Hq = H, o.Hkv = Hkv, o.Sq = o.Sk = S, o.D = o.Dv = D, o.causal = causal;
    o.scale = 1.0 / std::sqrt(static_cast<double>(D));
    rows.push_back({name, o});
    return rows.back().o;
  };
  add("f32 D64 S1024", DType::kF32, 2, 2, 1024, 64, false);
  add("f32 D64 S1024 causal", DType::kF32, 2, 2, 1024, 64, true);
  add("f32 D64 S2048 causal", DType::kF32, 1, 1, 2048, 64, true);
  add("f32 D64 S1024 H8", DType::kF32, 8, 8, 1024, 64, false);
  add("bf16 D64 S1024", DType::kBF16, 2, 2, 1024, 64, false);
  add("bf16 D64 S1024 causal", DType::kBF16, 2, 2, 1024, 64, true);
  add("f32 D128 S1024", DType::kF32, 2, 1, 1024, 128, false);
  add("f32 D256 S1024", DType::kF32, 1, 1, 1024, 256, false);
  add("f32 D80 S1024", DType::kF32, 1, 1, 1024, 80, false);
  add("f32 D32 S1024", DType::kF32, 2, 2, 1024, 32, false);
  add("f32 D8 S1024", DType::kF32, 2, 2, 1024, 8, false);
  add("f64 D64 S512", DType::kF64, 1, 1, 512, 64, false);
  add("opt bias", DType::kF32, 2, 2, 1024, 64, false).bias = true;
  add("opt S256", DType::kF32, 8, 8, 256, 64, false);
  add("opt S256 bias", DType::kF32, 8, 8, 256, 64, false).bias = true;
  add("opt S256 bias shared", DType::kF32, 8, 8, 256, 64, false).bias = true;
  rows.back().o.bias_shape = 6;
  add("opt S256 mask shared", DType::kF32, 8, 8, 256, 64, false).mask = true;
  rows.back().o.mask_shape = 6;
  add("opt mask", DType::kF32, 2, 2, 1024, 64, false).mask = true;
  add("opt softcap", DType::kF32, 2, 2, 1024, 64, false).softcap = 20;
  add("opt dropout", DType::kF32, 2, 2, 1024, 64, false).dropout = 0.1;
  add("opt alibi", DType::kF32, 2, 2, 1024, 64, false).alibi = true;
  {
    Options& o = add("opt window 256 (full rate)", DType::kF32, 1, 1, 4096, 64, true);
    o.left = 255;
  }
  for (const Row& row : rows) {
    if (std::string(row.name).find(only) == std::string::npos) continue;
    const Options& o = row.o;
    Call call(o, 1);
    Threads pool(1);
    cpu::launch_forward(call.p, pool);
    const Problem b = call.backward();
    double pairs = static_cast<double>(o.Sq) * static_cast<double>(o.Sk) * (o.causal ? 0.5 : 1.0);
    if (o.left >= 0) pairs = static_cast<double>(o.Sq) * static_cast<double>(o.left + 1);
    const double flops = 4.0 * pairs * static_cast<double>(o.Hq * o.D);
    double roof = 0, fwd = 1e9, bwd = 1e9;
    for (int n = 0; n < 12; ++n) {
      roof = std::max(roof, fma_loop());
      double t = cpu_seconds();
      cpu::launch_forward(call.p, pool);
      fwd = std::min(fwd, cpu_seconds() - t);
      t = cpu_seconds();
      cpu::launch_backward(b, pool);
      bwd = std::min(bwd, cpu_seconds() - t);
    }
    std::printf("%-8s %-28s roof %5.0f | fwd %5.0f (%.2f)  bwd %5.0f (%.2f)  both %5.0f (%.2f)\n",
                cpu::isa().c_str(), row.name, roof, flops / fwd * 1e-9, flops / fwd * 1e-9 / roof,
                2.5 * flops / bwd * 1e-9, 2.5 * flops / bwd * 1e-9 / roof,
                3.5 * flops / (fwd + bwd) * 1e-9, 3.5 * flops / (fwd + bwd) * 1e-9 / roof);
    std::fflush(stdout);
  }
  return 0;
}
