// Python module jax_flashtrain_native.cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attrs.h"
#include "handlers.h"

namespace nb = nanobind;

NB_MODULE(cpu, m) {
  using jft::cpu::BackwardHandler;
  using jft::cpu::ForwardHandler;
  m.attr("interface_version") = jft::kInterfaceVersion;
  m.attr("ffi_version") = nb::make_tuple(JFT_FFI_MAJOR, JFT_FFI_MINOR);
  m.def("registrations", [] {
    nb::dict targets;
    targets["jax_flashtrain_fwd_v1"] = nb::capsule(reinterpret_cast<void*>(ForwardHandler));
    targets["jax_flashtrain_bwd_v1"] = nb::capsule(reinterpret_cast<void*>(BackwardHandler));
    return targets;
  });
  m.def("isa", [] { return std::string("reference"); });
  m.def("isa_levels", [] { return std::vector<std::string>{"reference"}; });
  m.def("set_isa", [](const std::string&) {});
}
