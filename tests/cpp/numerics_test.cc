// Rows of logits far from zero, and what hides at the edges: the weights of a row must sum to one
// in both passes wherever its logits sit, and padding, tails and empty rows must contribute exactly
// zero.
#include <cfloat>
#include <cmath>

#include "check.h"
#include "isa.h"
#include "launch.h"
#include "problems.h"

namespace jft::testing {
namespace {

void fill(const Tensor& t, int64_t count, double x) {
  for (int64_t n = 0; n < count; ++n) reference::store(t, n, x);
}

// With v = 1, o is the sum of the weights; with do = 1, so is sum(dv) per row.
void weights_sum_to_one(DType dtype, int64_t S, double level, bool through_bias) {
  Options o;
  o.dtype = dtype, o.Sq = o.Sk = S, o.Hq = o.Hkv = 1, o.D = 16, o.Dv = 1;
  o.bias = through_bias, o.bias_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  o.scale = through_bias ? 0.25 : 1.0;
  Call call(o, 3);
  fill(call.p.in[kV], S, 1.0);
  if (through_bias) {
    fill(call.p.in[kBias], S * S, level);
  } else {  // the dot products themselves are about `level`, with a little spread
    for (int64_t n = 0; n < S * o.D; ++n) {
      const double wiggle = 1.0 + 1e-7 * static_cast<double>(n % 7);
      reference::store(call.p.in[kQ], n, std::sqrt(std::fabs(level) / 16.0) * wiggle);
      reference::store(call.p.in[kK], n,
                       std::copysign(std::sqrt(std::fabs(level) / 16.0), level) * wiggle);
    }
  }
  Threads pool(1);
  CHECK(cpu::launch_forward(call.p, pool));
  Problem b = call.backward();
  fill(b.in[kDO], S, 1.0);
  CHECK(cpu::launch_backward(b, pool));
  double sum = 0.0, worst = 0.0;
  for (double x : call.values(call.p.out[kResO])) worst = std::fmax(worst, std::fabs(x - 1.0));
  for (double x : call.values(b.out[kResDV])) sum += x;
  const double backward = std::fabs(sum / static_cast<double>(S) - 1.0);
  if (!CHECK(worst < 1e-5 && backward < 1e-5)) {
    std::printf("  %s level %g S %lld bias %d: forward %.2e backward %.2e\n", cpu::isa().c_str(),
                level, static_cast<long long>(S), through_bias, worst, backward);
  }
  for (int r = 0; r < kNumResults; ++r) {
    for (double x : call.values(b.out[r])) {
      if (!CHECK(std::isfinite(x))) return;
    }
  }
}

// A row with some keys at finfo.min gives them weight 0 and stays finite.
void lowest_beside_ordinary() {
  Options o;
  o.Sq = 65, o.Sk = 130, o.Hq = o.Hkv = 1, o.D = o.Dv = 8, o.bias = true, o.bias_shape = 4;
  Call call(o, 4), want(o, 4);
  for (int64_t j = 0; j < 130; ++j) {
    for (Call* c : {&call, &want}) reference::store(c->p.in[kBias], j, j < 70 ? -FLT_MAX : 0.0);
  }
  Threads pool(1);
  CHECK(cpu::launch_forward(call.p, pool));
  reference::forward(want.p);
  const auto got = call.values(call.p.out[kResO]), ref = want.values(want.p.out[kResO]);
  for (size_t n = 0; n < got.size(); ++n) CHECK(std::fabs(got[n] - ref[n]) < 1e-5);
  const Problem b = call.backward();
  CHECK(cpu::launch_backward(b, pool));
  for (double x : call.values(b.out[kResDQ])) CHECK(std::isfinite(x));
  const auto dk = call.values(b.out[kResDK]);
  for (size_t n = 0; n < 70 * 8; ++n) CHECK(dk[n] == 0.0);
}

// Logits near -100 with a tail of keys: a padded score of 0 must not become exp(100).
void tail_below_zero() {
  for (int64_t S : {64, 65, 192, 200}) {
    Options o;
    o.dtype = DType::kBF16, o.Sq = o.Sk = S, o.Hq = o.Hkv = 1, o.D = o.Dv = 64, o.scale = 1.0;
    Call call(o, 5), want(o, 5);
    for (Call* c : {&call, &want}) {
      fill(c->p.in[kQ], S * 64, 1.25);
      fill(c->p.in[kK], S * 64, -1.25);
    }
    Threads pool(1);
    CHECK(cpu::launch_forward(call.p, pool));
    reference::forward(want.p);
    const Problem b = call.backward(), w = want.backward();
    CHECK(cpu::launch_backward(b, pool));
    reference::backward(w);
    const auto dv = call.values(b.out[kResDV]), ref = want.values(w.out[kResDV]);
    for (size_t n = 0; n < dv.size(); ++n) CHECK(std::fabs(dv[n] - ref[n]) < 0.02);
    for (double x : call.values(b.out[kResDQ])) CHECK(std::isfinite(x));
  }
}

// A NaN that a query does see reaches its output: nothing is silently repaired.
void visible_nan_stays() {
  Options o;
  o.Sq = o.Sk = 70, o.Hq = o.Hkv = 1, o.D = o.Dv = 8, o.causal = true;
  for (Operand op : {kK, kV, kQ}) {
    Call call(o, 6);
    reference::store(call.p.in[op], 40 * 8 + 3, std::nan(""));
    Threads pool(1);
    CHECK(cpu::launch_forward(call.p, pool));
    const auto out = call.values(call.p.out[kResO]);
    CHECK(std::isnan(out[40 * 8 + 3]));
    // Row 39 does not see key 40. The guarantee about values is per key, and 40 is seen by others.
    if (op != kV) CHECK(!std::isnan(out[39 * 8 + 3]));
    if (op != kQ) CHECK(std::isnan(out[69 * 8 + 3]));
  }
}

}  // namespace
}  // namespace jft::testing

int main() {
  using namespace jft;
  using namespace jft::testing;
  for (const std::string& level : cpu::isa_levels()) {
    cpu::set_isa(level);
    for (DType t : {DType::kF32, DType::kF64}) {
      for (int64_t S : {5, 64, 100}) {
        for (double x : {0.0, -65504.0, -1e9, -1e30, -static_cast<double>(FLT_MAX), 1e4, 8e6}) {
          weights_sum_to_one(t, S, x, true);
        }
        for (double x : {1e4, 8e6, -1e4, -8e6}) weights_sum_to_one(t, S, x, false);
      }
    }
    lowest_beside_ordinary();
    tail_below_zero();
    visible_nan_stays();
  }
  std::printf("numerics_test: %d failures\n", failures);
  return failures != 0;
}
