#include "run.h"

#include <cmath>

#include "fold.h"
#include "hopper_road.h"
#include "launch/launch.h"

namespace jft::cuda {

namespace {

constexpr int64_t kMaxLength = int64_t(1) << 30;  // positions are 32-bit inside a tile
constexpr int64_t kMaxGrid = (int64_t(1) << 31) - 1;

int bytes_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

Facts facts_of(const Problem& p) {
  Facts f;
  f.dtype = p.dtype;
  f.full_float32 = p.attrs.precision != static_cast<int64_t>(Precision::kDefault);
  f.Sq = p.Sq;
  f.Sk = p.Sk;
  f.D = p.D;
  f.Dv = p.Dv;
  return f;
}

// 16-byte copies of whole rows: base, strides and row length are multiples of 16 bytes.
bool copies_chunks(const Problem& p, const Tensor& t, int64_t features, int bytes) {
  const auto whole = [bytes](int64_t elements) { return elements * bytes % 16 == 0; };
  bool ok = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && whole(features) && whole(t.row) &&
            whole(t.head);
  for (int d = 0; d < p.batch_dims; ++d) ok = ok && whole(t.batch[d]);
  return ok;
}

// Two neighbouring elements of a 16-bit bias are one aligned word, and none straddles the end of a
// row.
bool reads_pairs(const Problem& p, const Tensor& t) {
  bool ok = (t.dtype == DType::kF16 || t.dtype == DType::kBF16) && t.col == 1 && p.Sk % 2 == 0 &&
            reinterpret_cast<uintptr_t>(t.data) % 4 == 0 && t.row % 2 == 0 && t.head % 2 == 0;
  for (int d = 0; d < p.batch_dims; ++d) ok = ok && t.batch[d] % 2 == 0;
  return ok;
}

WorkspaceSizes sizes_of(const Problem& p, const KernelSet& kernels, bool backward) {
  WorkspaceSizes s;
  s.backward = backward;
  s.ids = p.has(kQSegmentIds);
  s.mask = p.has(kMask);
  s.dbias = backward && p.out[kResDBias].data != nullptr;
  s.dalibi = backward && p.out[kResDAlibi].data != nullptr;
  s.element_bytes = kernels.element_bytes;
  s.head = kernels.head;
  s.B = p.B;
  s.Sq = p.Sq;
  s.Sk = p.Sk;
  s.Hq = p.Hq;
  return s;
}

// A call being launched: parameters, kernels, scratch.
struct Call {
  Params params{};
  const KernelSet* kernels = nullptr;
  Workspace layout;
  char* scratch = nullptr;

