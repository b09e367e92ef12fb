// What the host and the kernels agree on: buffer indices, function constants, the parameter struct.
// Compiles as C++17 (host) and as MSL (C++14). Fields are ordered so that there is no padding.
#pragma once

#include "../core/semantics.h"

namespace jft {

JFT_CONST int kMetalBatchDims = 8;  // encode.cc asserts that it equals kMaxBatchDims

// Buffer indices. 0..20 are the operands in the order of attrs.h (asserted in encode.cc).
enum BufferIndex : int {
  kBufQ = 0,
  kBufK = 1,
  kBufV = 2,
  kBufQOffset = 3,
  kBufWindowLeft = 4,
  kBufWindowRight = 5,
  kBufQSegmentIds = 6,
  kBufKvSegmentIds = 7,
  kBufQLengths = 8,
  kBufKvLengths = 9,
  kBufMask = 10,
  kBufBias = 11,
  kBufAlibiSlopes = 12,
  kBufSinks = 13,
  kBufDropoutSeed = 14,
  kBufDropoutOrigin = 15,
  kBufO = 16,
  kBufRowMax = 17,
  kBufRowLogSum = 18,
  kBufDO = 19,
  kBufDLse = 20,
  kBufDQ = 21,
  kBufDK = 22,
  kBufDV = 23,
  kBufDBias = 24,
  kBufDelta = 25,     // scratch f32 [B, Hq, Sq]
  kBufRowTerms = 26,  // scratch f32 [B, Hq, Sq]: what every row adds to dsinks or dalibi_slopes
  kBufSum = 27,       // result of sum_rows
  kBufParams = 30,
};

// Function constants. kBiasType is 0 for f32, 1 for f16, 2 for bf16.
enum FunctionConstant : int {
  kFlagBias = 0,
  kFlagBiasType = 1,
  kFlagMask = 2,
  kFlagSegments = 3,
  kFlagSoftcap = 4,
  kFlagAlibi = 5,
  kFlagSinks = 6,
  kFlagDropout = 7,
  kFlagDLse = 8,
  kFlagDK = 9,  // dkdv: which of the two results is wanted
  kFlagDV = 10,
  kFlagRowTerms = 11,  // delta: write the rows' terms of dsinks; dq: those of dalibi_slopes
};

// Elements. A stride of 0 broadcasts.
struct MetalStrides {
  i64 batch[kMetalBatchDims];
  i64 head, row, col;
};

struct MetalParams {
  MetalStrides in[21];   // by buffer index
  MetalStrides out[4];   // dq, dk, dv, dbias; the forward uses the rows kBufO.. of `in`
  MetalStrides scratch;  // delta and row terms
  MetalStrides sum;      // dsinks or dalibi_slopes [b.., Hq]
  i64 batch_size[kMetalBatchDims];
  i64 Sq, Sk, D, Dv, Hq, G;
  i64 window_left, window_right;         // attributes, -1 = unbounded
  i64 first_tile, first_group;           // added to the position in the grid: long grids are split
  i64 reduced_batches;                   // batch elements that one threadgroup sums over
  i64 bias_heads, bias_rows, bias_cols;  // sizes of dbias, each full or 1
  int kept;                              // bit d: batch dimension d is full in the result
  int batch_dims;
  int present;  // bits of the operands that came
  int causal;
  u32 dropout_threshold;
  float dropout_scale;  // 65536 / (65536 - threshold)
  float scale;
  float softcap;
};

#if !defined(__METAL_VERSION__)
static_assert(sizeof(MetalParams) <= 4096, "setBytes takes at most 4 KB");
#endif

// Residual of a row that sees nothing (attrs.h: kEmptyRow) and the test for it.
JFT_CONST float kMetalEmptyRow = 1.0e30f;
JFT_CONST float kMetalEmptyTest = 0.5e30f;

}  // namespace jft
