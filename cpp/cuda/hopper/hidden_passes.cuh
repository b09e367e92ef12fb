// The passes before an attention kernel that has a bool mask or segment ids: the mask packed to
// bits in fragment order, the state of every tile, and the keys that some query sees.
#pragma once

#include "hidden.cuh"

namespace jft::hopper {

struct HiddenParams {
  Strided<const uint8_t> mask;  // row: query; no data: none
  int64_t mask_col;
  Hidden hidden;       // data pointers are outputs here
  int keys_first;      // lines are keys
  int lines, columns;  // sizes: Sq and Sk, or Sk and Sq
  int line_tile, column_tile;
  int b0, b1, heads;         // grid of what is made: 1 where it does not vary
  int bit_lines, bit_tiles;  // packed lines, packed tiles of columns (1: broadcast)
  Shape shape;
  PositionArgs positions;
};

constexpr int kHiddenThreads = 256;

__device__ __forceinline__ uint32_t* out(const uint32_t* p) { return const_cast<uint32_t*>(p); }

// Lines are queries: a warp packs one line, 4 columns per lane.
__global__ void __launch_bounds__(kHiddenThreads)
    pack_queries(const __grid_constant__ HiddenParams p) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const int64_t row = int64_t(blockIdx.x) * (kHiddenThreads / 32) + threadIdx.x / 32;
  const int line = static_cast<int>(row % p.bit_lines), rest = static_cast<int>(row / p.bit_lines);
  const int h = rest % p.heads, b = rest / p.heads, i0 = b / p.b1, i1 = b - i0 * p.b1;
  if (i0 >= p.b0) return;  // whole warps leave
  const uint8_t* from = p.mask.at(i0, i1, h) + line * p.mask.row;
  uint32_t* to = out(p.hidden.bits.at(i0, i1, h)) + line * p.hidden.bits.row;
  const bool words = p.mask_col == 1 && (reinterpret_cast<uintptr_t>(from) & 3) == 0;
  constexpr int kInFlight = 4;
  for (int tile = 0; tile < p.bit_tiles; tile += kInFlight) {
    uint32_t x[kInFlight] = {};  // a byte per column
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) {
      const int first = (tile + n) * p.column_tile + 4 * lane;
      if (tile + n >= p.bit_tiles || 4 * lane >= p.column_tile) continue;
      if (words && first + 4 <= p.columns) {
        x[n] = *reinterpret_cast<const uint32_t*>(from + first);
      } else {
        for (int e = 0; e < 4; ++e)
          if (first + e < p.columns)
            x[n] |= uint32_t(from[(first + e) * p.mask_col] != 0) << (8 * e);
      }
    }
#pragma unroll
    for (int n = 0; n < kInFlight; ++n) {
      uint32_t votes[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) votes[e] = __ballot_sync(0xffffffffu, x[n] >> (8 * e) & 1);
      // Column 8 g + 2 t + c is byte 2 (t & 1) + c of lane 2 g + t / 2.
      const uint32_t even = (t & 1 ? votes[2] : votes[0]) >> (t >> 1) & 0x55555555u;
      const uint32_t odd = (t & 1 ? votes[3] : votes[1]) >> (t >> 1) & 0x55555555u;
      if (lane < 4 && tile + n < p.bit_tiles) to[4 * (tile + n) + t] = even | odd << 1;
    }
  }
}

// Lines are keys: a thread packs four of them for one tile of queries.
__global__ void __launch_bounds__(kHiddenThreads)
    pack_keys(const __grid_constant__ HiddenParams p) {
  const int fours = (p.bit_lines + 3) / 4;
  const int64_t at = int64_t(blockIdx.x) * kHiddenThreads + threadIdx.x;
  const int line = 4 * static_cast<int>(at % fours);
  const int64_t outer = at / fours;
  const int tile = static_cast<int>(outer % p.bit_tiles);
  const int rest = static_cast<int>(outer / p.bit_tiles);
  const int h = rest % p.heads, b = rest / p.heads, i0 = b / p.b1, i1 = b - i0 * p.b1;
  if (i0 >= p.b0) return;
  const uint8_t* from = p.mask.at(i0, i1, h) + line * p.mask_col;
  const bool words = p.mask_col == 1 && line + 4 <= p.lines &&
                     ((reinterpret_cast<uintptr_t>(from) | p.mask.row) & 3) == 0;
  uint32_t bits[4][4] = {};
  for (int g = 0; g < p.column_tile / 8; ++g) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int query = tile * p.column_tile + 8 * g + n;
      if (query >= p.columns) continue;
      const uint8_t* row = from + query * p.mask.row;
      uint32_t x = 0;
      if (words) {
        x = *reinterpret_cast<const uint32_t*>(row);
      } else {
        for (int e = 0; e < 4; ++e)
          if (line + e < p.lines) x |= uint32_t(row[e * p.mask_col] != 0) << (8 * e);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) bits[e][n / 2] |= (x >> (8 * e) & 1) << (2 * g + (n & 1));
    }
  }
  uint32_t* to = out(p.hidden.bits.at(i0, i1, h)) + line * p.hidden.bits.row + 4 * tile;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if (line + e < p.bit_lines)
      *reinterpret_cast<uint4*>(to + e * p.hidden.bits.row) = {bits[e][0], bits[e][1], bits[e][2],
                                                               bits[e][3]};
}

