// Random attention calls in plain memory, for the tests that run kernels without XLA. Every buffer
// has exactly its size, so that AddressSanitizer sees a read past an end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "parallel.h"
#include "problem.h"
#include "reference.h"

namespace jft::testing {

// A pool of real threads; the destructor waits for what was scheduled.
class Threads : public cpu::Executor {
 public:
  explicit Threads(int64_t n) : n_(n) {}
  ~Threads() override {
    for (auto& t : threads_) t.join();
  }
  int64_t threads() const override { return n_; }
  void schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }

 private:
  int64_t n_;
  std::deque<std::thread> threads_;
};

struct Options {
  DType dtype = DType::kF32;
  int64_t Sq = 8, Sk = 8, Hq = 2, Hkv = 1, D = 8, Dv = 8;
  std::vector<int64_t> batch{1};
  bool bnth = false, causal = false, q_offset = false, q_lengths = false, kv_lengths = false;
  bool traced_window = false, segments = false, sorted_segments = false, mask = false, bias = false;
  bool alibi = false, sinks = false, dlse = false, broadcast_batch = false,
       gradients_summed = false;
  bool poison = false;  // NaN where no query looks
  bool infinite_bias = false;
  int64_t left = -1, right = -1;
  DType bias_dtype = DType::kF32;
  int bias_shape = 7, mask_shape = 7;  // bits: full heads, rows, columns
  double softcap = 0.0, dropout = 0.0, scale = 0.3;

  std::string text() const {
    std::string s = "dtype " + std::to_string(static_cast<int>(dtype));
    const auto add = [&](const char* name, double x) {
      if (x != 0) s += std::string(" ") + name + "=" + std::to_string(x).substr(0, 6);
    };
    add("Sq", static_cast<double>(Sq)), add("Sk", static_cast<double>(Sk));
    add("Hq", static_cast<double>(Hq)), add("Hkv", static_cast<double>(Hkv));
    add("D", static_cast<double>(D)), add("Dv", static_cast<double>(Dv));
    for (int64_t b : batch) s += " batch=" + std::to_string(b);
    add("bnth", bnth), add("causal", causal), add("q_offset", q_offset);
    add("q_lengths", q_lengths), add("kv_lengths", kv_lengths), add("traced_window", traced_window);
    add("segments", segments), add("sorted", sorted_segments), add("mask", mask);
    add("mask_shape", mask ? mask_shape : 0), add("bias", bias);
    add("bias_shape", bias ? bias_shape : 0), add("bias_dtype", static_cast<int>(bias_dtype));
    add("infinite_bias", infinite_bias), add("alibi", alibi), add("sinks", sinks);
    add("dlse", dlse), add("broadcast_batch", broadcast_batch);
    add("gradients_summed", gradients_summed), add("poison", poison);
    add("left", static_cast<double>(left)), add("right", static_cast<double>(right));
    add("softcap", softcap), add("dropout", dropout), add("scale", scale);
    return s;
  }
};

class Call {
 public:
  Problem p{};
  std::mt19937_64 rng;

