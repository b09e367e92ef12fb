// Problem -> the parameter blocks that both passes share.
#pragma once

#include "batch.h"

namespace jft::hopper {

inline Shape make_shape(const Problem& p, const BatchGroups& g) {
  return {static_cast<int>(p.Sq), static_cast<int>(p.Sk),      static_cast<int>(p.Hq),
          static_cast<int>(p.G),  static_cast<int>(g.size[1]), static_cast<int>(g.size[0])};
}

inline PositionArgs make_position_args(const Problem& p, const BatchGroups& g) {
  PositionArgs a;
  a.q_offset = strided<const int32_t>(g, p.in[kQOffset]);
  a.window_left = strided<const int32_t>(g, p.in[kWindowLeft]);
  a.window_right = strided<const int32_t>(g, p.in[kWindowRight]);
  a.q_lengths = strided<const int32_t>(g, p.in[kQLengths]);
  a.kv_lengths = strided<const int32_t>(g, p.in[kKvLengths]);
  a.left = p.attrs.window_left;
  a.right = p.attrs.window_right;
  a.causal = p.attrs.causal != 0;
  return a;
}

inline BiasArgs make_bias_args(const Problem& p, const Tensor& t, const BatchGroups& g) {
  BiasArgs a{};
  if (t.data == nullptr) return a;
  a.data = t.data;
  a.b0 = group_stride(g, t, 1);
  a.b1 = group_stride(g, t, 0);
  a.head = t.head;
  a.row = t.row;
  a.col = t.col;
  a.kind = t.dtype == DType::kF16 ? kBiasF16 : t.dtype == DType::kBF16 ? kBiasBF16 : kBiasF32;
  const auto aligned = [&](int64_t elements) {
    bool ok = a.kind != kBiasF32 && t.col == 1 && p.Sk % elements == 0 &&
              reinterpret_cast<uintptr_t>(t.data) % (2 * elements) == 0;
    for (int64_t stride : {a.b0, a.b1, a.head, a.row}) ok = ok && stride % elements == 0;
    return ok;
  };
  a.chunks = aligned(8);
  a.pairs = aligned(2);
  return a;
}

inline LogitArgs make_logit_args(const Problem& p, const BatchGroups& g) {
  constexpr double kLog2E = 1.4426950408889634;
  LogitArgs a;
  a.natural = p.attrs.softcap > 0 || p.has(kBias) || p.has(kAlibiSlopes);
  a.scale = static_cast<float>(p.attrs.scale);
  a.scale_log2 = static_cast<float>(p.attrs.scale * kLog2E);
  a.softcap = static_cast<float>(p.attrs.softcap);
  a.softcap_log2 = p.attrs.softcap > 0 ? static_cast<float>(2 * kLog2E / p.attrs.softcap) : 0.f;
  a.inverse_softcap = p.attrs.softcap > 0 ? static_cast<float>(1.0 / p.attrs.softcap) : 0.f;
  a.alibi = strided<const float>(g, p.in[kAlibiSlopes]);
  a.sinks = strided<const float>(g, p.in[kSinks]);
  a.bias = make_bias_args(p, p.in[kBias], g);
  return a;
}

inline bool has_hidden(const Problem& p) { return p.has(kMask) || p.has(kQSegmentIds); }

// The general road of every kernel: what the plain one has no registers for.
inline bool is_general(const Problem& p) {
  return p.attrs.softcap > 0 || p.has(kAlibiSlopes) || p.has(kBias) || has_hidden(p);
}

// Rows of one head differ in length: causal, windows, lengths.
inline bool is_uneven(const Problem& p) {
  return p.attrs.causal || p.attrs.window_left >= 0 || p.attrs.window_right >= 0 || has_hidden(p) ||
         p.has(kWindowLeft) || p.has(kWindowRight) || p.has(kQLengths) || p.has(kKvLengths);
}

// Scratch starts at the first 128-byte boundary.
inline uint8_t* align_scratch(void* workspace) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(workspace) + 127) &
                                    ~uintptr_t(127));
}

// Heads whose key side (of `bytes` each, shared by `group` heads of the walk) fits `budget`.
inline int section_heads(int64_t bytes, int64_t group, int64_t heads, int64_t budget) {
  int64_t fit = 1;
  while (fit * 2 * bytes <= budget) fit *= 2;
  fit *= group;
  return static_cast<int>(fit < heads ? fit : heads);
}

}  // namespace jft::hopper
