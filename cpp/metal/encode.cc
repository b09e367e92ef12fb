#include "encode.h"

#include <algorithm>
#include <cmath>

#include "params.h"
#include "tiles.h"

namespace jft::metal {

// About 0.1 s on the slowest GPU that is supported (2.6 TFLOP/s in f32), whatever the kernel
// reaches.
double flops_per_dispatch = 1.0e11;

namespace {

static_assert(kMetalBatchDims == kMaxBatchDims, "params.h and problem.h");
static_assert(int(kBufQ) == kQ && int(kBufV) == kV && int(kBufQOffset) == kQOffset &&
                  int(kBufWindowLeft) == kWindowLeft && int(kBufWindowRight) == kWindowRight &&
                  int(kBufQSegmentIds) == kQSegmentIds && int(kBufKvSegmentIds) == kKvSegmentIds &&
                  int(kBufQLengths) == kQLengths && int(kBufKvLengths) == kKvLengths &&
                  int(kBufMask) == kMask && int(kBufBias) == kBias &&
                  int(kBufAlibiSlopes) == kAlibiSlopes && int(kBufSinks) == kSinks &&
                  int(kBufDropoutSeed) == kDropoutSeed &&
                  int(kBufDropoutOrigin) == kDropoutOrigin && int(kBufO) == kO &&
                  int(kBufRowMax) == kRowMax && int(kBufRowLogSum) == kRowLogSum &&
                  int(kBufDO) == kDO && int(kBufDLse) == kDLse && kNumOperands == 21,
              "buffer indices of operands are operand numbers");

int bytes_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Optional integer operands: always an argument of the kernels, bound to `dummy` when absent.
constexpr Operand kAlwaysBound[] = {kQOffset, kWindowLeft, kWindowRight, kQLengths, kKvLengths};

// A call with its leading dimensions merged where every array allows it.
class Call {
 public:
  Call(const Problem& p, bool backward, const CallBuffers& buffers, Pipelines& pipelines,
       Commands& commands)
      : p_(p), buffers_(buffers), pipelines_(pipelines), commands_(commands) {
    dp_ = metal_padded(static_cast<int>(p.D), static_cast<int>(p.Dv));
    dvp_ = metal_padded(static_cast<int>(p.Dv), static_cast<int>(p.D));
    bytes_ = bytes_of(p.dtype);
    fill(backward);
  }

  std::string forward();
  std::string backward();

 private:
  using Bindings = std::initializer_list<std::pair<BufferIndex, Slice>>;

  void fill(bool backward);
  void merge_batch(MetalStrides* const* arrays, int count);
  // Chooses the batch dimensions that the result `t` keeps; returns their number of elements.
  int64_t keep(const MetalStrides& t);
  int64_t keep_all();
  std::string dispatch(KernelId kernel, std::uint32_t extra_flags, int64_t tiles, int64_t groups,
                       double flops_per_tile, int threadgroup_bytes, Bindings results);

