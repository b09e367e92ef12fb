// Python module jax_flashtrain_native.cuda (interface: jax_flashtrain/_src/native.py). Importing and
// asking it needs no driver and no GPU.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "attrs.h"
#include "handlers.h"
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

std::pair<std::string, std::string> explain(const nb::dict& d) {
  const int64_t capability = fact(d, "compute_capability");  // 0: no device in this process
  if (capability != 0 && capability < kMinCapability) {
    return {"", "flash_attention: the CUDA kernels need compute capability 8.0 or newer, got " +
                    std::to_string(capability / 10) + "." + std::to_string(capability % 10)};
  }
  const jft::cuda::Facts f = facts_of(d);
  const std::string reason = jft::cuda::unsupported(f);
  if (!reason.empty()) return {"", reason};
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
  return jft::cuda::workspace_layout(s).bytes + jft::cuda::kWorkspaceAlign;
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
