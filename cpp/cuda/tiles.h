// THE tile table: rows and keys of a tile, warps, copies in flight, for each kernel, element type
// and head bucket. Every row fits the 99 KB of shared memory of the smallest GPUs served
// (8.6, 8.9, 12.x).
//
// kM counts 16-row tiles per warp: 2 halves the shared-memory reads per product, and fits only
// while the accumulators leave room. Registers of accumulators per thread are in the comments.
#pragma once

#include <initializer_list>

namespace jft::cuda {

constexpr int kMaxSharedBytes = 99 * 1024;
// The first bytes of shared memory: facts of the batch element (Control), then the column flags.
constexpr int kSeenBytes = 384, kControlBytes = 512;

struct TileShape {
  int rows;  // forward, dq: queries; dk/dv: keys (= 16 * kM * warps)
  int cols;  // forward, dq: keys; dk/dv: queries
  int warps;
  int stages;  // buffers of the streamed pair of tiles
  int blocks;  // minimum resident blocks per multiprocessor (caps the registers)
  constexpr int m() const { return rows / (16 * warps); }
  constexpr int threads() const { return 32 * warps; }
};

// Head sizes are rounded up to one of these; the rest of a row is zero in shared memory only.
constexpr int kHeadBuckets[] = {64, 96, 128, 192, 256};
constexpr int kMaxHeadDim = 256;

// `general`: logits go through softcap, bias, ALiBi or dropout (Params::general), whose numbers
// want registers: smaller tiles where the plain ones fill the register file.

// o = softmax(q k^T) v. Shared: rows + 2 cols tiles' rows. S: 4 kM cols/8, O: 4 kM head/8
// registers.
constexpr TileShape forward_tile(int element_bytes, int head, bool general) {
  if (element_bytes == 2) {
    if (head <= 64) return {128, general ? 32 : 64, 4, 1, 2};   // S 64 (32) + O 64
    if (head <= 96) return {128, general ? 32 : 64, 4, 1, 2};   // S 64 (32) + O 96
    if (head <= 128) return {128, general ? 32 : 64, 4, 1, 2};  // S 64 (32) + O 128
    if (head <= 192) return {64, 64, 4, 1, 2};                  // S 32 + O 96
    return {64, 32, 4, 1, 2};                                   // S 16 + O 128
  }
  if (head <= 64) return {128, general ? 32 : 64, 4, 1, 2};  // S 64 (32) + O 64
  if (head <= 128) return {64, 32, 4, 1, 2};                 // S 16 + O 64
  return {64, 16, 4, 1, 2};                                  // S 8 + O 128
}

// dq = scale ds k, and dbias. Shared: 2 rows + 2 stages cols. S, dP: 4 kM cols/8 each, dQ: 4 kM
// head/8.
constexpr TileShape dq_tile(int element_bytes, int head, bool general) {
  if (element_bytes == 2) {
    if (general && head <= 128) return {64, 32, 4, 2, 2};  // S, dP, slope 3 x 16, dQ to 64
    if (head <= 64) return {128, 32, 4, 2, 2};             // S, dP 32 + 32, dQ 64
    if (head <= 128) return {128, 32, 4, 1, 2};            // 32 + 32, to 128
    if (head <= 192) return {64, 32, 4, 1, 2};             // 16 + 16, 96
    return {64, 16, 4, 1, 2};                              // 8 + 8, 128
  }
  if (head <= 64) {
    if (general) return {64, 32, 4, 2, 2};  // 3 x 16, 32
    return {128, 32, 4, 2, 2};              // 32 + 32, 64
  }
  if (head <= 128) return {64, 16, 4, 1, 2};
  return {32, 16, 2, 1, 2};
}

// dv = p^T do, dk = scale ds^T q. Shared: 2 rows + 2 stages cols (+ the queries' facts). S^T, dP^T:
// 4 kM cols/8 each, dK and dV: 4 kM head/8 each (one of the two at a time where `split_dkdv`).
constexpr TileShape dkdv_tile(int element_bytes, int head, bool general) {
  if (element_bytes == 2) {
    if (head <= 64) {
      if (general) return {64, 64, 4, 2, 2};  // S, dP, slope 3 x 32, dK, dV 32 + 32
      return {128, 32, 4, 2, 2};              // S, dP 32 + 32, dK, dV 64 + 64
    }
    if (head <= 96) return {64, 64, 4, 2, 2};   // 32 + 32, 48 + 48
    if (head <= 128) return {64, 32, 4, 2, 2};  // 16 + 16, 64 + 64
    if (head <= 192) return {64, 16, 4, 1, 2};  // 8 + 8, 96 + 96
    return {64, 32, 4, 1, 2};                   // 16 + 16, 128
  }
  if (head <= 64) return {64, 32, 4, 2, 2};
  if (head <= 128) return {64, 16, 4, 1, 2};
  return {32, 16, 2, 1, 2};
}
constexpr bool split_dkdv(int head) { return head > 192; }

constexpr int padded_row_bytes(int element_bytes, int head) {
  const int bytes = head * element_bytes;
  return bytes / 16 % 8 == 0 ? bytes : bytes + 16;  // twin of Tile::kPitch, checked in the kernels
}
constexpr int forward_shared(int element_bytes, int head, bool general) {
  const TileShape s = forward_tile(element_bytes, head, general);
  return kControlBytes + (s.rows + 2 * s.cols) * padded_row_bytes(element_bytes, head);
}
constexpr int dq_shared(int element_bytes, int head, bool general) {
  const TileShape s = dq_tile(element_bytes, head, general);
  return kControlBytes + s.rows * 16 +
         (2 * s.rows + 2 * s.stages * s.cols) * padded_row_bytes(element_bytes, head);
}
constexpr int dkdv_shared(int element_bytes, int head, bool general) {
  const TileShape s = dkdv_tile(element_bytes, head, general);
  return kControlBytes + s.stages * s.cols * 16 +
         (2 * s.rows + 2 * s.stages * s.cols) * padded_row_bytes(element_bytes, head);
}

constexpr int head_bucket(int features) {
  for (int bucket : kHeadBuckets) {
    if (features <= bucket) return bucket;
  }
  return 0;
}

constexpr bool all_tiles_fit() {
  for (int bytes : {2, 4}) {
    for (int head : kHeadBuckets) {
      for (bool general : {false, true}) {
        if (forward_shared(bytes, head, general) > kMaxSharedBytes) return false;
        if (dq_shared(bytes, head, general) > kMaxSharedBytes) return false;
        if (dkdv_shared(bytes, head, general) > kMaxSharedBytes) return false;
        for (TileShape s : {forward_tile(bytes, head, general), dq_tile(bytes, head, general),
                            dkdv_tile(bytes, head, general)}) {
          if (s.rows != 16 * s.m() * s.warps || s.cols % 16 != 0) return false;
        }
      }
    }
  }
  return true;
}

}  // namespace jft::cuda
