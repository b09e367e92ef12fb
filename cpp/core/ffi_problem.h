// Builds and checks the Problem of one FFI call. Header only and free of backend facts: the CPU and
// the CUDA handlers call problem_from_ffi() and then trust every size and stride in the result.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "ffi_check.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jft {

enum class Pass { kForward, kBackward };

namespace ffi_detail {

// What one trailing dimension of a buffer means; it sets a stride of Tensor and an allowed size.
enum class Dim { kRow, kHead, kCol };

struct Expected {
  Dim dim;
  int64_t size;
  bool may_be_one;  // broadcast: size 1 is read with stride 0
};

struct Builder {
  Problem& p;

  int64_t batch_dims() const { return p.batch_dims; }

  ffi::Error error(const char* name, const std::string& required, const ffi::AnyBuffer& b) const {
    return invalid(name, required, dtype_text(dtype_of(b)) + shape_text(b));
  }

  // A leading dimension is 1 or the full size; the first size other than 1 that comes is the full
  // one.
  ffi::Error learn_batch(const char* name, const ffi::AnyBuffer& b) {
    auto dims = b.dimensions();
    if (static_cast<int64_t>(dims.size()) < batch_dims()) {
      return error(name, "must have " + std::to_string(batch_dims()) + " leading dimensions", b);
    }
    for (int d = 0; d < batch_dims(); ++d) {
      if (dims[d] == 1 || dims[d] == p.batch_size[d]) continue;
      if (p.batch_size[d] != 1) {
        return error(name,
                     "must have leading dimension " + std::to_string(d) + " of size 1 or " +
                         std::to_string(p.batch_size[d]),
                     b);
      }
      p.batch_size[d] = dims[d];
    }
    return ffi::Error::Success();
  }

  // Fills `t` from a row-major buffer whose trailing dimensions are `expected`. The leading ones
  // must be 1 or full, or exactly full (`batch_full`: forward results).
  ffi::Error tensor(const char* name, const ffi::AnyBuffer& b, DType dtype,
                    const Expected* expected, int trailing, bool batch_full, Tensor& t) const {
    auto dims = b.dimensions();
    std::string shape = "must be " + std::string(dtype_text(dtype)) + "[batch..";
    for (int i = 0; i < trailing; ++i) {
      shape += ", " + std::to_string(expected[i].size) + (expected[i].may_be_one ? " or 1" : "");
    }
    shape += "]";
    if (dtype_of(b) != dtype || static_cast<int64_t>(dims.size()) != batch_dims() + trailing) {
      return error(name, shape, b);
    }
    // Present but empty buffers may come with a null pointer, which would read as absent.
    static int64_t nothing = 0;
    t = Tensor{};
    t.data = b.untyped_data() ? b.untyped_data() : &nothing;
    t.dtype = dtype;
    int64_t stride = 1;
    for (int i = trailing - 1; i >= 0; --i) {
      const int64_t size = dims[batch_dims() + i];
      if (size != expected[i].size && !(expected[i].may_be_one && size == 1)) {
        return error(name, shape, b);
      }
      // Only dimensions that may broadcast get stride 0 at size 1, so that a stride tells a kernel
      // whether a gradient of this shape is summed over the dimension.
      const int64_t step = expected[i].may_be_one && size == 1 ? 0 : stride;
      if (expected[i].dim == Dim::kRow) t.row = step;
      if (expected[i].dim == Dim::kHead) t.head = step;
      if (expected[i].dim == Dim::kCol) t.col = step;
      stride *= size;
    }
    for (int d = static_cast<int>(batch_dims()) - 1; d >= 0; --d) {
      if (dims[d] != p.batch_size[d] && (batch_full || dims[d] != 1)) {
        return error(name,
                     "must have leading dimension " + std::to_string(d) + " of size " +
                         std::to_string(p.batch_size[d]) + (batch_full ? "" : " or 1"),
                     b);
      }
      t.batch[d] = dims[d] == 1 ? 0 : stride;
      stride *= dims[d];
    }
    return ffi::Error::Success();
  }

