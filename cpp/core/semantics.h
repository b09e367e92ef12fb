// The one home of the visibility rules and the logit maths. Compiles as C++17, CUDA and Metal
// (MSL): no standard library, no double in the shared part, no address-space pointers.
//
// Query row i of a batch element stands at absolute position i + offset. Key j is visible to it iff
//     i < q_length,  j < kv_length,
//     i + offset - left <= j <= i + offset + right      (causal: right = min(right, 0)),
//     the mask and the segment ids agree               (checked per element by the kernels).
// The first two lines make, for every row, ONE interval of keys [begin, end), and both ends never
// decrease with i. Every loop bound and every edge test below follows from that.
#pragma once

#if defined(__METAL_VERSION__)
#define JFT_FN inline
#define JFT_CONST constant constexpr
#elif defined(__CUDACC__)
#define JFT_FN __host__ __device__ __forceinline__
#define JFT_CONST constexpr
#else
// static: the CPU kernels compile this header once per instruction set, and a shared inline
// function could let the linker keep an AVX-512 copy for everybody.
#define JFT_FN static inline
#define JFT_CONST constexpr
#endif

namespace jft {

#if defined(__METAL_VERSION__)
typedef long i64;
typedef uint u32;
#else
typedef long long i64;
typedef unsigned int u32;
#endif

// "No bound on this side". Large, but sums of a few of them stay far from overflow.
JFT_CONST i64 kUnbounded = i64(1) << 40;

// All positional facts of one batch element, after lengths were clamped to [0, S].
struct Positions {
  i64 Sq, Sk;       // array sizes
  i64 q_length;     // rows at or beyond it are empty, 0 <= q_length <= Sq
  i64 kv_length;    // keys at or beyond it are hidden, 0 <= kv_length <= Sk
  i64 offset;       // absolute position of row 0
  i64 left, right;  // window, kUnbounded = none; causal is already in `right`
};

struct Range {
  i64 begin, end;  // [begin, end); empty iff begin >= end
};

JFT_FN i64 clamp_to(i64 x, i64 lo, i64 hi) { return x < lo ? lo : (x > hi ? hi : x); }

JFT_FN Positions make_positions(i64 Sq, i64 Sk, i64 q_length, i64 kv_length, i64 offset,
                                bool causal, i64 left, i64 right) {
  Positions p;
  p.Sq = Sq;
  p.Sk = Sk;
  p.q_length = clamp_to(q_length, 0, Sq);
  p.kv_length = clamp_to(kv_length, 0, Sk);
  p.offset = offset;
  p.left = left < 0 ? kUnbounded : left;
  p.right = right < 0 ? kUnbounded : right;
  if (causal && p.right > 0) p.right = 0;
  return p;
}

// Keys that row i may see. Callers give 0 <= i < Sq.
JFT_FN Range visible_keys(Positions p, i64 i) {
  Range r;
  if (i >= p.q_length) {
    r.begin = 0;
    r.end = 0;
    return r;
  }
  r.begin = clamp_to(i + p.offset - p.left, 0, p.kv_length);
  r.end = clamp_to(i + p.offset + p.right + 1, 0, p.kv_length);
  return r;
}

// Keys that at least one of the rows [i0, i1) may see (the loop bounds of a query tile).
JFT_FN Range visible_keys_any(Positions p, i64 i0, i64 i1) {
  if (i1 > p.q_length) i1 = p.q_length;
  Range r;
  if (i0 >= i1) {
    r.begin = 0;
    r.end = 0;
    return r;
  }
  r.begin = visible_keys(p, i0).begin;
  r.end = visible_keys(p, i1 - 1).end;
  return r;
}

// Keys that every one of the rows [i0, i1) sees: inside it a tile takes the unmasked path. Rows at
// or beyond q_length make it empty.
JFT_FN Range visible_keys_all(Positions p, i64 i0, i64 i1) {
  Range r;
  if (i1 > p.q_length) {
    r.begin = 0;
    r.end = 0;
    return r;
  }
  r.begin = visible_keys(p, i1 - 1).begin;
  r.end = visible_keys(p, i0).end;
  return r;
}

// Rows that at least one of the keys [j0, j1) is visible to (the loop bounds of a key tile).
JFT_FN Range visible_queries_any(Positions p, i64 j0, i64 j1) {
  if (j1 > p.kv_length) j1 = p.kv_length;
  Range r;
  if (j0 >= j1) {
    r.begin = 0;
    r.end = 0;
    return r;
  }
  r.begin = clamp_to(j0 - p.offset - p.right, 0, p.q_length);
  r.end = clamp_to(j1 - 1 - p.offset + p.left + 1, 0, p.q_length);
  return r;
}

// ---- Dropout: Philox4x32-10, one call per 8 logits
// -------------------------------------------------

struct Philox {
  u32 w[4];
};

JFT_FN u32 mul_hi_u32(u32 a, u32 b) {
#if defined(__METAL_VERSION__)
  return metal::mulhi(a, b);
#else
  return u32((static_cast<unsigned long long>(a) * b) >> 32);
#endif
}

JFT_FN Philox philox4x32_10(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
  for (int round = 0; round < 10; ++round) {
    u32 hi0 = mul_hi_u32(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    u32 hi1 = mul_hi_u32(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Philox out;
  out.w[0] = c0;
  out.w[1] = c1;
  out.w[2] = c2;
  out.w[3] = c3;
  return out;
}

// The 8 draws of 16 bits that decide logits (row, 8*column_group .. +7) of flat head bh.
JFT_FN Philox dropout_draws(u32 row, u32 column_group, u32 bh, u32 k0, u32 k1) {
  return philox4x32_10(row, column_group, bh, 0u, k0, k1);
}

// Draw number n (0..7) of a call: low half of a word first.
JFT_FN u32 dropout_draw(Philox p, int n) { return (p.w[n >> 1] >> (16 * (n & 1))) & 0xFFFFu; }

// keep iff draw >= threshold, threshold = round(rate * 65536); kept weights times 65536/(65536 -
// t).
JFT_FN bool dropout_keeps(u32 draw, u32 threshold) { return draw >= threshold; }

}  // namespace jft