  Call(const Options& o, uint64_t seed) : rng(seed), o_(o) {
    p.dtype = o.dtype;
    p.batch_dims = static_cast<int32_t>(o.batch.size());
    p.B = 1;
    for (int64_t& size : p.batch_size) size = 1;
    for (size_t d = 0; d < o.batch.size(); ++d) {
      p.batch_size[d] = o.batch[d];
      p.B *= o.batch[d];
    }
    p.Sq = o.Sq, p.Sk = o.Sk, p.Hq = o.Hq, p.Hkv = o.Hkv, p.G = o.Hq / o.Hkv;
    p.D = o.D, p.Dv = o.Dv;
    p.attrs.causal = o.causal;
    p.attrs.scale = o.scale;
    p.attrs.softcap = o.softcap;
    p.attrs.dropout_rate = o.dropout;
    p.dropout_threshold = static_cast<uint32_t>(std::lround(o.dropout * 65536));
    p.attrs.window_left = o.traced_window ? -1 : o.left;
    p.attrs.window_right = o.traced_window ? -1 : o.right;
    const DType acc = accumulator(o.dtype);

    dense(p.in[kQ], o.Sq, o.Hq, o.D, maybe_one());
    dense(p.in[kK], o.Sk, o.Hkv, o.D, maybe_one());
    dense(p.in[kV], o.Sk, o.Hkv, o.Dv, maybe_one());
    for (Operand op : {kQ, kK, kV}) normal(p.in[op]);
    const int s = static_cast<int>(o.Sk), q = static_cast<int>(o.Sq);
    if (o.q_offset) integers(kQOffset, 0, -q / 2 - 2, s);
    if (o.traced_window) {
      integers(kWindowLeft, 0, 0, s), integers(kWindowRight, 0, 0, s);
    }
    if (o.segments) {
      integers(kQSegmentIds, o.Sq, 0, 3), integers(kKvSegmentIds, o.Sk, 0, 3);
      if (o.sorted_segments) sort_ids(kQSegmentIds, o.Sq), sort_ids(kKvSegmentIds, o.Sk);
    }
    if (o.q_lengths) integers(kQLengths, 0, -1, q + 2);
    if (o.kv_lengths) integers(kKvLengths, 0, -1, s + 2);
    if (o.mask) {
      logits(p.in[kMask], DType::kBool, o.mask_shape, maybe_one());
      const int kind = pick(0, 3);  // mostly on, mostly off, blocks of both
      auto* m = static_cast<uint8_t*>(p.in[kMask].data);
      for (int64_t n = 0; n < last_count_; ++n) {
        m[n] = kind == 0 ? pick(0, 9) != 0 : kind == 1 ? pick(0, 9) == 0 : (n / 97) % 2 == 0;
      }
    }
    if (o.bias) {
      logits(p.in[kBias], o.bias_dtype, o.bias_shape, maybe_one());
      normal(p.in[kBias]);
      for (int64_t n = 0; n < last_count_ && o.infinite_bias; ++n) {
        if (pick(0, 4) == 0) {
          reference::store(p.in[kBias], n, -std::numeric_limits<double>::infinity());
        }
      }
    }
    if (o.alibi) heads(p.in[kAlibiSlopes], acc, maybe_one()), normal(p.in[kAlibiSlopes], 0.05);
    if (o.sinks) heads(p.in[kSinks], acc, maybe_one()), normal(p.in[kSinks]);
    if (o.dropout > 0) {
      shape(p.in[kDropoutSeed], DType::kU32, maybe_one(), {}, 2);
      p.in[kDropoutSeed].col = 1;
      bits(p.in[kDropoutSeed], 0xffffffffu);
      shape(p.in[kDropoutOrigin], DType::kU32, maybe_one(), {}, o.Hq * 3);
      p.in[kDropoutOrigin].head = 3, p.in[kDropoutOrigin].col = 1;
      bits(p.in[kDropoutOrigin], 1000u);
    }
    for (int op = 0; op < kNumOperands; ++op) {
      if (p.in[op].data) p.attrs.present |= int64_t{1} << op;
    }
    if (o.poison) poison();
    // Forward results.
    dense(p.out[kResO], o.Sq, o.Hq, o.Dv, false);
    rows(p.out[kResRowMax], acc), rows(p.out[kResRowLogSum], acc);
  }

  // The backward of the same call: residual from this call's forward results.
  Problem backward() {
    Problem b = p;
    b.in[kO] = p.out[kResO], b.in[kRowMax] = p.out[kResRowMax];
    b.in[kRowLogSum] = p.out[kResRowLogSum];
    if (!d_o_.data) {
      dense(d_o_, p.Sq, p.Hq, p.Dv, false);
      normal(d_o_);
      rows(dlse_, accumulator(p.dtype));
      normal(dlse_);
      if (o_.poison) poison_cotangents();
    }
    b.in[kDO] = d_o_;
    for (Operand op : {kO, kRowMax, kRowLogSum, kDO}) b.attrs.present |= int64_t{1} << op;
    if (o_.dlse) b.in[kDLse] = dlse_, b.attrs.present |= int64_t{1} << kDLse;
    for (Tensor& t : b.out) t = Tensor{};
    const uint64_t state = rng();
    rng.seed(17);  // the same shapes whenever this is called
    const auto one = [&] { return o_.gradients_summed ? ones() : 0u; };
    dense(b.out[kResDQ], p.Sq, p.Hq, p.D, one());
    dense(b.out[kResDK], p.Sk, p.Hkv, p.D, one());
    dense(b.out[kResDV], p.Sk, p.Hkv, p.Dv, one());
    if (o_.bias) logits(b.out[kResDBias], o_.bias_dtype, o_.bias_shape, one());
    if (o_.alibi) heads(b.out[kResDAlibi], accumulator(p.dtype), one());
    if (o_.sinks) heads(b.out[kResDSinks], accumulator(p.dtype), one());
    rng.seed(state);
    return b;
  }

  std::vector<double> values(const Tensor& t) const {
    std::vector<double> v(static_cast<size_t>(count_of(t)));
    for (size_t n = 0; n < v.size(); ++n) v[n] = reference::load(t, static_cast<int64_t>(n));
    return v;
  }

  int pick(int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(rng); }

 private:
  Options o_;
  Tensor d_o_{}, dlse_{};
  struct Memory {
    std::vector<char> bytes;
    int64_t count;
  };
  std::deque<Memory> memory_;
  int64_t last_count_ = 0;

  unsigned ones() { return static_cast<unsigned>(pick(0, 255)); }
  unsigned maybe_one() { return o_.broadcast_batch ? ones() : 0u; }

  int64_t count_of(const Tensor& t) const {
    for (const Memory& m : memory_) {
      if (m.bytes.data() == t.data) return m.count;
    }
    return 0;
  }

