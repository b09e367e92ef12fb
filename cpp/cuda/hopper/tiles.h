// THE tile table of the Hopper kernels. Shared-memory sums beside each row; limit 232 448 bytes per
// block.
#pragma once

namespace jft::hopper {

constexpr int kSharedLimit = 232448;
constexpr int kPanel = 64;  // columns of one shared-memory panel: 128 bytes, the widest swizzle

constexpr int kWorkBytes = 128;  // room for one ForwardWork or BackwardWork in shared memory

constexpr int panels(int dim) { return (dim + kPanel - 1) / kPanel; }

// Roads of a kernel, each compiled for itself, as registers demand it: plain products; softcap,
// alibi, mask and segment ids; those with a bias.
enum class Road { kPlain, kGeneral, kBias };

// Forward: 64 query rows per consumer warpgroup x kKeys keys, kStages K/V buffers, head sizes up to
// kDim. kAliasO: o is staged in q's buffer (else it has its own, so that the next q loads
// meanwhile).
struct ForwardTile64 {  // q 24 576 + o 24 576 + 3 x (k 16 384 + v 16 384) = 147 456
  static constexpr int kDim = 64, kConsumers = 3, kKeys = 128, kStages = 3;
  static constexpr bool kAliasO = false;
};
// Few rows: 192-row tiles waste a third of their work on padding and on the diagonal at S = 512.
struct ForwardTile64Short {  // q 16 384 + o 16 384 + 3 x (k 16 384 + v 16 384) = 131 072
  static constexpr int kDim = 64, kConsumers = 2, kKeys = 128, kStages = 3;
  static constexpr bool kAliasO = false;
};
struct ForwardTile96 {  // as 128: the second panel is half empty; products run over 96 columns
  static constexpr int kDim = 96, kConsumers = 2, kKeys = 128, kStages = 2;
  static constexpr bool kAliasO = false;
};
struct ForwardTile128 {  // q 32 768 + o 32 768 + 2 x (k 32 768 + v 32 768) = 196 608
  static constexpr int kDim = 128, kConsumers = 2, kKeys = 128, kStages = 2;
  static constexpr bool kAliasO = false;
};
struct ForwardTile192 {  // q 49 152 + 2 x (k 43 008 + v 43 008) = 221 184
  static constexpr int kDim = 192, kConsumers = 2, kKeys = 112, kStages = 2;
  static constexpr bool kAliasO = true;
};
struct ForwardTile256 {  // q 65 536 + 2 x (k 40 960 + v 40 960) = 229 376
  static constexpr int kDim = 256, kConsumers = 2, kKeys = 80, kStages = 2;
  static constexpr bool kAliasO = true;
};
constexpr int kShortRows = 1536;  // up to here ForwardTile64Short

// Backward: the CTA owns kKeys keys and walks tiles of kRows query rows (S^T form, 2 consumer
// warpgroups).
template <int kDim>
struct BackwardTile;

template <>
struct BackwardTile<64> {
  static constexpr int kRows = 128, kKeys = 128, kStages = 2;
};
template <>
struct BackwardTile<128> {
  static constexpr int kRows = 64, kKeys = 128, kStages = 2;
};

// Beyond head size 128: dk and dv by kKeys keys that walk kRows queries, dq by kQueryRows queries
// that walk kKeys keys.
struct WideTile {
  static constexpr int kRows = 64, kKeys = 64, kQueryRows = 128;
};

// dbias: tiles of kBiasRows queries x bias_keys(head size) keys.
constexpr int kBiasRows = 128;
constexpr int bias_keys(int dim) { return dim <= 128 ? 128 : WideTile::kKeys; }

}  // namespace jft::hopper
