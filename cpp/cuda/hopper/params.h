// Kernel parameters. The batch dimensions of a call are folded into two groups (b0, b1) that every
// operand either has or broadcasts over; see host/batch.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#if defined(JFT_EMULATE)
#include "../emulator/hopper_emulated.h"
#endif

#include "../../core/semantics.h"

namespace jft::hopper {

// A [b0, b1, S, H, D] operand behind a tensor map with dimensions (D, S, H, b1, b0).
struct TileMap {
  CUtensorMap map;
  int has_b0, has_b1;  // 0: broadcast, the coordinate stays 0
};

// A [b0, b1(, H(, S))] operand; strides in elements, 0 broadcasts.
template <class T>
struct Strided {
  T* data;
  int64_t b0, b1, head, row;

  __host__ __device__ T* at(int i0, int i1, int h = 0) const {
    return data + i0 * b0 + i1 * b1 + h * head;
  }
};

struct Shape {
  int Sq, Sk, Hq, G, B0, B1;
};

struct PositionArgs {
  Strided<const int32_t> q_offset, window_left, window_right, q_lengths, kv_lengths;
  int64_t left, right;  // attributes, -1 = unbounded
  int causal;
};

// What a bool mask and segment ids hide, for a kernel whose CTAs own tiles of lines (queries in the
// forward and dq, keys in dk and dv) and walk tiles of columns. Made by hidden_passes.cuh.
struct Hidden {
  int present = 0;                              // 0: neither mask nor ids, the rest is unset
  Strided<const int32_t> line_ids, column_ids;  // of segments, or no data
  // The mask, or no data: per line and tile of columns 4 words in fragment order. Bit 2 g + c of
  // word t is column 8 g + 2 t + c of the tile.
  Strided<const uint32_t> bits;
  int column_words;  // words from one tile of columns to the next; 0: the mask has one column
  // Per tile of lines pairs of words {visible, mixed} with a bit per tile of columns. No data:
  // every tile is mixed.
  Strided<const uint2> map;
  Strided<const uint32_t> live;  // per kv head a bit per key: does some query see it?
};

enum BiasKind : int { kBiasF32, kBiasF16, kBiasBF16 };

// An additive bias; strides in elements, 0 broadcasts.
struct BiasArgs {
  const void* data;  // nullptr: none
  int64_t b0, b1, head, row, col;
  int kind;    // BiasKind
  int chunks;  // 8 keys of a row are 16 aligned bytes
  int pairs;   // two keys of a row are 4 aligned bytes
};

// What turns q.k into a logit, and a logit into a power of two.
struct LogitArgs {
  int natural;         // softcap, bias or alibi: logits are formed in natural units
  float scale;         // natural units per q.k
  float scale_log2;    // scale * log2 e
  float softcap;       // 0 = off
  float softcap_log2;  // 2 log2(e) / softcap
  float inverse_softcap;
  Strided<const float> alibi, sinks;
  BiasArgs bias;
};

#if defined(__CUDACC__) || defined(JFT_EMULATE)
__device__ __forceinline__ int64_t load_or(const Strided<const int32_t>& x, int b0, int b1,
                                           int64_t absent) {
  return x.data ? static_cast<int64_t>(*x.at(b0, b1)) : absent;
}

// Positions of batch element (b0, b1): the one place where the kernels read lengths and offsets.
__device__ __forceinline__ Positions load_positions(const PositionArgs& a, const Shape& s, int b0,
                                                    int b1) {
  return make_positions(
      s.Sq, s.Sk, load_or(a.q_lengths, b0, b1, s.Sq), load_or(a.kv_lengths, b0, b1, s.Sk),
      load_or(a.q_offset, b0, b1, int64_t(s.Sk) - s.Sq), a.causal != 0,
      load_or(a.window_left, b0, b1, a.left), load_or(a.window_right, b0, b1, a.right));
}

// visible_keys(pos, i) of semantics.h in 32 bits, without its q_length test. Sq and Sk are below
// 2^29, so a clamped shift gives the same interval.
struct RowLimits {
  int shift_begin, shift_end, kv_length;
  float offset;  // exact up to 2^24; only alibi reads it

  __device__ __forceinline__ int begin(int i) const {
    return min(max(i + shift_begin, 0), kv_length);
  }
  __device__ __forceinline__ int end(int i) const { return min(max(i + shift_end, 0), kv_length); }
};

__device__ __forceinline__ RowLimits row_limits(const Positions& p) {
  constexpr int64_t kFar = int64_t(1) << 29;
  RowLimits r;
  r.shift_begin = static_cast<int>(clamp_to(p.offset - p.left, -kFar, kFar));
  r.shift_end = static_cast<int>(clamp_to(p.offset + p.right + 1, -kFar, kFar));
  r.kv_length = static_cast<int>(p.kv_length);
  r.offset = static_cast<float>(p.offset);
  return r;
}
#endif

}  // namespace jft::hopper
