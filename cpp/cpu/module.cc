// Python module jax_flashtrain_native.cpu.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attrs.h"
#include "handlers.h"
#include "isa.h"

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
  m.def("isa_levels", &jft::cpu::isa_levels,
        "Instruction-set levels this machine can run, best first.");
  m.def("isa", &jft::cpu::isa, "The level in use.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (jft::cpu::set_isa(name)) return;
        std::string levels;
        for (const auto& level : jft::cpu::isa_levels()) levels += " " + level;
        throw nb::value_error(
            ("flash_attention: isa must be one of" + levels + ", got " + name).c_str());
      },
      nb::arg("name"), "Chooses a level for the whole process (for tests).");
}
