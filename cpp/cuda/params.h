// What every kernel receives, by value: the problem, numbers derived from it, scratch pointers.
#pragma once

#include "../core/problem.h"

namespace jft::cuda {

constexpr float kLog2e = 1.4426950408889634f;
// Visibility map: one byte per cell of 64 queries x 64 keys.
constexpr int kCell = 64;
enum CellState : unsigned char { kCellHidden = 0, kCellMixed = 1, kCellVisible = 2 };

// State of the bool mask and the segment ids, per cell: [batch.., heads or 1, query cells, key
// cells]. Positions (causal, window, lengths) are not in it. data == nullptr: neither mask nor ids.
struct VisibilityMap {
  unsigned char* data;
  int64_t batch[kMaxBatchDims];
  int64_t head;
  int32_t query_cells, key_cells, heads;
  int64_t batches;
};

// Facts of one query row for the backward, made by the row pass (kernels/rows.h).
struct alignas(16) RowFacts {
  float max;      // row maximum; times log2 e where the logits are plain (see Params::general)
  float log_sum;  // ln sum, times log2 e; kDeadLogSum for a row that contributes nothing
  float delta;    // rowsum(o do) - dL
  float dsink;    // the row's share of the sink's gradient
};
constexpr float kDeadLogSum = 1.0e30f;

struct Params {
  Problem p;  // batch dimensions folded (host/fold.h)
  VisibilityMap map;
  // Logits go through softcap, bias or alibi (or a scale <= 0): they are formed in natural units.
  // Otherwise raw products are scaled inside the exponential.
  int32_t general;
  float scale, scale_log2;
  float softcap, softcap_log2;  // cap, 2 log2(e) scale / cap
  float dropout_scale;
  int32_t bias_pairs;        // 16-bit bias: two neighbouring keys may be read at once
  uint32_t vector;           // bit per Operand: rows may be copied 16 bytes at a time
  uint32_t vector_out;       // bit per Result: the same for stores
  int32_t q_tiles, k_tiles;  // of the kernel that is launched
  RowFacts* rows;            // [B, Hq, rows_pitch], backward only
  int64_t rows_pitch;        // Sq rounded up to kRowsMultiple
  float* alibi_parts;        // [B, Hq, q_tiles] partial sums, or nullptr
  float* bias_parts;         // [splits, elements of dbias] partial sums, or nullptr
  int64_t bias_elements;
  int32_t splits;
  float* dq_sum;                         // [B, Hq, rows_pitch, kHeadDim] f32, fused backward only
  int64_t batches_kept, batches_summed;  // batch elements of the result / summed into each of them
  int32_t write_dk, write_dv;
};
static_assert(sizeof(Params) <= 4096, "kernel parameters of every toolkit and GPU generation");

// Rows of the row pass's result are padded to whole query tiles of any kernel.
constexpr int kRowsMultiple = 128;

}  // namespace jft::cuda
