// Launches the passes of mask and segment ids, for both types.
#include "hidden_passes.cuh"
#include "host/device.h"
#include "host/hidden.h"

namespace jft::hopper {

namespace {

// Blocks that make `units` things with `per_block` each; too many for a grid is an error.
template <auto kKernel>
cudaError_t launch_units(int64_t units, int per_block, const HiddenParams& params,
                         cudaStream_t stream) {
  const int64_t blocks = (units + per_block - 1) / per_block;
  if (blocks >= int64_t(1) << 31) return cudaErrorInvalidValue;
  if (blocks == 0) return cudaSuccess;
  return launch_kernel<kKernel>(static_cast<int>(blocks), kHiddenThreads, 0, stream, params);
}

}  // namespace

cudaError_t launch_hidden(Hidden* hidden, const Problem& p, const BatchGroups& g,
                          const HiddenScratch& scratch, uint8_t* base, HiddenSide side, int which,
                          cudaStream_t stream) {
  *hidden = Hidden{};
  if (!has_hidden(p)) return cudaSuccess;
  const HiddenLayout& l = scratch.side[which];
  const Tensor &mask = p.in[kMask], &q_ids = p.in[kQSegmentIds], &kv_ids = p.in[kKvSegmentIds];
  const bool heads = p.has(kMask) && mask.head != 0;
  const auto varies = [&](int group, bool ids) {
    return (p.has(kMask) && group_stride(g, mask, group) != 0) ||
           (ids && p.has(kQSegmentIds) &&
            (group_stride(g, q_ids, group) != 0 || group_stride(g, kv_ids, group) != 0));
  };
  // Strides of a [b0, b1, head, row] array that has the dimensions that vary; row in elements.
  int b0 = 1, b1 = 1;
  const auto place = [&](auto& t, int64_t at, bool ids, int64_t rows, int64_t row) {
    t.data = reinterpret_cast<decltype(t.data)>(base + at);
    b0 = varies(1, ids) ? static_cast<int>(g.size[1]) : 1;
    b1 = varies(0, ids) ? static_cast<int>(g.size[0]) : 1;
    t.row = rows > 1 ? row : 0;
    t.head = heads ? rows * row : 0;
    const int64_t element = rows * row * (heads ? p.Hq : 1);
    t.b1 = b1 > 1 ? element : 0;
    t.b0 = b0 > 1 ? element * b1 : 0;
  };

  HiddenParams params;
  params.mask = strided<const uint8_t>(g, mask);
  params.mask_col = mask.col;
  params.keys_first = side.keys_first;
  params.lines = static_cast<int>(l.lines);
  params.columns = static_cast<int>(l.columns);
  params.line_tile = side.line_tile;
  params.column_tile = side.column_tile;
  params.bit_lines = static_cast<int>(l.bit_lines);
  params.bit_tiles = static_cast<int>(l.bit_tiles);
  params.heads = static_cast<int>(heads ? p.Hq : 1);
  params.shape = make_shape(p, g);
  params.positions = make_position_args(p, g);

  Hidden& h = params.hidden;
  h.present = 1;
  h.line_ids = strided<const int32_t>(g, side.keys_first ? kv_ids : q_ids);
  h.column_ids = strided<const int32_t>(g, side.keys_first ? q_ids : kv_ids);
  h.bits = {};
  h.column_words = l.bit_tiles > 1 ? 4 : 0;
  if (p.has(kMask)) {
    place(h.bits, l.bits, false, l.bit_lines, 4 * l.bit_tiles);
    params.b0 = b0;
    params.b1 = b1;
    const int64_t outer = int64_t(b0) * b1 * params.heads;
    cudaError_t e =
        side.keys_first
            ? launch_units<pack_keys>(outer * l.bit_tiles * ((l.bit_lines + 3) / 4), kHiddenThreads,
                                      params, stream)
            : launch_units<pack_queries>(outer * l.bit_lines, kHiddenThreads / 32, params, stream);
    if (e) return e;
  }
  place(h.map, l.map, true, l.line_tiles, l.words);
  params.b0 = b0;
  params.b1 = b1;
  if (cudaError_t e = launch_units<classify_tiles>(
          int64_t(b0) * b1 * params.heads * l.line_tiles * l.words, 1, params, stream))
    return e;

  const int64_t live_words = (p.Sk + 31) / 32, kv_heads = heads ? p.Hkv : 1;
  h.live.data = reinterpret_cast<const uint32_t*>(base + scratch.live);
  h.live.row = 1;
  h.live.head = heads ? live_words : 0;
  h.live.b1 = kv_heads * live_words;
  h.live.b0 = h.live.b1 * g.size[0];
  if (which == 0) {
    if (cudaError_t e =
            launch_units<find_live_keys>(p.B * kv_heads * live_words, 1, params, stream))
      return e;
  }
  *hidden = h;
  return cudaSuccess;
}

}  // namespace jft::hopper
