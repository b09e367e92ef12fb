// semantics.h against brute force over all small sizes, and Philox against published answers.
#include "semantics.h"

#include <cstdint>

#include "check.h"

namespace jft {
namespace {

// The rule as the documentation states it, for one pair.
bool visible(const Positions& p, i64 i, i64 j, bool causal, i64 left, i64 right) {
  if (i >= p.q_length || j >= p.kv_length) return false;
  const i64 at = i + p.offset;
  if (causal && j > at) return false;
  if (left >= 0 && j < at - left) return false;
  if (right >= 0 && j > at + right) return false;
  return true;
}

void check_call(i64 Sq, i64 Sk, i64 ql, i64 kl, i64 offset, bool causal, i64 left, i64 right) {
  const Positions p = make_positions(Sq, Sk, ql, kl, offset, causal, left, right);
  CHECK(p.q_length >= 0 && p.q_length <= Sq && p.kv_length >= 0 && p.kv_length <= Sk);
  const auto sees = [&](i64 i, i64 j) { return visible(p, i, j, causal, left, right); };
  bool ok = true;
  for (i64 i = 0; i < Sq; ++i) {
    const Range r = visible_keys(p, i);
    for (i64 j = 0; j < Sk; ++j) ok &= (j >= r.begin && j < r.end) == sees(i, j);
  }
  CHECK(ok);
  // Tiles of every size: the ranges for "any" and "all" are exact, and the two views agree.
  for (i64 i0 = 0; i0 < Sq; ++i0) {
    for (i64 i1 = i0 + 1; i1 <= Sq; ++i1) {
      const Range any = visible_keys_any(p, i0, i1), all = visible_keys_all(p, i0, i1);
      for (i64 j = 0; j < Sk; ++j) {
        bool some = false, every = true;
        for (i64 i = i0; i < i1; ++i) {
          some |= sees(i, j);
          every &= sees(i, j);
        }
        ok &= (j >= any.begin && j < any.end) == some;
        ok &= (j >= all.begin && j < all.end) == every;
      }
    }
  }
  CHECK(ok);
  for (i64 j0 = 0; j0 < Sk; ++j0) {
    for (i64 j1 = j0 + 1; j1 <= Sk; ++j1) {
      const Range any = visible_queries_any(p, j0, j1);
      for (i64 i = 0; i < Sq; ++i) {
        bool some = false;
        for (i64 j = j0; j < j1; ++j) some |= sees(i, j);
        ok &= (i >= any.begin && i < any.end) == some;
      }
    }
  }
  CHECK(ok);
}

void positions_by_brute_force() {
  long calls = 0;
  for (i64 Sq = 0; Sq <= 5; ++Sq) {
    for (i64 Sk = 0; Sk <= 5; ++Sk) {
      for (i64 ql = -1; ql <= Sq + 1; ++ql) {
        for (i64 kl = -1; kl <= Sk + 1; ++kl) {
          for (i64 offset = -6; offset <= 6; ++offset) {
            for (int causal = 0; causal < 2; ++causal) {
              for (i64 left = -1; left <= 3; ++left) {
                for (i64 right = -1; right <= 2; ++right) {
                  check_call(Sq, Sk, ql, kl, offset, causal != 0, left, right);
                  ++calls;
                }
              }
            }
          }
        }
      }
    }
  }
  std::printf("semantics_test: %ld calls by brute force\n", calls);
}

void philox_known_answers() {
  // Random123's known-answer file, philox4x32-10.
  const struct {
    u32 c[4], k[2], want[4];
  } cases[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
      {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},
       {0xffffffffu, 0xffffffffu},
       {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
      {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
       {0xa4093822u, 0x299f31d0u},
       {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}},
  };
  for (const auto& t : cases) {
    const Philox p = philox4x32_10(t.c[0], t.c[1], t.c[2], t.c[3], t.k[0], t.k[1]);
    for (int n = 0; n < 4; ++n) CHECK(p.w[n] == t.want[n]);
  }
  const Philox p = dropout_draws(0, 0, 0, 0, 0);
  CHECK(dropout_draw(p, 0) == 0xe8d5u);  // low half first
  CHECK(dropout_draw(p, 1) == 0x6627u);
  CHECK(dropout_draw(p, 7) == 0x9b00u);
  CHECK(dropout_keeps(7, 7) && !dropout_keeps(6, 7));
}

}  // namespace
}  // namespace jft

int main() {
  jft::positions_by_brute_force();
  jft::philox_known_answers();
  std::printf("semantics_test: %d failures\n", jft::testing::failures);
  return jft::testing::failures != 0;
}
