// Which logits of a tile exist, as one 64-bit word per query row (bit n = key j0 + n), whatever
// hides them: positions, lengths, segment ids or the mask. Dropout draws have the same shape.
#pragma once

#include "call.h"
#include "simd.h"

namespace jft::cpu::JFT_ISA {

enum class Seen { kNone, kSome, kAll };

JFT_INLINE uint64_t low_bits(int64_t n) {
  return n >= 64 ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1;
}

// Bits of the nonzero bytes among 64.
JFT_INLINE uint64_t nonzero_bytes(const uint8_t* p) {
#if defined(__AVX512BW__)
  const __m512i x = _mm512_loadu_si512(p);
  return _mm512_test_epi8_mask(x, x);
#elif defined(__AVX2__)
  uint64_t bits = 0;
  for (int half = 0; half < 2; ++half) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
    const int zero = _mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(~zero)) << (32 * half);
  }
  return bits;
#else
  uint64_t bits = 0;
  for (int n = 0; n < 64; ++n) bits |= static_cast<uint64_t>(p[n] != 0) << n;
  return bits;
#endif
}

// Bits of the ids that equal `id` among 64.
JFT_INLINE uint64_t equal_ids(const int32_t* ids, int32_t id) {
  uint64_t bits = 0;
#if defined(__AVX512F__)
  for (int n = 0; n < 64; n += 16) {
    const __mmask16 eq =
        _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(ids + n), _mm512_set1_epi32(id));
    bits |= static_cast<uint64_t>(eq) << n;
  }
#elif defined(__AVX2__)
  for (int n = 0; n < 64; n += 8) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids + n));
    const __m256i eq = _mm256_cmpeq_epi32(x, _mm256_set1_epi32(id));
    bits |= static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(eq))) << n;
  }
#else
  for (int n = 0; n < 64; ++n) bits |= static_cast<uint64_t>(ids[n] == id) << n;
#endif
  return bits;
}

struct Tile {
  int64_t i0, j0;
  int nq, nk;
  uint64_t row[kTile];  // valid when seen == kSome
  uint64_t keys;        // keys that at least one row sees
};

struct IdRange {
  int32_t lo, hi;
};
JFT_INLINE IdRange id_range(const int32_t* ids, int n) {
  IdRange r{ids[0], ids[0]};
  for (int k = 1; k < n; ++k) {
    r.lo = ids[k] < r.lo ? ids[k] : r.lo;
    r.hi = ids[k] > r.hi ? ids[k] : r.hi;
  }
  return r;
}

// Looks at the tile of rows [i0, i0 + nq) and keys [j0, j0 + nk). `empty_rows`: bits of rows that
// take no part whatever they see (the backward's rows without a softmax).
// `next`: distance in the mask to the tile that will be looked at next.
static __attribute__((noinline)) Seen look(const Head& f, Tile& t, uint64_t empty_rows,
                                           int64_t next) {
  const Range some = visible_keys_any(f.pos, t.i0, t.i0 + t.nq);
  if (t.j0 >= some.end || t.j0 + t.nk <= some.begin) return Seen::kNone;
  const uint64_t all_keys = low_bits(t.nk);
  bool clipped = empty_rows != 0;
  IdRange q{}, kv{};
  if (f.q_ids) {
    q = id_range(f.q_ids + t.i0, t.nq);
    kv = id_range(f.kv_ids + t.j0, t.nk);
    if (q.hi < kv.lo || kv.hi < q.lo) return Seen::kNone;
  }
  const Range all = visible_keys_all(f.pos, t.i0, t.i0 + t.nq);
  const bool positions_clip = t.j0 < all.begin || t.j0 + t.nk > all.end;
  const bool ids_clip = f.q_ids && !(q.lo == q.hi && kv.lo == kv.hi);
  clipped |= positions_clip || ids_clip || f.mask;
  if (!clipped) return Seen::kAll;

  alignas(64) int32_t ids[kTile];
  if (ids_clip) {
    for (int n = 0; n < kTile; ++n) ids[n] = f.kv_ids[t.j0 + (n < t.nk ? n : 0)];
  }
  uint64_t any = 0, every = all_keys;
  for (int r = 0; r < t.nq; ++r) {
    uint64_t bits = (empty_rows >> r) & 1 ? 0 : all_keys;
    if (positions_clip) {
      const Range see = visible_keys(f.pos, t.i0 + r);
      bits &= low_bits(see.end - t.j0) & ~low_bits(see.begin - t.j0);
    }
    if (ids_clip) bits &= equal_ids(ids, f.q_ids[t.i0 + r]);
    if (f.mask && bits) {
      const uint8_t* m = f.mask + (t.i0 + r) * f.mask_row + t.j0 * f.mask_col;
      __builtin_prefetch(m + next);
      if (f.mask_col == 0) {
        bits &= *m ? ~uint64_t{0} : 0;
      } else if (t.nk == kTile) {
        bits &= nonzero_bytes(m);
      } else {
        uint8_t tail[kTile] = {};
        __builtin_memcpy(tail, m, static_cast<size_t>(t.nk));
        bits &= nonzero_bytes(tail);
      }
    }
    t.row[r] = bits;
    any |= bits;
    every &= bits;
  }
  for (int r = t.nq; r < kTile; ++r) t.row[r] = 0;
  t.keys = any;
  return any == 0 ? Seen::kNone : every == all_keys ? Seen::kAll : Seen::kSome;
}