  // [b.., seq, heads, features] or [b.., heads, seq, features].
  ffi::Error dense(const char* name, const ffi::AnyBuffer& b, int64_t seq, int64_t heads,
                   int64_t features, bool batch_full, Tensor& t) const {
    const Expected row{Dim::kRow, seq, false}, head{Dim::kHead, heads, false};
    const Expected col{Dim::kCol, features, false};
    const bool btnh = p.attrs.layout == static_cast<int64_t>(Layout::kBTNH);
    const Expected expected[3] = {btnh ? row : head, btnh ? head : row, col};
    return tensor(name, b, p.dtype, expected, 3, batch_full, t);
  }

  // [b.., Hq, Sq] in both layouts.
  ffi::Error row_facts(const char* name, const ffi::AnyBuffer& b, bool batch_full,
                       Tensor& t) const {
    const Expected expected[2] = {{Dim::kHead, p.Hq, false}, {Dim::kRow, p.Sq, false}};
    return tensor(name, b, accumulator(p.dtype), expected, 2, batch_full, t);
  }

  // [b.., Hq|1, Sq|1, Sk|1].
  ffi::Error logits(const char* name, const ffi::AnyBuffer& b, DType dtype, Tensor& t) const {
    const Expected expected[3] = {
        {Dim::kHead, p.Hq, true}, {Dim::kRow, p.Sq, true}, {Dim::kCol, p.Sk, true}};
    return tensor(name, b, dtype, expected, 3, false, t);
  }

  // The shape rule of each operand, in one place.
  ffi::Error operand(Operand op, const ffi::AnyBuffer& b) const {
    const char* name = operand_name(op);
    Tensor& t = p.in[op];
    switch (op) {
      case kQ:
        return dense(name, b, p.Sq, p.Hq, p.D, false, t);
      case kK:
        return dense(name, b, p.Sk, p.Hkv, p.D, false, t);
      case kV:
        return dense(name, b, p.Sk, p.Hkv, p.Dv, false, t);
      case kO:
      case kDO:
        return dense(name, b, p.Sq, p.Hq, p.Dv, false, t);
      case kQOffset:
      case kWindowLeft:
      case kWindowRight:
      case kQLengths:
      case kKvLengths:
        return tensor(name, b, DType::kI32, nullptr, 0, false, t);
      case kQSegmentIds:
      case kKvSegmentIds: {
        const Expected e[1] = {{Dim::kRow, op == kQSegmentIds ? p.Sq : p.Sk, false}};
        return tensor(name, b, DType::kI32, e, 1, false, t);
      }
      case kMask:
        return logits(name, b, DType::kBool, t);
      case kBias: {
        const DType dtype = dtype_of(b);
        if (!is_float(dtype)) return error(name, "must have a float dtype", b);
        return logits(name, b, dtype, t);
      }
      case kAlibiSlopes:
      case kSinks: {
        const Expected e[1] = {{Dim::kHead, p.Hq, false}};
        return tensor(name, b, accumulator(p.dtype), e, 1, false, t);
      }
      case kDropoutSeed: {
        const Expected e[1] = {{Dim::kCol, 2, false}};
        return tensor(name, b, DType::kU32, e, 1, false, t);
      }
      case kDropoutOrigin: {
        const Expected e[2] = {{Dim::kHead, p.Hq, false}, {Dim::kCol, 3, false}};
        return tensor(name, b, DType::kU32, e, 2, false, t);
      }
      case kRowMax:
      case kRowLogSum:
      case kDLse:
        return row_facts(name, b, false, t);
      case kNumOperands:
        break;
    }
    return ffi::Error::Internal("flash_attention: unknown operand");
  }

