// Forward and backward of every instruction set that this machine has, against the double-precision
// reference, on random calls that mix every option.  kernels_test [number of calls] [first seed]
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "check.h"
#include "isa.h"
#include "launch.h"
#include "problems.h"

namespace jft::testing {
namespace {

double tolerance(DType t) {
  return t == DType::kF64 ? 1e-11 : t == DType::kF32 ? 4e-5 : t == DType::kF16 ? 4e-3 : 3e-2;
}

// Largest difference relative to the largest magnitude, or to `floor` where the sums cancel.
void compare(const char* what, const std::vector<double>& got, const std::vector<double>& want,
             double tol, const std::string& text, double floor = 0.1) {
  double scale = floor, worst = 0.0;
  for (double x : want) {
    if (std::fabs(x) < 1e29 && std::fabs(x) > scale) scale = std::fabs(x);
  }
  for (size_t n = 0; n < want.size(); ++n) {
    double error = std::fabs(got[n] - want[n]) / scale;
    if (got[n] == want[n]) error = 0;
    if (std::isnan(got[n]) || std::isnan(want[n])) error = 1e300;
    if (error < 1e299 && std::fabs(want[n]) >= 1e29) error = std::fabs(got[n] / want[n] - 1);
    worst = std::max(worst, error);
  }
  if (!(worst <= tol)) {
    ++failures;
    std::printf("FAIL %-12s error %.2e > %.0e   %s\n", what, worst, tol, text.c_str());
  }
}

void check(const Options& o, uint64_t seed, int64_t threads) {
  const std::string text = cpu::isa() + " seed " + std::to_string(seed) + " " + o.text();
  Call want(o, seed), got(o, seed);
  reference::forward(want.p);
  {
    Threads pool(threads);
    if (!cpu::launch_forward(got.p, pool)) ++failures;
  }
  const double tol = tolerance(o.dtype), acc_tol = o.dtype == DType::kF64 ? 1e-11 : 2e-5;
  compare("o", got.values(got.p.out[kResO]), want.values(want.p.out[kResO]), tol, text);
  compare("row_max", got.values(got.p.out[kResRowMax]), want.values(want.p.out[kResRowMax]),
          acc_tol, text);
  compare("row_log_sum", got.values(got.p.out[kResRowLogSum]),
          want.values(want.p.out[kResRowLogSum]), acc_tol, text);

  const Problem wb = want.backward(), gb = got.backward();
  reference::backward(wb);
  {
    Threads pool(threads);
    if (!cpu::launch_backward(gb, pool)) ++failures;
  }
  const char* names[kNumResults] = {"dq", "dk", "dv", "dbias", "dalibi", "dsinks"};
  for (int r = 0; r < kNumResults; ++r) {
    if (!gb.out[r].data) continue;
    const double loose = std::max(tol, tolerance(gb.out[r].dtype));
    // Sums of ds over whole rows cancel exactly; what is left is the rounding of their terms.
    double floor = 0.1;
    if (r == kResDK) floor *= std::max(1.0, std::sqrt(double(o.Sq * o.Hq / o.Hkv) / 64));
    if (r == kResDBias) floor *= std::sqrt(static_cast<double>(o.Sq * o.Sk + 1));
    if (r == kResDAlibi) floor *= static_cast<double>(o.Sq + o.Sk);
    compare(names[r], got.values(gb.out[r]), want.values(wb.out[r]), 2 * loose, text, floor);
  }
  // The same bits with another number of threads.
  const Problem again = got.backward();
  {
    Threads pool(threads == 1 ? 3 : 1);
    if (!cpu::launch_backward(again, pool)) ++failures;
  }
  for (int r = 0; r < kNumResults; ++r) {
    if (!gb.out[r].data) continue;
    const auto a = got.values(gb.out[r]), b = got.values(again.out[r]);
    if (!a.empty() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) != 0) {
      ++failures;
      std::printf("FAIL %s depends on the number of threads   %s\n", names[r], text.c_str());
    }
  }
}

Options random_options(uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto pick = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(rng); };
  const auto chance = [&] { return pick(0, 2) == 0; };
  Options o;
  const DType types[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  o.dtype = types[pick(0, 4)];
  const int sizes[] = {0, 1, 2, 7, 17, 63, 64, 65, 100, 128, 129, 200};
  o.Sq = sizes[pick(0, 11)], o.Sk = sizes[pick(0, 11)];
  o.Hkv = pick(1, 2), o.Hq = o.Hkv * pick(1, 3);
  const int features[] = {1, 2, 3, 8, 16, 17, 24, 33, 64, 72};
  o.D = features[pick(0, 9)], o.Dv = chance() ? features[pick(0, 9)] : o.D;
  o.batch.clear();
  for (int d = pick(0, 2); d > 0; --d) o.batch.push_back(pick(1, 2));
  if (pick(0, 40) == 0) o.batch = {0};
  o.scale = 1.0 / std::sqrt(static_cast<double>(o.D));
  if (pick(0, 9) == 0) o.scale = -0.2;
  o.bnth = chance(), o.causal = chance(), o.q_offset = chance(), o.q_lengths = chance();
  o.kv_lengths = chance(), o.segments = chance(), o.sorted_segments = chance(), o.mask = chance();
  o.bias = chance(), o.alibi = chance(), o.sinks = chance(), o.dlse = chance();
  o.broadcast_batch = chance(), o.gradients_summed = chance(), o.poison = chance();
  o.infinite_bias = chance(), o.traced_window = chance() && chance();
  if (chance()) o.left = pick(0, 40);
  if (chance()) o.right = pick(0, 40);
  o.bias_dtype = types[pick(0, 4)];
  o.bias_shape = pick(0, 7), o.mask_shape = pick(0, 7);
  if (chance()) o.softcap = 2.0;
  if (chance()) o.dropout = 0.3;
  return o;
}

}  // namespace
}  // namespace jft::testing

int main(int argc, char** argv) {
  using namespace jft::testing;
  const int count = argc > 1 ? std::atoi(argv[1]) : 300;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (const std::string& level : jft::cpu::isa_levels()) {
    jft::cpu::set_isa(level);
    for (int n = 0; n < count; ++n) {
      const uint64_t seed = first + static_cast<uint64_t>(n);
      check(random_options(seed), seed, 1 + n % 3);
    }
    std::printf("kernels_test: %s, %d calls, %d failures so far\n", level.c_str(), count, failures);
  }
  return failures != 0;
}
