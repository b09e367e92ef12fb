// What the launcher (launch.cc) hands to the kernels of one instruction set.
#pragma once

#include <cstdint>

#include "call.h"

namespace jft::cpu {

struct ForwardJob {
  const Problem* p;
  int64_t tasks_per_head;  // each of kQueryTiles query tiles
};

// The backward runs one task per (unit, key tile); a unit is a batch element and a kv head, and
// unit u comes before unit u + 1. A task computes dk and dv of its keys over all queries of the
// unit, and adds its share to the dq of every query tile it meets. Sums that several tasks add to
// are ordered: task (u, j) adds to a query tile after every earlier task that meets this tile did.
// Tasks start in order and only wait for earlier ones, so some task can always go on, with any
// number of threads.
//
// progress[u * k_tiles + j] = number of the (query head of the group, query tile) steps that task
// (u, j) has left behind, `head * q_tiles + tile + 1` after step (head, tile).
struct BackwardJob {
  const Problem* p;
  int64_t q_tiles, k_tiles, units;
  void* delta;         // T [B, Hq, Sq]: rowsum(o * do) - dL
  void* dsink_part;    // T [B, Hq, q_tiles], null if not wanted
  void* dalibi_part;   // T [B, Hq, k_tiles], null if not wanted
  int64_t* progress;   // [units, k_tiles]
  int64_t* unit_done;  // [units]: finished tasks

  // Where sums go. The type is that of the accumulator, or the result's own where it is stored
  // once.
  Tensor dq, dk, dv, dbias;
  bool dq_in_slots;  // dq is f32 scratch of units in flight; the last key tile writes the result
  int64_t slots;     // units that may be in flight then
  bool dq_across_units;  // dq has summed batch dimensions: units add one after the other
  bool dk_across_units, dv_across_units;

  // dbias: whole tiles, or sums over queries or keys that the launcher finishes.
  bool dbias_tiles, dbias_across_units;
  void* dbias_keys;  // T [B, Hq, Sk]: sums over queries (bias with one row), else null
  void* dbias_rows;  // T [B, Hq, Sq]: sums over keys (bias with one column), else null
};

// The passes in one kind of arithmetic: one task, and the scratch that each worker needs.
struct Passes {
  void (*forward)(const ForwardJob&, int64_t task, void* scratch);
  void (*delta)(const BackwardJob&, int64_t task, void* scratch);
  void (*backward)(const BackwardJob&, int64_t task, void* scratch);
  int64_t (*forward_bytes)(int64_t D, int64_t Dv);
  int64_t (*delta_bytes)(int64_t D, int64_t Dv);
  int64_t (*backward_bytes)(int64_t D, int64_t Dv);
};

// The entry points of one instruction set.
struct Kernels {
  Passes f32, f64, bf16;  // by the dtype of q, k and v; f16 takes f32's
  // n contiguous values between float and a storage type.
  void (*widen)(const void* src, DType dtype, float* dst, int64_t n);
  void (*narrow)(const float* src, void* dst, DType dtype, int64_t n);
};

static inline const Passes& passes_for(const Kernels& k, DType dtype) {
  return dtype == DType::kF64 ? k.f64 : dtype == DType::kBF16 ? k.bf16 : k.f32;
}

}  // namespace jft::cpu