  // Row-major buffer of the batch dimensions (bit d of `one`: size 1) times `inner` elements.
  void shape(Tensor& t, DType dtype, unsigned one, std::vector<int64_t>, int64_t inner) {
    t.dtype = dtype;
    int64_t stride = inner;
    for (int d = p.batch_dims - 1; d >= 0; --d) {
      const bool single = ((one >> d) & 1) || p.batch_size[d] == 1;
      t.batch[d] = single ? 0 : stride;
      if (!single) stride *= p.batch_size[d];
    }
    last_count_ = stride;
    memory_.push_back(
        {std::vector<char>(static_cast<size_t>(stride * byte_width(dtype)) + (stride ? 0 : 1)),
         stride});
    memory_.back().bytes.shrink_to_fit();
    t.data = memory_.back().bytes.data();
    // Results start as garbage: a kernel that forgets to write one is caught.
    std::memset(t.data, 0x7d, memory_.back().bytes.size());
  }
  void dense(Tensor& t, int64_t seq, int64_t heads, int64_t features, unsigned one) {
    shape(t, p.dtype, one, {}, seq * heads * features);
    t.col = 1;
    t.row = o_.bnth ? features : heads * features;
    t.head = o_.bnth ? seq * features : features;
  }
  void rows(Tensor& t, DType dtype) {
    shape(t, dtype, 0, {}, p.Hq * p.Sq);
    t.head = p.Sq, t.row = 1;
  }
  void heads(Tensor& t, DType dtype, unsigned one) {
    shape(t, dtype, one, {}, p.Hq);
    t.head = 1;
  }
  void logits(Tensor& t, DType dtype, int full, unsigned one) {
    const int64_t h = full & 1 ? p.Hq : 1, r = full & 2 ? p.Sq : 1, c = full & 4 ? p.Sk : 1;
    shape(t, dtype, one, {}, h * r * c);
    t.head = h == 1 ? 0 : r * c, t.row = r == 1 ? 0 : c, t.col = c == 1 ? 0 : 1;
  }
  void normal(Tensor& t, double sigma = 1.0) {
    std::normal_distribution<double> n(0.0, sigma);
    for (int64_t k = 0; k < count_of(t); ++k) reference::store(t, k, n(rng));
  }
  void bits(Tensor& t, uint32_t mask) {
    for (int64_t k = 0; k < count_of(t); ++k) {
      static_cast<uint32_t*>(t.data)[k] = static_cast<uint32_t>(rng()) & mask;
    }
  }
  void integers(Operand op, int64_t per_batch, int lo, int hi) {
    shape(p.in[op], DType::kI32, maybe_one(), {}, per_batch ? per_batch : 1);
    p.in[op].row = per_batch ? 1 : 0;
    for (int64_t k = 0; k < last_count_; ++k)
      static_cast<int32_t*>(p.in[op].data)[k] = pick(lo, hi);
  }
  void sort_ids(Operand op, int64_t n) {
    auto* ids = static_cast<int32_t*>(p.in[op].data);
    for (int64_t k = 0; k < count_of(p.in[op]) / (n ? n : 1); ++k)
      std::sort(ids + k * n, ids + (k + 1) * n);
  }

  // NaN in keys and values that no query of their batch element and group sees.
  void poison() {
    for (int d = 0; d < p.batch_dims; ++d) {
      for (Operand op : {kK, kV})
        if (p.in[op].batch[d] == 0 && p.batch_size[d] > 1) return;
    }
    reference::Row r;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t kv = 0; kv < p.Hkv; ++kv) {
        std::vector<char> seen(static_cast<size_t>(p.Sk), 0);
        for (int64_t h = kv * p.G; h < (kv + 1) * p.G; ++h) {
          for (int64_t i = 0; i < p.Sq; ++i) {
            reference::compute_row(p, b, h, i, r);
            for (size_t j = 0; j < seen.size(); ++j) seen[j] |= r.visible[j];
          }
        }
        for (int64_t j = 0; j < p.Sk; ++j) {
          if (seen[static_cast<size_t>(j)]) continue;
          const double bad = pick(0, 1) ? std::nan("") : std::numeric_limits<double>::infinity();
          for (int64_t d = 0; d < p.D; ++d) {
            reference::store(p.in[kK], reference::at(p, p.in[kK], b, kv, j, d), bad);
          }
          for (int64_t d = 0; d < p.Dv; ++d) {
            reference::store(p.in[kV], reference::at(p, p.in[kV], b, kv, j, d), bad);
          }
        }
      }
    }
  }
  // NaN in do and dL (where no sink can receive it) of rows that see nothing.
  void poison_cotangents() {
    reference::Row r;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t h = 0; h < p.Hq; ++h) {
        for (int64_t i = 0; i < p.Sq; ++i) {
          reference::compute_row(p, b, h, i, r);
          bool any = false;
          for (char v : r.visible) any |= v != 0;
          if (any) continue;
          for (int64_t d = 0; d < p.Dv; ++d) {
            reference::store(d_o_, reference::at(p, d_o_, b, h, i, d), std::nan(""));
          }
          if (!o_.sinks) reference::store(dlse_, reference::at(p, dlse_, b, h, i), std::nan(""));
        }
      }
    }
  }
};

}  // namespace jft::testing