__device__ __forceinline__ void widen(int& low, int& high, const int32_t* ids, int at) {
  low = min(low, ids[at]);
  high = max(high, ids[at]);
}

__device__ __forceinline__ void widest(int& low, int& high) {
#pragma unroll
  for (int n = 16; n > 0; n /= 2) {
    low = min(low, __shfl_xor_sync(0xffffffffu, low, n));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, n));
  }
}

// Bits of word t that stand for one of the first n columns of a tile.
__device__ __forceinline__ uint32_t existing_columns(int n, int t) {
  const uint32_t whole = n >= 128 ? 0xffffffffu : (1u << (2 * (n / 8))) - 1;
  const uint32_t rest = (2 * t < n % 8 ? 1u : 0u) | (2 * t + 1 < n % 8 ? 2u : 0u);
  return whole | (n >= 128 ? 0 : rest << (2 * (n / 8)));
}

// The map: a block makes one pair of words, a warp looks at one tile at a time.
__global__ void __launch_bounds__(kHiddenThreads)
    classify_tiles(const __grid_constant__ HiddenParams p) {
  __shared__ int any[32], all[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int line_tiles = (p.lines + p.line_tile - 1) / p.line_tile;
  const int column_tiles = (p.columns + p.column_tile - 1) / p.column_tile;
  const int words = (column_tiles + 31) / 32;
  int rest = blockIdx.x;
  const int word = rest % words;
  rest /= words;
  const int tile = rest % line_tiles;
  rest /= line_tiles;
  const int h = rest % p.heads, b = rest / p.heads, i0 = b / p.b1, i1 = b - i0 * p.b1;
  const int first = tile * p.line_tile, last = min(first + p.line_tile, p.lines);
  const int32_t* line_ids = p.hidden.line_ids.data ? p.hidden.line_ids.at(i0, i1) : nullptr;
  const int32_t* column_ids = line_ids ? p.hidden.column_ids.at(i0, i1) : nullptr;
  int low = 0x7fffffff, high = -0x7fffffff - 1;
  if (line_ids) {
#pragma unroll 4
    for (int i = first + lane; i < last; i += 32) widen(low, high, line_ids, i);
    widest(low, high);
  }
  for (int n = warp; n < 32; n += kHiddenThreads / 32) {
    const int column_tile = 32 * word + n;
    const int column0 = column_tile * p.column_tile;
    const int column1 = min(column0 + p.column_tile, p.columns);
    bool some = column_tile < column_tiles, every = some;
    if (some && line_ids) {
      int low_column = 0x7fffffff, high_column = -0x7fffffff - 1;
#pragma unroll 4
      for (int j = column0 + lane; j < column1; j += 32)
        widen(low_column, high_column, column_ids, j);
      widest(low_column, high_column);
      some = low <= high_column && low_column <= high;
      every = low == high && low_column == high_column && low == low_column;
    }
    if (some && p.hidden.bits.data) {
      const uint32_t* bits =
          p.hidden.bits.at(i0, i1, h) + int64_t(column_tile) * p.hidden.column_words;
      bool set = false, unset = false;
#pragma unroll 2
      for (int i = first + lane; i < last; i += 32) {
        const uint4 x = *reinterpret_cast<const uint4*>(bits + i * p.hidden.bits.row);
        const uint32_t words_of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          const uint32_t inside = existing_columns(column1 - column0, t);
          set |= (words_of[t] & inside) != 0;
          unset |= (~words_of[t] & inside) != 0;
        }
      }
      some = __ballot_sync(0xffffffffu, set) != 0;
      every = every && __ballot_sync(0xffffffffu, unset) == 0;
    }
    if (lane == 0) {
      any[n] = some;
      all[n] = some && every;
    }
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t visible = __ballot_sync(0xffffffffu, any[lane] != 0);
    const uint32_t plain = __ballot_sync(0xffffffffu, all[lane] != 0);
    if (lane == 0) {
      uint2* row = const_cast<uint2*>(p.hidden.map.at(i0, i1, h)) + tile * p.hidden.map.row;
      row[word] = {visible, visible & ~plain};
    }
  }
}

