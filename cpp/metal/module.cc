// Python module jax_flashtrain_native.metal.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "attrs.h"
#include "encode.h"
#include "handlers.h"
#include "sources.h"
#include "support.h"
#include "tiles.h"

namespace nb = nanobind;

namespace jft::metal {
void bind_emulator(nb::module_& m);
}

NB_MODULE(metal, m) {
  using namespace jft::metal;
  m.attr("interface_version") = jft::kInterfaceVersion;
  m.attr("ffi_version") = nb::make_tuple(JFT_FFI_MAJOR, JFT_FFI_MINOR);
  m.def("registrations", [] {
    nb::dict targets;
    targets["jax_flashtrain_metal_fwd_v1"] =
        nb::capsule(reinterpret_cast<void*>(MetalForwardHandler));
    targets["jax_flashtrain_metal_bwd_v1"] =
        nb::capsule(reinterpret_cast<void*>(MetalBackwardHandler));
    return targets;
  });
  m.def("explain", &explain, "(kernel, \"\"), or (\"\", reason why no kernel serves)");
  m.def("preferred", &preferred, "Is the GPU expected to beat the CPU kernel?");
  m.def(
      "take_buffer_counts",
      [] {
        const BufferCounts counts = take_buffer_counts();
        return nb::make_tuple(counts.wrapped, counts.staged);
      },
      "(wrapped in place, copied) since the last call");
  m.def("set_flops_per_dispatch", [](double flops) { flops_per_dispatch = flops; });
  m.def("sources", [] {
    nb::dict out;
    out["probe"] = kProbeSource;
    out["forward"] = kForwardSource;
    out["delta"] = kDeltaSource;
    out["dq"] = kDqSource;
    out["dkdv"] = kDkdvSource;
    out["dbias"] = kDbiasSource;
    out["sum_rows"] = kSumRowsSource;
    return out;
  });
  m.def(
      "tiles",
      [](int d, int dv, int bytes) {
        const int dp = jft::metal_padded(d, dv), dvp = jft::metal_padded(dv, d);
        nb::dict out;
        out["dp"] = dp;
        out["dvp"] = dvp;
        out["split"] = jft::metal_split(d, dv);
        out["forward_rows"] = jft::kForwardRows;
        out["forward_keys"] = jft::metal_forward_keys(dp, dvp, bytes);
        out["forward_bytes"] = jft::metal_forward_bytes(dp, dvp, bytes);
        out["backward_rows"] = jft::metal_backward_rows(dp, dvp);
        out["backward_staged"] = jft::metal_backward_staged(dp, dvp, bytes);
        out["backward_bytes"] = jft::metal_backward_bytes(dp, dvp, bytes);
        return out;
      },
      "Tile sizes for head sizes d and dv and an element of `bytes` bytes");
#if defined(JFT_METAL_EMULATED)
  m.attr("emulated") = true;
  nb::module_ emulator = m.def_submodule("emulator");
  bind_emulator(emulator);
#else
  m.attr("emulated") = false;
#endif
}