  std::string prepare(const Problem& problem, void* workspace, int64_t bytes, bool backward);
  void describe_map();
};

std::string Call::prepare(const Problem& problem, void* workspace, int64_t bytes, bool backward) {
  if (std::string reason = unsupported(facts_of(problem)); !reason.empty()) return reason;
  params.p = problem;
  Problem& p = params.p;
  fold_batch(p);
  kernels = find_kernels(p.dtype, facts_of(p).full_float32, std::max(p.D, p.Dv));

  const uintptr_t base = reinterpret_cast<uintptr_t>(workspace);
  const uintptr_t aligned = (base + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign;
  scratch = reinterpret_cast<char*>(aligned);
  layout = workspace_layout(sizes_of(p, *kernels, backward));
  if (layout.bytes > 0 && bytes < layout.bytes + static_cast<int64_t>(aligned - base)) {
    return "flash_attention: workspace must have " +
           std::to_string(layout.bytes + static_cast<int64_t>(aligned - base)) + " bytes, got " +
           std::to_string(bytes);
  }

  const Attrs& a = p.attrs;
  params.general = a.softcap > 0.0 || p.has(kBias) || p.has(kAlibiSlopes) ||
                   p.dropout_threshold != 0 || !(a.scale > 0.0) ||
                   (p.dtype == DType::kF32 && facts_of(p).full_float32);
  params.scale = static_cast<float>(a.scale);
  params.scale_log2 = static_cast<float>(a.scale * 1.4426950408889634);
  params.softcap = static_cast<float>(a.softcap);
  params.softcap_log2 =
      a.softcap > 0.0 ? static_cast<float>(2.0 * 1.4426950408889634 * a.scale / a.softcap) : 0.0f;
  params.dropout_scale =
      static_cast<float>(65536.0 / (65536.0 - static_cast<double>(p.dropout_threshold)));
  const int element = bytes_of(p.dtype);
  for (Operand op : {kQ, kK, kV, kO, kDO}) {
    const int64_t features = op == kQ || op == kK ? p.D : p.Dv;
    if (p.has(op) && copies_chunks(p, p.in[op], features, element)) params.vector |= 1u << op;
  }
  for (int slot = 0; slot < (backward ? 3 : 1); ++slot) {
    const int64_t features = backward && slot != kResDV ? p.D : p.Dv;  // of o; of dq, dk, dv
    if (p.out[slot].data && copies_chunks(p, p.out[slot], features, element)) {
      params.vector_out |= 1u << slot;
    }
  }
  params.bias_pairs = p.has(kBias) && reads_pairs(p, p.in[kBias]);
  params.batches_kept = p.B;
  params.batches_summed = 1;
  params.splits = 1;
  if (p.has(kMask) || p.has(kQSegmentIds)) describe_map();
  if (backward) {
    params.rows = reinterpret_cast<RowFacts*>(scratch + layout.rows);
    params.rows_pitch = round_up(p.Sq, kRowsMultiple);
  }
  return "";
}

void Call::describe_map() {
  const Problem& p = params.p;
  VisibilityMap& map = params.map;
  map.data = reinterpret_cast<unsigned char*>(scratch + layout.map);
  map.query_cells = static_cast<int32_t>(ceil_div(p.Sq, kCell));
  map.key_cells = static_cast<int32_t>(ceil_div(p.Sk, kCell));
  map.heads = p.has(kMask) && p.in[kMask].head != 0 ? static_cast<int32_t>(p.Hq) : 1;
  const int64_t cells = static_cast<int64_t>(map.query_cells) * map.key_cells;
  map.head = map.heads > 1 ? cells : 0;
  int64_t stride = cells * map.heads;
  map.batches = 1;
  for (int d = p.batch_dims - 1; d >= 0; --d) {
    bool varies = false;
    for (Operand op : {kMask, kQSegmentIds, kKvSegmentIds}) {
      varies |= p.has(op) && p.in[op].batch[d] != 0;
    }
    map.batch[d] = varies ? stride : 0;
    if (varies) {
      stride *= p.batch_size[d];
      map.batches *= p.batch_size[d];
    }
  }
}

std::string launched(Status status) {
  if (status == kSuccess) return "";
  return std::string("flash_attention: CUDA launch failed: ") + status_text(status);
}

std::string too_many(int64_t blocks) {
  return "flash_attention: the problem must need at most 2^31 - 1 blocks, got " +
         std::to_string(blocks);
}

void set_batches(Params& params, const Tensor& result) {
  const BatchSum sum = batch_sum(params.p, result);
  params.batches_kept = sum.kept;
  params.batches_summed = sum.summed;
}

// Elements of a bias-shaped gradient.
int64_t bias_elements(const Problem& p, const Tensor& t) {
  int64_t n = batch_sum(p, t).kept;
  if (t.head) n *= p.Hq;
  if (t.row) n *= p.Sq;
  if (t.col) n *= p.Sk;
  return n;
}

std::string launch_dbias(Call& call, Stream stream) {
  Params params = call.params;
  const Problem& p = params.p;
  const Tensor& result = p.out[kResDBias];
  const TileShape shape = dq_tile(call.kernels->element_bytes, call.kernels->head, true);
  set_batches(params, result);
  params.bias_elements = bias_elements(p, result);
  params.q_tiles = static_cast<int32_t>(ceil_div(p.Sq, shape.rows));
  params.k_tiles = static_cast<int32_t>(ceil_div(p.Sk, shape.cols));
  if (params.bias_elements == 0) return "";
  const int64_t tiles = params.batches_kept * (result.head ? p.Hq : 1) *
                        (result.row ? params.q_tiles : 1) * (result.col ? params.k_tiles : 1);
  const int64_t steps = p.B * p.Hq * params.q_tiles * params.k_tiles / tiles;
  const int64_t room = call.layout.bias_part_bytes / (params.bias_elements * 4);
  int64_t splits = std::min({steps, kBusyBlocks / tiles, room});
  if (splits < 2) splits = 1;
  params.splits = static_cast<int32_t>(splits);
  params.bias_parts =
      splits > 1 ? reinterpret_cast<float*>(call.scratch + call.layout.bias_parts) : nullptr;
  if (tiles * splits > kMaxGrid) return too_many(tiles * splits);
  if (std::string e = launched(call.kernels->bias_gradient(params, tiles * splits, stream));
      !e.empty()) {
    return e;
  }
  return splits > 1 ? launched(launch_bias_sum(params, stream)) : "";
}

// Gradients of an empty batch that have size 1 in the empty dimension.
std::string clear_gradients(const Problem& p, Stream stream) {
  const int element = bytes_of(p.dtype);
  const int64_t sizes[kNumResults] = {p.Sq * p.Hq * p.D * element,
                                      p.Sk * p.Hkv * p.D * element,
                                      p.Sk * p.Hkv * p.Dv * element,
                                      0,
                                      p.Hq * 4,
                                      p.Hq * 4};
  for (int slot = 0; slot < kNumResults; ++slot) {
    const Tensor& t = p.out[slot];
    if (!t.data) continue;
    int64_t bytes = batch_sum(p, t).kept * sizes[slot];
    if (slot == kResDBias) {
      bytes = bias_elements(p, t) * (t.dtype == DType::kF64 ? 8 : t.dtype == DType::kF32 ? 4 : 2);
    }
    if (bytes == 0) continue;
    if (auto e = launched(clear_memory(t.data, bytes, stream)); !e.empty()) return e;
  }
  return "";
}

// dbias alone, behind a backward that made the rest.
std::string run_dbias(const Problem& problem, void* workspace, int64_t bytes, Stream stream) {
  Call call;
  if (auto e = call.prepare(problem, workspace, bytes, true); !e.empty()) return e;
  if (call.params.p.B == 0) return clear_gradients(call.params.p, stream);
  if (call.params.map.data) {
    if (auto e = launched(launch_map(call.params, stream)); !e.empty()) return e;
  }
  if (auto e = launched(call.kernels->rows(call.params, stream)); !e.empty()) return e;
  return launch_dbias(call, stream);
}

std::string launch_dkdv(Call& call, bool dk, bool dv, Stream stream) {
  Params params = call.params;
  const Problem& p = params.p;
  params.write_dk = dk;
  params.write_dv = dv;
  set_batches(params, p.out[dk ? kResDK : kResDV]);
  params.k_tiles = static_cast<int32_t>(ceil_div(
      p.Sk, dkdv_tile(call.kernels->element_bytes, call.kernels->head, params.general).rows));
  const int64_t blocks = params.batches_kept * p.Hkv * params.k_tiles;
  if (blocks > kMaxGrid) return too_many(blocks);
  return launched(call.kernels->dkdv(params, blocks, stream));
}

}  // namespace

std::string unsupported(const Facts& f) {
  if (f.dtype == DType::kF64) {
    return "flash_attention: the CUDA kernels take float16, bfloat16 and float32, got float64 "
           "(NVIDIA's float64 units would make it slower than the blockwise code)";
  }
  if (f.D > kMaxHeadDim || f.Dv > kMaxHeadDim) {
    return "flash_attention: the CUDA kernels take head sizes up to " +
           std::to_string(kMaxHeadDim) + ", got " + std::to_string(std::max(f.D, f.Dv));
  }
  if (f.Sq >= kMaxLength || f.Sk >= kMaxLength) {
    return "flash_attention: the CUDA kernels take sequences shorter than 2^30, got " +
           std::to_string(std::max(f.Sq, f.Sk));
  }
  if (find_kernels(f.dtype, f.full_float32, std::max(f.D, f.Dv)) == nullptr) {
    return "flash_attention: this build has no CUDA kernel for the dtype and head size, got head "
           "size " +
           std::to_string(std::max(f.D, f.Dv));
  }
  return "";
}

std::string kernel_name(const Facts& f) {
  const KernelSet* kernels = find_kernels(f.dtype, f.full_float32, std::max(f.D, f.Dv));
  return kernels ? std::string("cuda_portable_") + kernels->name : "";
}

int kernel_head(const Facts& f) {
  const KernelSet* kernels = find_kernels(f.dtype, f.full_float32, std::max(f.D, f.Dv));
  return kernels ? kernels->head : 0;
}

std::string run_forward(const Problem& problem, void* workspace, int64_t workspace_bytes,
                        Stream stream) {
  if (hopper_takes(problem, false, current_capability()) &&
      workspace_bytes >= hopper_scratch(problem, false)) {
    return launched(hopper_launch(problem, false, workspace, stream));
  }
  Call call;
  if (auto e = call.prepare(problem, workspace, workspace_bytes, false); !e.empty()) return e;
  Params& params = call.params;
  const Problem& p = params.p;
  if (p.B * p.Hq * p.Sq == 0) return "";
  if (params.map.data) {
    if (auto e = launched(launch_map(params, stream)); !e.empty()) return e;
  }
  const TileShape shape =
      forward_tile(call.kernels->element_bytes, call.kernels->head, params.general);
  params.q_tiles = static_cast<int32_t>(ceil_div(p.Sq, shape.rows));
  const int64_t blocks = p.B * p.Hq * params.q_tiles;
  if (blocks > kMaxGrid) return too_many(blocks);
  return launched(call.kernels->forward(params, blocks, stream));
}

std::string run_backward(const Problem& problem, void* workspace, int64_t workspace_bytes,
                         Stream stream) {
  if (hopper_takes(problem, true, current_capability()) &&
      workspace_bytes >= hopper_scratch(problem, true)) {
    return launched(hopper_launch(problem, true, workspace, stream));
  }
  if (problem.out[kResDBias].data) {
    const Problem rest = without_dbias(problem);
    const int64_t used = hopper_scratch(rest, true);
    if (hopper_takes(rest, true, current_capability()) && workspace_bytes >= used) {
      if (auto e = launched(hopper_launch(rest, true, workspace, stream)); !e.empty()) return e;
      return run_dbias(problem, static_cast<char*>(workspace) + used, workspace_bytes - used,
                       stream);
    }
  }
  Call call;
  if (auto e = call.prepare(problem, workspace, workspace_bytes, true); !e.empty()) return e;
  const Problem& p = call.params.p;
  if (p.B == 0) return clear_gradients(p, stream);
  if (call.params.map.data) {
    if (auto e = launched(launch_map(call.params, stream)); !e.empty()) return e;
  }
  if (auto e = launched(call.kernels->rows(call.params, stream)); !e.empty()) return e;

  {
    Params params = call.params;
    const TileShape shape =
        dq_tile(call.kernels->element_bytes, call.kernels->head, params.general);
    params.q_tiles = static_cast<int32_t>(ceil_div(p.Sq, shape.rows));
    if (p.out[kResDAlibi].data) {
      params.alibi_parts = reinterpret_cast<float*>(call.scratch + call.layout.alibi_parts);
    }
    set_batches(params, p.out[kResDQ]);
    const int64_t blocks = params.batches_kept * p.Hq * params.q_tiles;
    if (blocks > kMaxGrid) return too_many(blocks);
    if (auto e = launched(call.kernels->dq(params, blocks, stream)); !e.empty()) return e;
    if (p.out[kResDAlibi].data) {
      set_batches(params, p.out[kResDAlibi]);
      if (auto e = launched(launch_head_sum(params, true, params.batches_kept * p.Hq, stream));
          !e.empty()) {
        return e;
      }
    }
  }
  if (p.out[kResDSinks].data) {
    Params params = call.params;
    set_batches(params, p.out[kResDSinks]);
    if (auto e = launched(launch_head_sum(params, false, params.batches_kept * p.Hq, stream));
        !e.empty()) {
      return e;
    }
  }
  if (same_batches(p, p.out[kResDK], p.out[kResDV])) {
    if (auto e = launch_dkdv(call, true, true, stream); !e.empty()) return e;
  } else {
    if (auto e = launch_dkdv(call, true, false, stream); !e.empty()) return e;
    if (auto e = launch_dkdv(call, false, true, stream); !e.empty()) return e;
  }
  return p.out[kResDBias].data ? launch_dbias(call, stream) : "";
}

}  // namespace jft::cuda
