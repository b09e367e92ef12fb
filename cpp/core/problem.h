// One attention call as the kernels see it: sizes, int64 strides and pointers, built and checked
// once per call from the FFI buffers (ffi_problem.h). Plain data: usable in C++ and in CUDA device
// code.
#pragma once

#include <cstdint>

#include "attrs.h"
#include "semantics.h"

namespace jft {

constexpr int kMaxBatchDims = 8;  // twin of spec.MAX_BATCH_DIMS

enum class DType : int32_t { kF16, kBF16, kF32, kF64, kI32, kU32, kBool, kOther };

constexpr bool is_float(DType t) { return t <= DType::kF64; }

// Type of sums, residuals, slopes and sinks.
constexpr DType accumulator(DType t) { return t == DType::kF64 ? DType::kF64 : DType::kF32; }

constexpr int64_t byte_width(DType t) {
  return t == DType::kF64 ? 8 : t == DType::kBool ? 1 : t <= DType::kBF16 ? 2 : 4;
}

// Strides count elements. A stride of 0 broadcasts. A tensor that is absent has data == nullptr.
struct Tensor {
  void* data;
  DType dtype;
  int64_t batch[kMaxBatchDims];  // one per leading dimension
  int64_t head;                  // q, k, v, o: head; mask, bias: query head; residuals: query head
  int64_t row;                   // q, o, mask, bias, residuals: query; k, v: key; ids: position
  int64_t col;                   // q, k, v, o: feature (1); mask, bias: key
};

enum Result : int {
  kResO = 0,
  kResRowMax = 1,
  kResRowLogSum = 2,
  kResDQ = 0,
  kResDK = 1,
  kResDV = 2,
  kResDBias = 3,  // fixed slots here; a gradient that was not asked for has data == nullptr
  kResDAlibi = 4,
  kResDSinks = 5,
  kNumResults = 6,
};

struct Problem {
  Attrs attrs;
  int32_t batch_dims;
  int64_t batch_size[kMaxBatchDims];  // full size of every leading dimension
  int64_t B;                          // their product
  int64_t Sq, Sk, Hq, Hkv, G, D, Dv;  // G = Hq / Hkv
  uint32_t dropout_threshold;         // round(rate * 65536); 0 = no dropout
  DType dtype;                        // of q, k, v, o and their gradients
  Tensor in[kNumOperands];            // indexed by Operand
  Tensor out[kNumResults];            // indexed by Result

  bool has(Operand op) const { return in[op].data != nullptr; }
};

// Element offset of batch element b (row-major over the leading dimensions) in t.
JFT_FN int64_t batch_offset(const Problem& p, const Tensor& t, int64_t b) {
  int64_t offset = 0;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    offset += (b % p.batch_size[d]) * t.batch[d];
    b /= p.batch_size[d];
  }
  return offset;
}

}  // namespace jft
