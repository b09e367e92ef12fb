// Row pass of the backward: delta_i = rowsum(o_i do_i) - dL_i and everything else that the main
// kernels need of a query row, once per row. Rows that contribute nothing are marked here, in one
// place: their o, do and dL may hold anything.
#pragma once

#include "../device/call.h"
#include "../device/load.h"

namespace jft::cuda {

constexpr int kRowThreads = 256;

template <class T>
JFT_DEV float dot_chunk(const Chunk& a, const Chunk& b) {
  float sum = 0.0f;
  JFT_UNROLL
  for (int w = 0; w < 4; ++w) {
    if constexpr (T::kBytes == 2) {
      JFT_UNROLL
      for (int n = 0; n < 2; ++n) {
        sum = fma_rn(T::to_float(static_cast<unsigned short>(a.w[w] >> (16 * n))),
                     T::to_float(static_cast<unsigned short>(b.w[w] >> (16 * n))), sum);
      }
    } else {
      sum = fma_rn(bits_float(a.w[w]), bits_float(b.w[w]), sum);
    }
  }
  return sum;
}

template <class T>
JFT_DEV Chunk read_chunk(const typename T::Storage* row, int chunk, int features, bool vector) {
  constexpr int kPerChunk = 16 / T::kBytes;
  if (vector) return *reinterpret_cast<const Chunk*>(row + chunk * kPerChunk);
  Chunk c = {{0, 0, 0, 0}};
  JFT_UNROLL
  for (int e = 0; e < kPerChunk; ++e) {
    const int col = chunk * kPerChunk + e;
    if (col < features) {
      if constexpr (T::kBytes == 2) {
        c.w[e / 2] |= static_cast<u32>(row[col]) << (16 * (e & 1));
      } else {
        c.w[e] = float_bits(row[col]);
      }
    }
  }
  return c;
}

// `lanes` (a power of two up to 32) lanes per row.
template <class T>
JFT_DEV void rows_block(const Params& params, int lanes) {
  using E = typename T::Storage;
  const Problem& p = params.p;
  const i64 total = p.B * p.Hq * params.rows_pitch;
  const i64 first = block_index() * (kRowThreads / lanes) + thread_index() / lanes;
  const bool exists = first < total;  // all lanes stay for the shuffles
  const i64 at = exists ? first : total - 1;
  const int lane = thread_index() % lanes;
  const int i = static_cast<int>(at % params.rows_pitch);
  const i64 bh = at / params.rows_pitch, b = bh / p.Hq, h = bh % p.Hq;

  RowFacts facts = {0.0f, kDeadLogSum, 0.0f, 0.0f};
  float dot = 0.0f, any = 0.0f;
  if (i < p.Sq) {
    const E* o = head_pointer<const E>(p, p.in[kO], b, h) + static_cast<i64>(i) * p.in[kO].row;
    const E* d = head_pointer<const E>(p, p.in[kDO], b, h) + static_cast<i64>(i) * p.in[kDO].row;
    const bool vo = params.vector >> kO & 1, vd = params.vector >> kDO & 1;
    constexpr int kPerChunk = 16 / T::kBytes;
    const int features = static_cast<int>(p.Dv), chunks = (features + kPerChunk - 1) / kPerChunk;
    for (int c = lane; c < chunks; c += lanes) {
      const Chunk x = read_chunk<T>(o, c, features, vo), y = read_chunk<T>(d, c, features, vd);
      dot += dot_chunk<T>(x, y);
      JFT_UNROLL
      for (int w = 0; w < 4; ++w) any = (x.w[w] & 0x7FFF7FFFu) != 0 ? 1.0f : any;
    }
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    dot += shuffle_xor(dot, mask);
    any = max_f(any, shuffle_xor(any, mask));
  }
  if (!exists || lane != 0) return;
  if (i < p.Sq) {
    const float top = head_pointer<const float>(p, p.in[kRowMax], b, h)[i];
    const float log_sum = head_pointer<const float>(p, p.in[kRowLogSum], b, h)[i];
    const float dlse = p.in[kDLse].data ? head_pointer<const float>(p, p.in[kDLse], b, h)[i] : 0.0f;
    const bool has_sink = p.in[kSinks].data != nullptr;
    const float sink = has_sink ? *head_pointer<const float>(p, p.in[kSinks], b, h) : 0.0f;
    const bool empty = log_sum >= static_cast<float>(kEmptyRow / 2);
    // With a sink an empty row has L = sink and o = 0 (or weights below f32's resolution).
    const bool sink_only = has_sink && !empty && log_sum == 0.0f && top == sink && any == 0.0f;
    if (!empty && !sink_only) {
      facts.max = params.general ? top : mul_rn(top, kLog2e);
      facts.log_sum = log_sum * kLog2e;
      facts.delta = dot - dlse;
    }
    if (has_sink && !empty) {
      const float weight = exp2_fast(((sink - top) - log_sum) * kLog2e);
      const float delta = sink_only ? -dlse : facts.delta;
      facts.dsink = weight == 0.0f ? 0.0f : -weight * delta;
    }
  }
  params.rows[at] = facts;
}

template <class T>
JFT_KERNEL(kRowThreads, 1)
rows_kernel(JFT_PARAMS params, int lanes) {
  rows_block<T>(params, lanes);
}

// Zeros the rows of a query tile that contribute nothing; `facts`: the tile's RowFacts in shared
// memory. One vote for all threads; synchronises before and, where rows were zeroed, after.
template <class T, int kHead, int kRows, int kThreads>
JFT_DEV void scrub_dead_queries(u32 q_tile, u32 do_tile, u32 facts) {
  bool dead = false;
  for (int r = thread_index(); r < kRows; r += kThreads) {
    dead |= shared<RowFacts>(facts + r * sizeof(RowFacts)).log_sum >= kDeadLogSum / 2;
  }
  if (!sync_block_or(dead)) return;
  const auto is_dead = [&](int r) {
    return shared<RowFacts>(facts + r * sizeof(RowFacts)).log_sum >= kDeadLogSum / 2;
  };
  scrub_rows<T, kHead, kRows, kThreads>(q_tile, is_dead);
  scrub_rows<T, kHead, kRows, kThreads>(do_tile, is_dead);
  sync_block();
}

}  // namespace jft::cuda