  // Result number `slot` (enum Result) of the pass.
  ffi::Error result(Pass pass, int slot, const ffi::AnyBuffer& b) const {
    Tensor& t = p.out[slot];
    if (pass == Pass::kForward) {
      if (slot == kResO) return dense("o", b, p.Sq, p.Hq, p.Dv, true, t);
      return row_facts(slot == kResRowMax ? "row_max" : "row_log_sum", b, true, t);
    }
    const Expected heads[1] = {{Dim::kHead, p.Hq, false}};
    switch (slot) {
      case kResDQ:
        return dense("dq", b, p.Sq, p.Hq, p.D, false, t);
      case kResDK:
        return dense("dk", b, p.Sk, p.Hkv, p.D, false, t);
      case kResDV:
        return dense("dv", b, p.Sk, p.Hkv, p.Dv, false, t);
      case kResDBias:
        return logits("dbias", b, p.in[kBias].dtype, t);
      case kResDAlibi:
        return tensor("dalibi_slopes", b, accumulator(p.dtype), heads, 1, false, t);
      default:
        return tensor("dsinks", b, accumulator(p.dtype), heads, 1, false, t);
    }
  }
};

template <typename T>
ffi::Error attribute(const ffi::Dictionary& dict, const char* name, T& value) {
  auto got = dict.get<T>(name);
  if (!got.has_value()) {
    return ffi::Error::InvalidArgument("flash_attention: attribute " + std::string(name) +
                                       " is missing or has the wrong type");
  }
  value = *got;
  return ffi::Error::Success();
}

inline ffi::Error read_attributes(const ffi::Dictionary& dict, Attrs& a) {
  const struct {
    const char* name;
    int64_t* value;
  } ints[] = {{"present", &a.present},
              {"grads", &a.grads},
              {"batch_dims", &a.batch_dims},
              {"layout", &a.layout},
              {"causal", &a.causal},
              {"window_left", &a.window_left},
              {"window_right", &a.window_right},
              {"deterministic", &a.deterministic},
              {"precision", &a.precision}};
  for (const auto& i : ints) {
    if (auto e = attribute(dict, i.name, *i.value); e.failure()) return e;
  }
  const struct {
    const char* name;
    double* value;
  } doubles[] = {{"scale", &a.scale}, {"softcap", &a.softcap}, {"dropout_rate", &a.dropout_rate}};
  for (const auto& d : doubles) {
    if (auto e = attribute(dict, d.name, *d.value); e.failure()) return e;
  }
  if (a.batch_dims < 0 || a.batch_dims > kMaxBatchDims) {
    return invalid("batch_dims", "must be in [0, " + std::to_string(kMaxBatchDims) + "]",
                   std::to_string(a.batch_dims));
  }
  if (!(a.softcap >= 0.0)) return invalid("softcap", "must be > 0", std::to_string(a.softcap));
  if (!(a.dropout_rate >= 0.0 && a.dropout_rate < 1.0)) {
    return invalid("dropout_rate", "must be in [0, 1)", std::to_string(a.dropout_rate));
  }
  return ffi::Error::Success();
}

inline ffi::Error check_presence(Pass pass, const Attrs& a) {
  const auto need = [&](Operand op) { return has(a.present, op); };
  const auto missing = [&](Operand op, const char* when) {
    return invalid(operand_name(op), std::string("is required ") + when, "none");
  };
  for (Operand op : {kQ, kK, kV}) {
    if (!need(op)) return missing(op, "always");
  }
  for (Operand op : {kO, kRowMax, kRowLogSum, kDO}) {
    if (pass == Pass::kBackward && !need(op)) return missing(op, "by the backward");
    if (pass == Pass::kForward && need(op))
      return invalid(operand_name(op), "is for the backward only", "one in the forward");
  }
  if (need(kQSegmentIds) != need(kKvSegmentIds)) {
    return missing(need(kQSegmentIds) ? kKvSegmentIds : kQSegmentIds, "beside the other ids");
  }
  if (a.dropout_rate > 0.0) {
    for (Operand op : {kDropoutSeed, kDropoutOrigin}) {
      if (!need(op)) return missing(op, "with dropout_rate > 0");
    }
  }
  const struct {
    Grad grad;
    Operand of;
  } pairs[] = {{kGradBias, kBias}, {kGradAlibi, kAlibiSlopes}, {kGradSinks, kSinks}};
  for (const auto& pair : pairs) {
    if ((a.grads & pair.grad) && !need(pair.of)) return missing(pair.of, "for its gradient");
  }
  return ffi::Error::Success();
}

}  // namespace ffi_detail

