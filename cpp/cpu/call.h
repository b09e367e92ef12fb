// What one (batch element, query head) of a call looks like to a kernel, and the jobs of both
// passes.
#pragma once

#include <cstdint>

#include "problem.h"
#include "tiles.h"

namespace jft::cpu {

// A rows x cols piece of a tensor; strides in elements, 0 = broadcast.
struct Piece {
  void* data;
  DType dtype;
  int64_t row, col;
  int rows, cols;
};

static inline Piece piece(const Problem& p, const Tensor& t, int64_t b, int64_t head, int64_t row,
                          int64_t rows, int64_t col, int64_t cols) {
  const int64_t offset = batch_offset(p, t, b) + head * t.head + row * t.row + col * t.col;
  return {static_cast<char*>(t.data) + offset * byte_width(t.dtype),
          t.dtype,
          t.row,
          t.col,
          static_cast<int>(rows),
          static_cast<int>(cols)};
}

struct Head {
  int64_t b, h;
  Positions pos;
  // Rules beside the positions; null = absent.
  const uint8_t* mask;
  int64_t mask_row, mask_col;
  const int32_t *q_ids, *kv_ids;
  // Terms of the logits.
  bool bias, alibi, softcap;
  double slope, sink;  // sink = -inf when absent
  // Dropout.
  uint32_t threshold, key[2], row0, col0, flat_head;

  // Logits are plain scaled dot products and weights are not dropped.
  bool plain() const { return !bias && !alibi && !softcap && threshold == 0; }
};

static inline int32_t read_i32(const Problem& p, Operand op, int64_t b, int64_t absent) {
  const Tensor& t = p.in[op];
  return t.data ? static_cast<const int32_t*>(t.data)[batch_offset(p, t, b)]
                : static_cast<int32_t>(absent);
}

static inline double read_accumulator(const Problem& p, Operand op, int64_t b, int64_t h) {
  const Tensor& t = p.in[op];
  const int64_t offset = batch_offset(p, t, b) + h * t.head;
  return t.dtype == DType::kF64 ? static_cast<const double*>(t.data)[offset]
                                : static_cast<double>(static_cast<const float*>(t.data)[offset]);
}

static inline Positions positions(const Problem& p, int64_t b) {
  const auto scalar = [&](Operand op, int64_t absent) -> int64_t {
    return p.in[op].data ? read_i32(p, op, b, 0) : absent;
  };
  return make_positions(p.Sq, p.Sk, scalar(kQLengths, p.Sq), scalar(kKvLengths, p.Sk),
                        scalar(kQOffset, p.Sk - p.Sq), p.attrs.causal != 0,
                        scalar(kWindowLeft, p.attrs.window_left),
                        scalar(kWindowRight, p.attrs.window_right));
}

static inline Head head_of(const Problem& p, int64_t b, int64_t h) {
  Head f{};
  f.b = b;
  f.h = h;
  f.pos = positions(p, b);
  if (const Tensor& t = p.in[kMask]; t.data) {
    f.mask = static_cast<const uint8_t*>(t.data) + batch_offset(p, t, b) + h * t.head;
    f.mask_row = t.row;
    f.mask_col = t.col;
  }
  if (const Tensor& t = p.in[kQSegmentIds]; t.data) {
    f.q_ids = static_cast<const int32_t*>(t.data) + batch_offset(p, t, b);
    const Tensor& kv = p.in[kKvSegmentIds];
    f.kv_ids = static_cast<const int32_t*>(kv.data) + batch_offset(p, kv, b);
  }
  f.bias = p.in[kBias].data != nullptr;
  f.softcap = p.attrs.softcap > 0.0;
  if ((f.alibi = p.in[kAlibiSlopes].data != nullptr)) {
    f.slope = read_accumulator(p, kAlibiSlopes, b, h);
  }
  f.sink = p.in[kSinks].data ? read_accumulator(p, kSinks, b, h) : -__builtin_inf();
  if ((f.threshold = p.dropout_threshold) > 0) {
    const Tensor& seed = p.in[kDropoutSeed];
    const Tensor& origin = p.in[kDropoutOrigin];
    const auto* key = static_cast<const uint32_t*>(seed.data) + batch_offset(p, seed, b);
    const auto* start =
        static_cast<const uint32_t*>(origin.data) + batch_offset(p, origin, b) + h * origin.head;
    f.key[0] = key[0];
    f.key[1] = key[1];
    f.row0 = start[0];
    f.col0 = start[1];
    f.flat_head = start[2];
  }
  return f;
}

// 1 / (keep probability); 0 when everything is dropped.
static inline double dropout_scale(const Problem& p) {
  return p.dropout_threshold >= 65536u ? 0.0 : 65536.0 / (65536.0 - p.dropout_threshold);
}

}  // namespace jft::cpu
