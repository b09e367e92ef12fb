// Python module jax_flashtrain_native.cuda (interface: jax_flashtrain/_src/native.py). Importing
// and asking it needs no driver and no GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "attrs.h"
#include "handlers.h"
#include "hopper_road.h"
#include "run.h"

namespace nb = nanobind;

namespace {

// Smallest GPU generation with the instructions of the portable kernels.
constexpr int64_t kMinCapability = 80;

int64_t fact(const nb::dict& facts, const char* name) { return nb::cast<int64_t>(facts[name]); }

jft::cuda::Facts facts_of(const nb::dict& d) {
  jft::cuda::Facts f;
  f.dtype = static_cast<jft::DType>(fact(d, "dtype"));
  f.full_float32 = fact(d, "precision") != static_cast<int64_t>(jft::Precision::kDefault);
  f.Sq = fact(d, "Sq");
  f.Sk = fact(d, "Sk");
  f.D = fact(d, "D");
  f.Dv = fact(d, "Dv");
  return f;
}

// The call as far as its facts tell: dense, aligned arrays, one batch dimension, a positive scale.
jft::Problem problem_of(const nb::dict& d) {
  static char somewhere alignas(256)[256];
  jft::Problem p{};
  p.attrs.present = fact(d, "present");
  p.attrs.grads = fact(d, "grads");
  p.attrs.layout = fact(d, "layout");
  p.attrs.causal = fact(d, "causal");
  p.attrs.deterministic = fact(d, "deterministic");
  p.attrs.softcap = static_cast<double>(fact(d, "softcap"));
  p.attrs.batch_dims = 1;
  p.batch_dims = 1;
  p.dtype = static_cast<jft::DType>(fact(d, "dtype"));
  p.B = p.batch_size[0] = fact(d, "B");
  p.Sq = fact(d, "Sq");
  p.Sk = fact(d, "Sk");
  p.Hq = fact(d, "Hq");
  p.Hkv = fact(d, "Hkv");
  p.G = p.Hq / p.Hkv;
  p.D = fact(d, "D");
  p.Dv = fact(d, "Dv");
  p.dropout_threshold = static_cast<uint32_t>(fact(d, "dropout"));
  const bool btnh = p.attrs.layout == static_cast<int64_t>(jft::Layout::kBTNH);
  const auto dense = [&](jft::Tensor& t, int64_t seq, int64_t heads, int64_t features) {
    t.data = somewhere;
    t.dtype = p.dtype;
    t.col = 1;
    t.row = btnh ? heads * features : features;
    t.head = btnh ? features : seq * features;
    t.batch[0] = seq * heads * features;
  };
  for (int op = 0; op < jft::kNumOperands; ++op) {
    if (jft::has(p.attrs.present, static_cast<jft::Operand>(op))) p.in[op].data = somewhere;
  }
  if (p.in[jft::kBias].data) {
    p.in[jft::kBias].dtype = static_cast<jft::DType>(fact(d, "bias_dtype"));
  }
  if (jft::Tensor& mask = p.in[jft::kMask]; mask.data) {  // which dimensions it has
    mask.col = fact(d, "mask_cols") > 1;
    mask.row = fact(d, "mask_rows") > 1 ? p.Sk : 0;
    mask.head = fact(d, "mask_heads") > 1 ? p.Sq * p.Sk : 0;
    mask.batch[0] = fact(d, "mask_batch") > 1 ? p.Hq * p.Sq * p.Sk : 0;
  }
  for (int op : {jft::kQSegmentIds, jft::kKvSegmentIds}) {
    if (p.in[op].data) p.in[op].batch[0] = op == jft::kQSegmentIds ? p.Sq : p.Sk;
  }
  dense(p.in[jft::kQ], p.Sq, p.Hq, p.D);
  dense(p.in[jft::kK], p.Sk, p.Hkv, p.D);
  dense(p.in[jft::kV], p.Sk, p.Hkv, p.Dv);
  if (fact(d, "backward") == 0) {
    dense(p.out[jft::kResO], p.Sq, p.Hq, p.Dv);
    return p;
  }
  dense(p.in[jft::kO], p.Sq, p.Hq, p.Dv);
  dense(p.in[jft::kDO], p.Sq, p.Hq, p.Dv);
  dense(p.out[jft::kResDQ], p.Sq, p.Hq, p.D);
  dense(p.out[jft::kResDK], p.Sk, p.Hkv, p.D);
  dense(p.out[jft::kResDV], p.Sk, p.Hkv, p.Dv);
  if (p.attrs.grads & jft::kGradBias) {  // which dimensions it has
    jft::Tensor& dbias = p.out[jft::kResDBias];
    dbias.data = somewhere;
    dbias.dtype = p.in[jft::kBias].dtype;
    dbias.col = fact(d, "bias_cols") > 1 || p.Sk == 1;
    dbias.row = fact(d, "bias_rows") > 1 || p.Sq == 1 ? p.Sk : 0;
  }
  const int64_t summed = fact(d, "summed");  // bit set of Operand
  for (int op : {jft::kQ, jft::kK, jft::kV}) {
    if (jft::has(summed, static_cast<jft::Operand>(op))) p.out[jft::kResDQ + op].batch[0] = 0;
  }
  return p;
}

std::pair<std::string, std::string> explain(const nb::dict& d) {
  const int64_t capability = fact(d, "compute_capability");  // 0: no device in this process
  if (capability != 0 && capability < kMinCapability) {
    return {"", "flash_attention: the CUDA kernels need compute capability 8.0 or newer, got " +
                    std::to_string(capability / 10) + "." + std::to_string(capability % 10)};
  }
  const jft::cuda::Facts f = facts_of(d);
  const std::string reason = jft::cuda::unsupported(f);
  if (!reason.empty()) return {"", reason};
  // Without a device the answer is what every supported GPU can run.
  const jft::Problem p = problem_of(d);
  const bool backward = fact(d, "backward") != 0;
  if (jft::cuda::hopper_takes(p, backward, capability)) return {"cuda_hopper", ""};
  if (p.out[jft::kResDBias].data &&
      jft::cuda::hopper_takes(jft::cuda::without_dbias(p), backward, capability)) {
    return {"cuda_hopper, dbias " + jft::cuda::kernel_name(f), ""};
  }
  return {jft::cuda::kernel_name(f), ""};
}

int64_t workspace_bytes(const nb::dict& d) {
  const jft::cuda::Facts f = facts_of(d);
  const int64_t present = fact(d, "present"), grads = fact(d, "grads");
  jft::cuda::WorkspaceSizes s;
  s.backward = fact(d, "backward") != 0;
  s.ids = jft::has(present, jft::kQSegmentIds);
  s.mask = jft::has(present, jft::kMask);
  s.dbias = s.backward && (grads & jft::kGradBias);
  s.dalibi = s.backward && (grads & jft::kGradAlibi);
  s.element_bytes = f.dtype == jft::DType::kF32 ? 4 : 2;
  s.head = jft::cuda::kernel_head(f);
  s.B = fact(d, "B");
  s.Sq = f.Sq;
  s.Sk = f.Sk;
  s.Hq = fact(d, "Hq");
  // The buffer may start anywhere inside an aligned block; never empty, so it has an address.
  const int64_t portable = jft::cuda::workspace_layout(s).bytes + jft::cuda::kWorkspaceAlign;
  const jft::Problem p = problem_of(d);
  const int64_t hopper = jft::cuda::hopper_scratch(p, s.backward);
  const int64_t capability = fact(d, "compute_capability");
  if (hopper == 0 && s.dbias && (capability == 0 || capability == 90)) {
    return portable + jft::cuda::hopper_scratch(jft::cuda::without_dbias(p), true);
  }
  return std::max(portable, hopper);
}

}  // namespace

#if !defined(JFT_MODULE_NAME)
#define JFT_MODULE_NAME cuda  // the emulator stands in for another module
#endif

NB_MODULE(JFT_MODULE_NAME, m) {
  m.attr("interface_version") = jft::kInterfaceVersion;
  m.attr("ffi_version") = nb::make_tuple(JFT_FFI_MAJOR, JFT_FFI_MINOR);
  m.def("registrations", [] {
    nb::dict targets;
    targets["jax_flashtrain_fwd_v1"] =
        nb::capsule(reinterpret_cast<void*>(jft::cuda::JftCudaForward));
    targets["jax_flashtrain_bwd_v1"] =
        nb::capsule(reinterpret_cast<void*>(jft::cuda::JftCudaBackward));
    return targets;
  });
  m.def("explain", &explain);
  m.def("workspace_bytes", &workspace_bytes);
}