// A part of a logit tile: rows [row0, row1) and lanes [lane0, lane1) of whichever index comes
// first.
struct Block {
  int row0, row1, lane0, lane1;
};

// The rows that see any of the lanes [lane0, lane1): a block that may be empty.
template <int kStep>
static Block cover(const uint64_t* words, int rows, int lane0, int lane1) {
  const uint64_t mask = low_bits(lane1) & ~low_bits(lane0);
  Block b{0, rows, lane0, lane1};
  while (b.row0 < b.row1 && !(words[b.row0] & mask)) ++b.row0;
  while (b.row1 > b.row0 && !(words[b.row1 - 1] & mask)) --b.row1;
  if (b.row0 == b.row1) return b;
  b.row0 = b.row0 / kStep * kStep;
  b.row1 = (b.row1 + kStep - 1) / kStep * kStep;
  if (b.row1 > rows) b.row1 = rows;
  return b;
}

// The blocks of a partly visible tile that are worth computing: groups of two vectors with the rows
// they need (half of the tile on a causal diagonal needs half of the rows), or all lanes at once
// where that saves nothing. Rows begin and end at multiples of kStep (or with the tile). Returns
// their number.
template <typename T, int kStep>
static int plan_blocks(const uint64_t* words, int rows, int lanes, Block (&blocks)[4]) {
  constexpr int kGroup = 2 * kLanes<T> > 16 ? 2 * kLanes<T> : 16;
  int count = 0, area = 0;
  for (int lane = 0; lane < lanes; lane += kGroup) {
    const Block b = cover<kStep>(words, rows, lane, lane + kGroup < lanes ? lane + kGroup : lanes);
    area += (b.row1 - b.row0) * (b.lane1 - b.lane0);
    if (b.row0 < b.row1) blocks[count++] = b;
  }
  const Block whole = cover<kStep>(words, rows, 0, lanes);
  if (count > 1 && area * 10 > (whole.row1 - whole.row0) * lanes * 9) {
    blocks[0] = whole;
    count = 1;
  }
  return count;
}

// Transposes a 64 x 64 bit matrix: swaps off-diagonal blocks of 32, 16, ... 1 bits.
static inline void transpose_bits(uint64_t (&a)[kTile]) {
  uint64_t mask = 0x00000000ffffffffull;
  for (int width = 32; width; width >>= 1, mask ^= mask << width) {
    for (int k = 0; k < 64; k = ((k | width) + 1) & ~width) {
      const uint64_t x = ((a[k] >> width) ^ a[k | width]) & mask;
      a[k] ^= x << width;
      a[k | width] ^= x;
    }
  }
}

// keep[r] bit n: logit (i0 + r, j0 + n) is kept.
static __attribute__((noinline)) void dropout_bits(const Head& f, const Tile& t,
                                                   uint64_t (&keep)[kTile]) {
  for (uint64_t& word : keep) word = 0;
  const uint32_t first = f.col0 + static_cast<uint32_t>(t.j0);
  const int shift = static_cast<int>(first % 8);  // bits of the first group before the tile
  for (int group = 0; group * 8 < t.nk + shift; ++group) {
    uint32_t c0[kTile], c1[kTile], c2[kTile], c3[kTile];
    for (int r = 0; r < kTile; ++r) {
      c0[r] = f.row0 + static_cast<uint32_t>(t.i0) + static_cast<uint32_t>(r);
      c1[r] = first / 8 + static_cast<uint32_t>(group);
      c2[r] = f.flat_head;
      c3[r] = 0;
    }
    // semantics.h's philox4x32_10 on 64 rows at once, so that the compiler can use vectors.
    uint32_t k0 = f.key[0], k1 = f.key[1];
    for (int round = 0; round < 10; ++round) {
      for (int r = 0; r < kTile; ++r) {
        const uint64_t a = uint64_t{0xD2511F53u} * c0[r], b = uint64_t{0xCD9E8D57u} * c2[r];
        c0[r] = static_cast<uint32_t>(b >> 32) ^ c1[r] ^ k0;
        c1[r] = static_cast<uint32_t>(b);
        c2[r] = static_cast<uint32_t>(a >> 32) ^ c3[r] ^ k1;
        c3[r] = static_cast<uint32_t>(a);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const auto kept = [&](uint32_t draw) -> uint32_t { return draw >= f.threshold; };
    const int at = group * 8 - shift;
    for (int r = 0; r < kTile; ++r) {
      const uint32_t bits = kept(c0[r] & 0xffffu) | kept(c0[r] >> 16) << 1 |
                            kept(c1[r] & 0xffffu) << 2 | kept(c1[r] >> 16) << 3 |
                            kept(c2[r] & 0xffffu) << 4 | kept(c2[r] >> 16) << 5 |
                            kept(c3[r] & 0xffffu) << 6 | kept(c3[r] >> 16) << 7;
      keep[r] |= at >= 0 ? static_cast<uint64_t>(bits) << at : static_cast<uint64_t>(bits) >> -at;
    }
  }
}

}  // namespace jft::cpu::JFT_ISA