  const Problem& p_;
  const CallBuffers& buffers_;
  Pipelines& pipelines_;
  Commands& commands_;
  MetalParams m_{};
  MetalStrides sums_[2];  // dalibi_slopes, dsinks
  int dp_, dvp_, bytes_;
};

MetalStrides strides_of(const Tensor& t) {
  MetalStrides s{};
  if (!t.data) return s;
  for (int d = 0; d < kMaxBatchDims; ++d) s.batch[d] = t.batch[d];
  s.head = t.head;
  s.row = t.row;
  s.col = t.col;
  return s;
}

void Call::merge_batch(MetalStrides* const* arrays, int count) {
  int n = 0;
  for (int d = 0; d < p_.batch_dims; ++d) {
    const i64 size = p_.batch_size[d];
    if (size == 1) continue;
    bool merges = n > 0;
    for (int a = 0; a < count && merges; ++a) {
      merges = arrays[a]->batch[n - 1] == arrays[a]->batch[d] * size;
    }
    const int at = merges ? n - 1 : n++;
    for (int a = 0; a < count; ++a) arrays[a]->batch[at] = arrays[a]->batch[d];
    m_.batch_size[at] = merges ? m_.batch_size[at] * size : size;
  }
  m_.batch_dims = n;
}

void Call::fill(bool backward) {
  for (int op = 0; op < kNumOperands; ++op) m_.in[op] = strides_of(p_.in[op]);
  if (backward) {
    for (int r = 0; r <= kResDBias; ++r) m_.out[r] = strides_of(p_.out[r]);
    sums_[0] = strides_of(p_.out[kResDAlibi]);
    sums_[1] = strides_of(p_.out[kResDSinks]);
  } else {
    m_.in[kO] = strides_of(p_.out[kResO]);
    m_.in[kRowMax] = strides_of(p_.out[kResRowMax]);
    m_.in[kRowLogSum] = strides_of(p_.out[kResRowLogSum]);
  }
  i64 step = p_.Hq * p_.Sq;
  for (int d = p_.batch_dims - 1; d >= 0; --d) {
    m_.scratch.batch[d] = step;
    step *= p_.batch_size[d];
  }
  m_.scratch.head = p_.Sq;
  m_.scratch.row = 1;
  MetalStrides* arrays[kNumOperands + 7];
  int count = 0;
  for (MetalStrides& s : m_.in) arrays[count++] = &s;
  for (MetalStrides& s : m_.out) arrays[count++] = &s;
  for (MetalStrides& s : sums_) arrays[count++] = &s;
  arrays[count++] = &m_.scratch;
  merge_batch(arrays, count);

  m_.Sq = p_.Sq;
  m_.Sk = p_.Sk;
  m_.D = p_.D;
  m_.Dv = p_.Dv;
  m_.Hq = p_.Hq;
  m_.G = p_.G;
  m_.window_left = p_.attrs.window_left;
  m_.window_right = p_.attrs.window_right;
  m_.causal = p_.attrs.causal != 0;
  for (int op = 0; op < kNumOperands; ++op) {
    if (p_.in[op].data) m_.present |= 1 << op;
  }
  m_.dropout_threshold = p_.dropout_threshold;
  m_.dropout_scale = 65536.0f / static_cast<float>(65536 - p_.dropout_threshold);
  m_.scale = static_cast<float>(p_.attrs.scale);
  m_.softcap = static_cast<float>(p_.attrs.softcap);
  if (backward && p_.out[kResDBias].data) {
    m_.bias_heads = m_.out[kResDBias].head ? p_.Hq : 1;
    m_.bias_rows = m_.out[kResDBias].row ? p_.Sq : 1;
    m_.bias_cols = m_.out[kResDBias].col ? p_.Sk : 1;
  }
}

int64_t Call::keep(const MetalStrides& t) {
  int64_t kept = 1;
  m_.kept = 0;
  m_.reduced_batches = 1;
  for (int d = 0; d < m_.batch_dims; ++d) {
    if (t.batch[d]) {
      m_.kept |= 1 << d;
      kept *= m_.batch_size[d];
    } else {
      m_.reduced_batches *= m_.batch_size[d];
    }
  }
  // An empty dimension that is summed over: the result is zero. Kernels divide by the sizes.
  for (int d = 0; m_.reduced_batches == 0 && d < m_.batch_dims; ++d) {
    if (m_.batch_size[d] == 0) m_.batch_size[d] = 1;
  }
  return kept;
}

int64_t Call::keep_all() {
  m_.kept = (1 << kMetalBatchDims) - 1;
  m_.reduced_batches = 1;
  return p_.B;
}

std::string Call::dispatch(KernelId kernel, std::uint32_t extra_flags, int64_t tiles,
                           int64_t groups, double flops_per_tile, int threadgroup_bytes,
                           Bindings results) {
  if (tiles <= 0 || groups <= 0) return "";
  Variant variant{kernel, p_.dtype, dp_, dvp_, extra_flags, 0};
  const std::pair<Operand, FunctionConstant> by_operand[] = {
      {kBias, kFlagBias},         {kMask, kFlagMask},   {kQSegmentIds, kFlagSegments},
      {kAlibiSlopes, kFlagAlibi}, {kSinks, kFlagSinks}, {kDLse, kFlagDLse}};
  for (auto [operand, flag] : by_operand) {
    if (p_.has(operand)) variant.flags |= 1u << flag;
  }
  if (p_.attrs.softcap > 0) variant.flags |= 1u << kFlagSoftcap;
  if (p_.dropout_threshold) variant.flags |= 1u << kFlagDropout;
  if (p_.has(kBias)) {
    const DType type = p_.in[kBias].dtype;
    variant.bias_type = type == DType::kF32 ? 0 : type == DType::kF16 ? 1 : 2;
  }
  std::string error;
  MTL::ComputePipelineState* pipeline = pipelines_.get(variant, &error);
  if (!pipeline) return error;

  // Long grids are cut: along the tiles of one (batch, head) where even that is too much.
  const double most = std::max(1.0, std::floor(flops_per_dispatch / std::max(1.0, flops_per_tile)));
  const int64_t limit = static_cast<int64_t>(std::min(most, 1.0e9));
  const int64_t tile_step = std::min(tiles, limit);
  const int64_t group_step =
      std::min<int64_t>(std::max<int64_t>(1, limit / tiles), int64_t{1} << 20);
  for (int64_t group = 0; group < groups; group += group_step) {
    for (int64_t tile = 0; tile < tiles; tile += tile_step) {
      m_.first_group = group;
      m_.first_tile = tile;
      MTL::ComputeCommandEncoder* encoder = commands_.encoder();
      encoder->setComputePipelineState(pipeline);
      for (int op = 0; op < kNumOperands; ++op) {
        if (p_.has(static_cast<Operand>(op))) {
          encoder->setBuffer(buffers_.in[op].buffer, buffers_.in[op].offset,
                             static_cast<NS::UInteger>(op));
        }
      }
      for (Operand op : kAlwaysBound) {
        if (!p_.has(op)) {
          encoder->setBuffer(buffers_.dummy.buffer, buffers_.dummy.offset,
                             static_cast<NS::UInteger>(op));
        }
      }
      for (const auto& [index, slice] : results) {
        encoder->setBuffer(slice.buffer, slice.offset, static_cast<NS::UInteger>(index));
      }
      encoder->setBytes(&m_, sizeof m_, static_cast<NS::UInteger>(kBufParams));
      if (threadgroup_bytes) {
        encoder->setThreadgroupMemoryLength(static_cast<NS::UInteger>(threadgroup_bytes), 0);
      }
      encoder->dispatchThreadgroups(
          MTL::Size(static_cast<NS::UInteger>(std::min(tile_step, tiles - tile)),
                    static_cast<NS::UInteger>(std::min(group_step, groups - group)), 1),
          MTL::Size(static_cast<NS::UInteger>(kThreads), 1, 1));
      if (tile_step < tiles || group_step < groups) commands_.cut();
    }
  }
  return "";
}

int64_t tiles_of(int64_t n, int64_t tile) { return (n + tile - 1) / tile; }

std::string Call::forward() {
  const double flops = 2.0 * kForwardRows * static_cast<double>(p_.Sk) * (dp_ + dvp_);
  return dispatch(KernelId::kForward, 0, tiles_of(p_.Sq, kForwardRows), keep_all() * p_.Hq, flops,
                  metal_forward_bytes(dp_, dvp_, bytes_),
                  {{kBufO, buffers_.out[kResO]},
                   {kBufRowMax, buffers_.out[kResRowMax]},
                   {kBufRowLogSum, buffers_.out[kResRowLogSum]}});
}

std::string Call::backward() {
  const int rows = metal_backward_rows(dp_, dvp_),
            staged = metal_backward_staged(dp_, dvp_, bytes_);
  const int bytes = metal_backward_bytes(dp_, dvp_, bytes_);
  const bool sink_terms = needs_sink_terms(p_), alibi_terms = needs_alibi_terms(p_);
  const auto terms = [](bool on) { return on ? 1u << kFlagRowTerms : 0u; };
  const auto& out = p_.out;

  std::string error = dispatch(KernelId::kDelta, terms(sink_terms), tiles_of(p_.Sq, kSimdgroups),
                               keep_all() * p_.Hq, 2.0 * kSimdgroups * dvp_, 0,
                               {{kBufDelta, buffers_.delta}, {kBufRowTerms, buffers_.sink_terms}});
  if (!error.empty()) return error;

  const MetalParams before = m_;  // `keep` may touch the batch sizes
  int64_t kept = keep(m_.out[kResDQ]);
  double flops = 2.0 * rows * static_cast<double>(p_.Sk) * (2 * dp_ + dvp_) *
                 static_cast<double>(std::max<i64>(1, m_.reduced_batches));
  error =
      dispatch(KernelId::kDq, terms(alibi_terms), tiles_of(p_.Sq, rows), kept * p_.Hq, flops, bytes,
               {{kBufDQ, buffers_.out[kResDQ]},
                {kBufDelta, buffers_.delta},
                {kBufRowTerms, buffers_.alibi_terms}});
  if (!error.empty()) return error;

  // dk and dv come from one launch unless they are summed over different batch dimensions.
  m_ = before;
  keep(m_.out[kResDV]);
  const int dv_kept = m_.kept;
  m_ = before;
  kept = keep(m_.out[kResDK]);
  const std::uint32_t dk_flag = 1u << kFlagDK, dv_flag = 1u << kFlagDV;
  const bool together = m_.kept == dv_kept;
  for (int launch = 0; launch < (together ? 1 : 2); ++launch) {
    m_ = before;
    kept = keep(m_.out[launch == 0 ? kResDK : kResDV]);
    const std::uint32_t flags = together ? dk_flag | dv_flag : launch == 0 ? dk_flag : dv_flag;
    flops = 2.0 * rows * static_cast<double>(p_.Sq) * 2 * (dp_ + dvp_) *
            static_cast<double>(p_.G * std::max<i64>(1, m_.reduced_batches));
    error = dispatch(KernelId::kDkdv, flags, tiles_of(p_.Sk, rows), kept * p_.Hkv, flops, bytes,
                     {{kBufDK, buffers_.out[kResDK]},
                      {kBufDV, buffers_.out[kResDV]},
                      {kBufDelta, buffers_.delta}});
    if (!error.empty()) return error;
  }

  if (out[kResDBias].data) {
    m_ = before;
    kept = keep(m_.out[kResDBias]);
    const bool rows_kept = m_.bias_rows != 1 || p_.Sq == 1,
               cols_kept = m_.bias_cols != 1 || p_.Sk == 1;
    const int64_t row_tiles = rows_kept ? tiles_of(p_.Sq, rows) : 1;
    const int64_t col_tiles = cols_kept ? tiles_of(p_.Sk, staged) : 1;
    const double pairs = (rows_kept ? rows : static_cast<double>(p_.Sq)) *
                         (cols_kept ? staged : static_cast<double>(p_.Sk)) *
                         static_cast<double>(m_.bias_heads == p_.Hq ? 1 : p_.Hq) *
                         static_cast<double>(std::max<i64>(1, m_.reduced_batches));
    error = dispatch(KernelId::kDbias, 0, row_tiles * col_tiles, kept * m_.bias_heads,
                     2.0 * pairs * (dp_ + dvp_), metal_dbias_bytes(dp_, dvp_, bytes_),
                     {{kBufDBias, buffers_.out[kResDBias]}, {kBufDelta, buffers_.delta}});
    if (!error.empty()) return error;
  }
  const struct {
    int result;
    const MetalStrides& strides;
    const Slice& terms;
  } sums[] = {{kResDAlibi, sums_[0], buffers_.alibi_terms},
              {kResDSinks, sums_[1], buffers_.sink_terms}};
  for (const auto& sum : sums) {
    if (!out[sum.result].data) continue;
    m_ = before;
    m_.sum = sum.strides;
    kept = keep(m_.sum);
    error = dispatch(KernelId::kSumRows, 0, 1, kept * p_.Hq,
                     static_cast<double>(p_.Sq) * static_cast<double>(m_.reduced_batches), 16,
                     {{kBufRowTerms, sum.terms}, {kBufSum, buffers_.out[sum.result]}});
    if (!error.empty()) return error;
  }
  return "";
}

}  // namespace

std::string unsupported(const Problem& p) {
  if (p.dtype == DType::kF64)
    return "flash_attention: q must be float16, bfloat16 or float32 on Metal, got float64";
  if (p.D > 256 || p.Dv > 256) {
    return "flash_attention: head sizes must be at most 256 on Metal, got " + std::to_string(p.D) +
           " and " + std::to_string(p.Dv);
  }
  if (p.has(kBias) && p.in[kBias].dtype == DType::kF64) {
    return "flash_attention: bias must be float16, bfloat16 or float32 on Metal, got float64";
  }
  return "";
}

std::size_t scratch_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.B * p.Hq * p.Sq) * 4;
}

bool needs_sink_terms(const Problem& p) { return p.out[kResDSinks].data != nullptr; }
bool needs_alibi_terms(const Problem& p) { return p.out[kResDAlibi].data != nullptr; }

std::string encode_forward(const Problem& p, const CallBuffers& buffers, Pipelines& pipelines,
                           Commands& commands) {
  return Call(p, false, buffers, pipelines, commands).forward();
}

std::string encode_backward(const Problem& p, const CallBuffers& buffers, Pipelines& pipelines,
                            Commands& commands) {
  return Call(p, true, buffers, pipelines, commands).backward();
}

}  // namespace jft::metal