// Which of 32 keys some query of the group's heads sees: visible tiles of queries, from the
// diagonal on, until every key is seen. Grid: (batch, kv head or 1, words); behind classify_tiles.
__global__ void __launch_bounds__(kHiddenThreads)
    find_live_keys(const __grid_constant__ HiddenParams p) {
  constexpr int kWarps = kHiddenThreads / 32, kInFlight = 4;
  __shared__ uint32_t seen[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int words = (p.shape.Sk + 31) / 32;
  int rest = blockIdx.x;
  const int word = rest % words;
  rest /= words;
  const int kv_heads = p.hidden.live.head ? p.shape.Hq / p.shape.G : 1;
  const int kv_head = rest % kv_heads, b = rest / kv_heads;
  const int b0 = b / p.shape.B1, b1 = b - b0 * p.shape.B1;
  const Positions pos = load_positions(p.positions, p.shape, b0, b1);
  const int key = 32 * word + lane;
  const Range mine = visible_queries_any(pos, key, int64_t(key) + 1);
  const Range range = visible_queries_any(pos, 32 * word, 32 * (word + 1));
  const int begin = static_cast<int>(range.begin), end = static_cast<int>(range.end);
  const int mine_begin = static_cast<int>(mine.begin), mine_end = static_cast<int>(mine.end);
  const bool exists = key < p.shape.Sk;
  const int at_key = exists ? key : p.shape.Sk - 1;
  const Strided<const int32_t>& q_ids = p.keys_first ? p.hidden.column_ids : p.hidden.line_ids;
  const Strided<const int32_t>& kv_ids = p.keys_first ? p.hidden.line_ids : p.hidden.column_ids;
  const int32_t* of_queries = q_ids.data ? q_ids.at(b0, b1) : nullptr;
  const int32_t id = of_queries ? kv_ids.at(b0, b1)[at_key] : 0;

  const int rows = p.keys_first ? p.column_tile : p.line_tile;  // queries of a tile
  const int keys = p.keys_first ? p.line_tile : p.column_tile;
  const int key_tile0 = 32 * word / keys, key_tile1 = min(32 * word + 31, p.shape.Sk - 1) / keys;
  const int tile_begin = begin / rows, tiles = begin < end ? (end - 1) / rows + 1 - tile_begin : 0;
  const int diagonal = static_cast<int>(clamp_to(32 * word - pos.offset, begin, end - 1)) / rows;
  const int heads = p.hidden.live.head ? p.shape.G : 1;
  uint32_t all = 0;
  bool alive = !exists;
  for (int g = 0; g < heads && tiles > 0 && all != 0xffffffffu; ++g) {
    const int h = kv_head * p.shape.G + g;
    const uint8_t* mask = p.mask.data ? p.mask.at(b0, b1, h) + at_key * p.mask_col : nullptr;
    const auto is_visible = [&](int tile) {
      bool some = false;
      for (int k = key_tile0; k <= key_tile1; ++k) {
        const int line = p.keys_first ? k : tile, column = p.keys_first ? tile : k;
        const uint2* row = p.hidden.map.at(b0, b1, h) + line * p.hidden.map.row;
        some = some || (row[column >> 5].x >> (column & 31) & 1);
      }
      return some;
    };
    for (int n = 0; n < tiles; ++n) {
      int tile = diagonal + n;
      if (tile >= tile_begin + tiles) tile -= tiles;
      if (!is_visible(tile)) continue;
      const int last = min(end, (tile + 1) * rows);
      for (int i = max(begin, tile * rows) + warp; i < last; i += kWarps * kInFlight) {
        bool sees[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int query = min(i + kWarps * u, last - 1);
          sees[u] = query >= mine_begin && query < mine_end;
          if (of_queries) sees[u] = of_queries[query] == id && sees[u];
          if (mask) sees[u] = mask[query * p.mask.row] != 0 && sees[u];
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) alive = alive || sees[u];
      }
      const uint32_t votes = __ballot_sync(0xffffffffu, alive);
      __syncthreads();  // everybody has read the votes of the tile before
      if (lane == 0) seen[warp] = votes;
      __syncthreads();
      for (int x = 0; x < kWarps; ++x) all |= seen[x];
      if (all == 0xffffffffu) break;
    }
  }
  if (threadIdx.x == 0) {
    if (tiles == 0) all = key + 31 < p.shape.Sk ? 0u : ~0u << (p.shape.Sk - key);
    out(p.hidden.live.at(b0, b1, kv_head))[word] = all;
  }
}

}  // namespace jft::hopper
