// Parameters of the backward kernels, and the layout of their scratch.
#pragma once

#include "params.h"
#include "schedule.cuh"

namespace jft::hopper {

// Scratch, per query head and tile of kRows queries (rows padded to whole tiles):
//   dq     f32, kRows x kDim, as two 64 x 64 accumulator fragments: [part][8][128 threads][4]
//   gauge  f32, per pair of rows {g0, g1, c0, c1}. Plain: P = exp2((S factor - g) - c). General:
//          g = m in natural units, P = exp2((logit - g) log2 e - c). A dead row has c = 1e30.
//   delta  f32 per row: rowsum(o do) - dL; kDeadDelta for a dead row
constexpr float kDeadDelta = 1e30f;  // finite: 0 (dP - delta) is 0

struct BackwardParams {
  TileMap q, k, v, d_o, dk, dv;
  float *dq, *gauge, *delta;
  int* semaphore;  // deterministic only: per query head and tile, key tiles added so far
  int q_tiles;
  int rotate;  // walks start at staggered query tiles (deterministic, every key visible)
  Shape shape;
  PositionArgs positions;
  LogitArgs logit;
  Hidden hidden;  // lines are keys
  Schedule schedule;
};

// A [b0, b1, S, H, D] tensor read with ordinary loads.
struct Wide {
  void* data;
  int64_t b0, b1, head, row;
};

struct PassParams {  // pre- and post-pass, one block per (query head, tile)
  Wide o, d_o, dq;
  Strided<const float> row_max, row_log_sum, dlse, sinks;
  Strided<float> dsinks;
  float *dq_scratch, *gauge, *delta;
  int* semaphore;
  int q_tiles, D, Dv;
  int general;  // form of the gauge
  Shape shape;
  PositionArgs positions;
  float scale;
};

}  // namespace jft::hopper