// Decodes operands, results and attributes into `p`. `extra_results` results may follow the fixed
// ones (a workspace); they are left to the caller, who finds them from index `*num_results` on.
inline ffi::Error problem_from_ffi(Pass pass, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets, const ffi::Dictionary& dict,
                                   int extra_results, Problem& p, int* num_results = nullptr) {
  using ffi_detail::Builder;
  p = Problem{};
  if (auto e = ffi_detail::read_attributes(dict, p.attrs); e.failure()) return e;
  const Attrs& a = p.attrs;
  if (auto e = ffi_detail::check_presence(pass, a); e.failure()) return e;
  p.batch_dims = static_cast<int32_t>(a.batch_dims);
  for (int64_t& size : p.batch_size) size = 1;
  Builder build{p};

  size_t count = 0;
  for (int op = 0; op < kNumOperands; ++op) count += has(a.present, static_cast<Operand>(op));
  if (args.size() != count) {
    return invalid("operands", "must be " + std::to_string(count) + " (bits of `present`)",
                   std::to_string(args.size()));
  }

  // First look at every buffer's leading dimensions and at the sizes that q, k and v set.
  size_t index = 0;
  for (int op = 0; op < kNumOperands; ++op) {
    if (!has(a.present, static_cast<Operand>(op))) continue;
    auto got = args.get<ffi::AnyBuffer>(index++);
    if (!got.has_value()) return got.error();
    const ffi::AnyBuffer& b = *got;
    if (auto e = build.learn_batch(operand_name(op), b); e.failure()) return e;
    if (op > kV) continue;
    auto dims = b.dimensions();
    if (static_cast<int64_t>(dims.size()) != a.batch_dims + 3) {
      return build.error(operand_name(op), "must have 3 dimensions after the leading ones", b);
    }
    const auto* tail = dims.begin() + a.batch_dims;
    const bool btnh = a.layout == static_cast<int64_t>(Layout::kBTNH);
    const int64_t seq = tail[btnh ? 0 : 1], heads = tail[btnh ? 1 : 0];
    if (op == kQ) {
      p.dtype = dtype_of(b);
      if (!is_float(p.dtype)) return build.error("q", "must have a float dtype", b);
      p.Sq = seq;
      p.Hq = heads;
      p.D = tail[2];
    } else if (op == kK) {
      p.Sk = seq;
      p.Hkv = heads;
    } else {
      p.Dv = tail[2];
    }
  }
  if (p.Hq < 1 || p.Hkv < 1 || p.Hq % p.Hkv != 0) {
    return invalid("q", "must have a number of heads that k's divides",
                   std::to_string(p.Hq) + " and " + std::to_string(p.Hkv));
  }
  if (p.D < 1 || p.Dv < 1) return invalid("q, v", "must have a head size of at least 1", "0");
  p.G = p.Hq / p.Hkv;
  p.B = 1;
  for (int d = 0; d < p.batch_dims; ++d) p.B *= p.batch_size[d];
  p.dropout_threshold = static_cast<uint32_t>(std::lround(a.dropout_rate * 65536.0));

  index = 0;
  for (int op = 0; op < kNumOperands; ++op) {
    if (!has(a.present, static_cast<Operand>(op))) continue;
    auto got = args.get<ffi::AnyBuffer>(index++);
    if (!got.has_value()) return got.error();
    if (auto e = build.operand(static_cast<Operand>(op), *got); e.failure()) return e;
  }

  int used = 0;
  for (int slot = 0; slot < (pass == Pass::kForward ? 3 : kNumResults); ++slot) {
    if (slot >= kResDBias && !(a.grads & (1 << (slot - kResDBias)))) continue;
    auto got = rets.get<ffi::AnyBuffer>(static_cast<size_t>(used++));
    if (!got.has_value()) return got.error();
    if (auto e = build.result(pass, slot, **got); e.failure()) return e;
  }
  if (rets.size() != static_cast<size_t>(used + extra_results)) {
    return invalid("results", "must be " + std::to_string(used + extra_results),
                   std::to_string(rets.size()));
  }
  if (num_results) *num_results = used;
  return ffi::Error::Success();
}

}  // namespace jft
