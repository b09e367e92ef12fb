// The operator row by row in double precision, straight from the formulas of docs/design.md. Slow
// on purpose: the C++ tests compare every instruction set with it.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "half.h"
#include "problem.h"

namespace jft::reference {

inline double load(const Tensor& t, int64_t offset) {
  switch (t.dtype) {
    case DType::kF16:
      return cpu::f16_to_float(static_cast<const uint16_t*>(t.data)[offset]);
    case DType::kBF16:
      return cpu::bf16_to_float(static_cast<const uint16_t*>(t.data)[offset]);
    case DType::kF32:
      return static_cast<const float*>(t.data)[offset];
    case DType::kF64:
      return static_cast<const double*>(t.data)[offset];
    default:
      return 0.0;
  }
}

inline void store(const Tensor& t, int64_t offset, double x) {
  switch (t.dtype) {
    case DType::kF16:
      static_cast<uint16_t*>(t.data)[offset] = cpu::float_to_f16(static_cast<float>(x));
      break;
    case DType::kBF16:
      static_cast<uint16_t*>(t.data)[offset] = cpu::float_to_bf16(static_cast<float>(x));
      break;
    case DType::kF32:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
      break;
    case DType::kF64:
      static_cast<double*>(t.data)[offset] = x;
      break;
    default:
      break;
  }
}

inline int32_t load_i32(const Problem& p, Operand op, int64_t b, int64_t row = 0) {
  const Tensor& t = p.in[op];
  return static_cast<const int32_t*>(t.data)[batch_offset(p, t, b) + row * t.row];
}

inline int64_t at(const Problem& p, const Tensor& t, int64_t b, int64_t head, int64_t row,
                  int64_t col = 0) {
  return batch_offset(p, t, b) + head * t.head + row * t.row + col * t.col;
}

inline Positions positions(const Problem& p, int64_t b) {
  const Attrs& a = p.attrs;
  const auto scalar = [&](Operand op, int64_t absent) {
    return has(a.present, op) ? load_i32(p, op, b) : absent;
  };
  return make_positions(p.Sq, p.Sk, scalar(kQLengths, p.Sq), scalar(kKvLengths, p.Sk),
                        scalar(kQOffset, p.Sk - p.Sq), a.causal != 0,
                        scalar(kWindowLeft, a.window_left), scalar(kWindowRight, a.window_right));
}

// All facts of one row of logits.
struct Row {
  std::vector<double> s;             // logits, -inf where not visible
  std::vector<double> distance;      // |i + offset - j|
  std::vector<double> capped_slope;  // d capped / d raw
  std::vector<double> z;             // dropout factor
  std::vector<char> visible;
};

inline void compute_row(const Problem& p, int64_t b, int64_t h, int64_t i, Row& r) {
  const double kInf = std::numeric_limits<double>::infinity();
  const Positions pos = positions(p, b);
  const Range range = visible_keys(pos, i);
  const size_t n = static_cast<size_t>(p.Sk);
  r.s.assign(n, -kInf);
  r.distance.assign(n, 0.0);
  r.capped_slope.assign(n, 1.0);
  r.z.assign(n, 1.0);
  r.visible.assign(n, 0);
  for (int64_t j = range.begin; j < range.end; ++j) {
    const size_t J = static_cast<size_t>(j);
    if (has(p.attrs.present, kQSegmentIds) &&
        load_i32(p, kQSegmentIds, b, i) != load_i32(p, kKvSegmentIds, b, j)) {
      continue;
    }
    if (has(p.attrs.present, kMask) &&
        !static_cast<const uint8_t*>(p.in[kMask].data)[at(p, p.in[kMask], b, h, i, j)]) {
      continue;
    }
    double dot = 0.0;
    for (int64_t d = 0; d < p.D; ++d) {
      dot += load(p.in[kQ], at(p, p.in[kQ], b, h, i, d)) *
             load(p.in[kK], at(p, p.in[kK], b, h / p.G, j, d));
    }
    double s = dot * p.attrs.scale;
    if (p.attrs.softcap > 0.0) {
      const double t = std::tanh(s / p.attrs.softcap);
      s = p.attrs.softcap * t;
      r.capped_slope[J] = 1.0 - t * t;
    }
    if (has(p.attrs.present, kBias)) s += load(p.in[kBias], at(p, p.in[kBias], b, h, i, j));
    r.distance[J] = std::fabs(static_cast<double>(i + pos.offset - j));
    if (has(p.attrs.present, kAlibiSlopes)) {
      s -= load(p.in[kAlibiSlopes], at(p, p.in[kAlibiSlopes], b, h, 0)) * r.distance[J];
    }
    if (p.dropout_threshold > 0) {
      const Tensor& seed = p.in[kDropoutSeed];
      const Tensor& origin = p.in[kDropoutOrigin];
      const uint32_t* key = static_cast<const uint32_t*>(seed.data) + batch_offset(p, seed, b);
      const uint32_t* o = static_cast<const uint32_t*>(origin.data) + at(p, origin, b, h, 0);
      const uint32_t row = o[0] + static_cast<uint32_t>(i), col = o[1] + static_cast<uint32_t>(j);
      const Philox draws = dropout_draws(row, col / 8, o[2], key[0], key[1]);
      r.z[J] = dropout_keeps(dropout_draw(draws, static_cast<int>(col % 8)), p.dropout_threshold)
                   ? 65536.0 / (65536.0 - p.dropout_threshold)
                   : 0.0;
    }
    r.visible[J] = 1;
    r.s[J] = s;
  }
}

inline double sink_of(const Problem& p, int64_t b, int64_t h) {
  if (!has(p.attrs.present, kSinks)) return -std::numeric_limits<double>::infinity();
  return load(p.in[kSinks], at(p, p.in[kSinks], b, h, 0));
}

inline void forward(const Problem& p) {
  const double kInf = std::numeric_limits<double>::infinity();
  Row r;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.Hq; ++h) {
      for (int64_t i = 0; i < p.Sq; ++i) {
        compute_row(p, b, h, i, r);
        const double sink = sink_of(p, b, h);
        double m = sink;
        for (double s : r.s) m = s > m || std::isnan(s) ? s : m;
        double l = 0.0;
        const bool empty = m == -kInf;
        if (!empty) {
          for (double s : r.s) l += std::exp(s - m);
          l += std::exp(sink - m);
        }
        std::vector<double> o(static_cast<size_t>(p.Dv), 0.0);
        for (int64_t j = 0; j < p.Sk && !empty; ++j) {
          const size_t J = static_cast<size_t>(j);
          if (!r.visible[J]) continue;
          const double w = std::exp(r.s[J] - m) / l * r.z[J];
          for (int64_t d = 0; d < p.Dv; ++d) {
            o[static_cast<size_t>(d)] += w * load(p.in[kV], at(p, p.in[kV], b, h / p.G, j, d));
          }
        }
        for (int64_t d = 0; d < p.Dv; ++d) {
          store(p.out[kResO], at(p, p.out[kResO], b, h, i, d), o[static_cast<size_t>(d)]);
        }
        store(p.out[kResRowMax], at(p, p.out[kResRowMax], b, h, i), empty ? 0.0 : m);
        store(p.out[kResRowLogSum], at(p, p.out[kResRowLogSum], b, h, i),
              empty ? kEmptyRow : std::log(l));
      }
    }
  }
}

