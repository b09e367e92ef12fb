// Host side of mask and segment ids: where their scratch lies, and the passes before a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "args.h"

namespace jft::hopper {

// How a kernel looks at them: its CTAs own tiles of lines and walk tiles of columns.
struct HiddenSide {
  bool keys_first;  // lines are keys
  int line_tile, column_tile;
};

// Sizes of what is made for one side, and its place.
struct HiddenLayout {
  int64_t lines, columns, bit_lines, bit_tiles, line_tiles, words;
  int64_t bits, map;  // byte offsets
};

// Scratch of up to two kernels behind byte `start` (from an aligned base): their bits and maps, and
// the live keys that they share. Needs sizes and the mask's broadcasting, no addresses.
struct HiddenScratch {
  HiddenLayout side[2];
  int64_t live, end;

  HiddenScratch(const Problem& p, int64_t start, std::initializer_list<HiddenSide> sides) {
    end = (start + 127) / 128 * 128;
    const auto take = [this](int64_t bytes) {
      const int64_t at = end;
      end += (bytes + 127) / 128 * 128;
      return at;
    };
    live = end;
    if (!has_hidden(p)) return;
    const auto batches = [&p](std::initializer_list<Operand> operands) {
      int64_t n = 1;
      for (int d = 0; d < p.batch_dims; ++d) {
        bool varies = false;
        for (Operand op : operands) varies = varies || (p.has(op) && p.in[op].batch[d] != 0);
        if (varies) n *= p.batch_size[d];
      }
      return n;
    };
    const bool mask = p.has(kMask), heads = mask && p.in[kMask].head != 0;
    take(p.B * (heads ? p.Hkv : 1) * ((p.Sk + 31) / 32) * 4);
    int n = 0;
    for (const HiddenSide& s : sides) {
      HiddenLayout& l = side[n++];
      l.lines = s.keys_first ? p.Sk : p.Sq;
      l.columns = s.keys_first ? p.Sq : p.Sk;
      const int64_t tiles = (l.columns + s.column_tile - 1) / s.column_tile;
      l.line_tiles = (l.lines + s.line_tile - 1) / s.line_tile;
      l.words = (tiles + 31) / 32;
      const bool line_varies = mask && (s.keys_first ? p.in[kMask].col : p.in[kMask].row) != 0;
      const bool column_varies = mask && (s.keys_first ? p.in[kMask].row : p.in[kMask].col) != 0;
      l.bit_lines = line_varies ? l.lines : 1;
      l.bit_tiles = column_varies ? tiles : 1;
      l.bits =
          take(mask ? batches({kMask}) * (heads ? p.Hq : 1) * l.bit_lines * l.bit_tiles * 16 : 0);
      l.map = take(batches({kMask, kQSegmentIds, kKvSegmentIds}) * (heads ? p.Hq : 1) *
                   l.line_tiles * l.words * 8);
    }
  }
};

// Launches the passes of sides[which] and describes the result. The passes of the first side also
// find the live keys.
cudaError_t launch_hidden(Hidden* hidden, const Problem& p, const BatchGroups& g,
                          const HiddenScratch& scratch, uint8_t* base, HiddenSide side, int which,
                          cudaStream_t stream);

}  // namespace jft::hopper
