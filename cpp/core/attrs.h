// Static choices and the operand order of the two FFI targets. Twin of jax_flashtrain/_src/spec.py:
// tests/test_interface.py reads both files and fails when they differ.
#pragma once

#include <cstdint>

namespace jft {

// Version of the calling convention below (operands, results, attributes). Python refuses to load a
// native module with another number, so a stale build can never be called with the wrong operands.
constexpr int kInterfaceVersion = 1;

// Operands in their fixed order. q, k, v always come; the others come iff bit `1 << operand` of the
// attribute `present` is set. Shapes: "b.." stands for `batch_dims` leading dimensions, each 1 or
// full (1 = broadcast, read with stride 0, never copied).
enum Operand : int {
  kQ = 0,             // [b.., Sq, Hq, D]   (layout BTNH) or [b.., Hq, Sq, D] (BNTH)
  kK = 1,             // [b.., Sk, Hkv, D]
  kV = 2,             // [b.., Sk, Hkv, Dv]
  kQOffset = 3,       // i32 [b..]          absolute position of query row 0; absent: Sk - Sq
  kWindowLeft = 4,    // i32 [b..]          traced window side (else attribute window_left)
  kWindowRight = 5,   // i32 [b..]
  kQSegmentIds = 6,   // i32 [b.., Sq]
  kKvSegmentIds = 7,  // i32 [b.., Sk]
  kQLengths = 8,      // i32 [b..]
  kKvLengths = 9,     // i32 [b..]
  kMask = 10,         // bool [b.., Hq|1, Sq|1, Sk|1], true = may attend
  kBias = 11,         // f16/bf16/f32/f64 [b.., Hq|1, Sq|1, Sk|1]
  kAlibiSlopes = 12,  // accumulator type [b.., Hq]
  kSinks = 13,        // accumulator type [b.., Hq]
  kDropoutSeed = 14,  // u32 [b.., 2]       Philox key
  kDropoutOrigin =
      15,  // u32 [b.., Hq, 3]   (first row, first column, b * Hq + h) of the call as written
  // The backward target appends these; all but kDLse always come.
  kO = 16,          // like the forward result
  kRowMax = 17,     // accumulator type [b.., Hq, Sq]
  kRowLogSum = 18,  // accumulator type [b.., Hq, Sq]
  kDO = 19,         // like o
  kDLse = 20,       // accumulator type [b.., Hq, Sq]
  kNumOperands = 21,
};

// Forward results: o, row_max, row_log_sum (then a workspace on backends that need one).
// Backward results: dq, dk, dv, then dbias, dalibi_slopes, dsinks as far as their bit of the
// attribute `grads` is set (then the workspace). Every batch dimension of a gradient is 1 or full:
// where it is 1 and the problem is full, the kernel sums over it. So does dbias over every
// dimension in which it is 1.
enum Grad : int { kGradBias = 1, kGradAlibi = 2, kGradSinks = 4 };

enum class Layout : int64_t { kBTNH = 0, kBNTH = 1 };

// Meaning for float32 inputs: kDefault may use the fastest unit of the device (TF32 on NVIDIA),
// kHigh/kHighest full float32. CPUs always compute in full float32.
enum class Precision : int64_t { kDefault = 0, kHigh = 1, kHighest = 2 };

// Attributes, all int64 or float64 scalars (arrays as attributes break jax.export).
struct Attrs {
  int64_t present = 0;       // bit set of Operand
  int64_t grads = 0;         // bit set of Grad (backward only)
  int64_t batch_dims = 0;    // number of leading dimensions of every operand
  int64_t layout = 0;        // Layout
  int64_t causal = 0;        // 0 or 1
  int64_t window_left = -1;  // -1 = unbounded (or given as an operand)
  int64_t window_right = -1;
  int64_t deterministic = 0;  // 0 or 1
  int64_t precision = 0;      // Precision
  double scale = 1.0;
  double softcap = 0.0;       // 0 = off, else > 0
  double dropout_rate = 0.0;  // threshold t = round(rate * 65536)
};

constexpr bool has(int64_t present, Operand op) { return (present >> static_cast<int>(op)) & 1; }

// The residual of a row: its logits' maximum m and c = ln sum_j exp(s_j - m), so that L = m + c and
// p_j = exp((s_j - m) - c) stays exact when |L| is huge. A row that sees nothing (or only -inf) has
// m = 0 and c = kEmptyRow: finite, so jax.debug_infs stays quiet, and exp((s - m) - c) is 0.
constexpr double kEmptyRow = 1.0e30;

}  // namespace jft