// Sums in double for one gradient result, addressed with the result's own strides.
struct Sum {
  const Tensor& t;
  std::vector<double> data;

  Sum(const Problem& p, Result slot, int64_t heads, int64_t rows, int64_t cols) : t(p.out[slot]) {
    if (!t.data) return;
    // A stride of 0 marks a dimension of size 1.
    int64_t count = (t.head ? heads : 1) * (t.row ? rows : 1) * (t.col ? cols : 1);
    for (int d = 0; d < p.batch_dims; ++d) count *= t.batch[d] ? p.batch_size[d] : 1;
    data.assign(static_cast<size_t>(count), 0.0);
  }
  void add(int64_t offset, double x) {
    if (t.data) data[static_cast<size_t>(offset)] += x;
  }
  ~Sum() {
    for (size_t n = 0; n < data.size(); ++n) store(t, static_cast<int64_t>(n), data[n]);
  }
};

inline void backward(const Problem& p) {
  Sum dq(p, kResDQ, p.Hq, p.Sq, p.D), dk(p, kResDK, p.Hkv, p.Sk, p.D);
  Sum dv(p, kResDV, p.Hkv, p.Sk, p.Dv), dbias(p, kResDBias, p.Hq, p.Sq, p.Sk);
  Sum dalibi(p, kResDAlibi, p.Hq, 1, 1), dsinks(p, kResDSinks, p.Hq, 1, 1);
  Row r;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.Hq; ++h) {
      for (int64_t i = 0; i < p.Sq; ++i) {
        const auto in = [&](Operand op, int64_t head, int64_t row, int64_t col) {
          return load(p.in[op], at(p, p.in[op], b, head, row, col));
        };
        const double m = in(kRowMax, h, i, 0), c = in(kRowLogSum, h, i, 0);
        if (c >= kEmptyRow / 2) continue;
        const double dl = has(p.attrs.present, kDLse) ? in(kDLse, h, i, 0) : 0.0;
        const double sink = sink_of(p, b, h);
        const double p_sink = std::exp((sink - m) - c);
        compute_row(p, b, h, i, r);
        bool any = false;
        for (char v : r.visible) any |= v != 0;
        if (!any) {  // empty row with a sink: only dL counts
          dsinks.add(at(p, dsinks.t, b, h, 0), p_sink * dl);
          continue;
        }
        // rowsum(o * do) by its definition: the stored o is rounded to 16 bits, and where a row
        // sees one key (ds = 0) that rounding would be all of the gradient.
        double delta = -dl;
        for (int64_t j = 0; j < p.Sk; ++j) {
          const size_t J = static_cast<size_t>(j);
          if (!r.visible[J]) continue;
          double dp = 0.0;
          for (int64_t d = 0; d < p.Dv; ++d) dp += in(kDO, h, i, d) * in(kV, h / p.G, j, d);
          delta += std::exp((r.s[J] - m) - c) * r.z[J] * dp;
        }
        if (sink > -std::numeric_limits<double>::infinity()) {
          dsinks.add(at(p, dsinks.t, b, h, 0), -p_sink * delta);
        }
        for (int64_t j = 0; j < p.Sk; ++j) {
          const size_t J = static_cast<size_t>(j);
          if (!r.visible[J]) continue;
          const double weight = std::exp((r.s[J] - m) - c);
          double dp = 0.0;
          for (int64_t d = 0; d < p.Dv; ++d) {
            dp += in(kDO, h, i, d) * in(kV, h / p.G, j, d);
            dv.add(at(p, dv.t, b, h / p.G, j, d), weight * r.z[J] * in(kDO, h, i, d));
          }
          double ds = weight * (r.z[J] * dp - delta);
          if (dbias.t.data) dbias.add(at(p, dbias.t, b, h, i, j), ds);
          if (dalibi.t.data) dalibi.add(at(p, dalibi.t, b, h, 0), -ds * r.distance[J]);
          ds *= r.capped_slope[J] * p.attrs.scale;
          for (int64_t d = 0; d < p.D; ++d) {
            dq.add(at(p, dq.t, b, h, i, d), ds * in(kK, h / p.G, j, d));
            dk.add(at(p, dk.t, b, h / p.G, j, d), ds * in(kQ, h, i, d));
          }
        }
      }
    }
  }
}

}  // namespace jft::reference
