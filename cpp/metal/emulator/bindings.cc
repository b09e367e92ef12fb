// jax_flashtrain_native.metal.emulator: what the tests see of the emulated device.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>

#include "device.h"
#include "library.h"
#include "memory.h"
#include "metal_runtime.h"
#include "sources.h"

namespace nb = nanobind;

namespace jft::metal {
namespace {

using namespace jft::emu;

nb::dict counters_dict(const Counters& c) {
  nb::dict out;
  out["threadgroups"] = c.threadgroups;
  out["matrix_ops"] = c.matrix_ops;
  out["device_read_bytes"] = c.device_read_bytes;
  out["device_write_bytes"] = c.device_write_bytes;
  out["threadgroup_bytes"] = c.threadgroup_bytes;
  out["threadgroup_memory"] = c.threadgroup_memory;
  out["barriers"] = c.barriers;
  out["collectives"] = c.collectives;
  return out;
}

// Compiles Metal source and runs one kernel of it on copies of the buffers.
nb::tuple run_source(const std::string& source, const std::string& kernel,
                     std::map<int, nb::bytes> buffers, std::map<int, nb::bytes> constants,
                     std::map<int, std::size_t> threadgroup, std::vector<unsigned> grid,
                     std::vector<unsigned> threads, std::uint64_t seed,
                     const std::vector<std::string>& macros) {
  if (grid.size() != 3 || threads.size() != 3)
    throw std::invalid_argument("grid and threads have 3 sizes");
  std::shared_ptr<Library> library;
  try {
    library = Library::compile(source, macros);
  } catch (const std::runtime_error& e) {
    throw nb::value_error(e.what());
  }
  const Kernel* found = library->find(kernel);
  if (!found) throw nb::value_error(("no kernel named " + kernel).c_str());
  std::map<int, std::unique_ptr<GuardedMemory>> memory;
  std::map<int, Binding> bindings;
  for (const auto& [index, bytes] : buffers) {
    auto& m = memory[index] = std::make_unique<GuardedMemory>(bytes.size());
    std::memcpy(m->data(), bytes.c_str(), bytes.size());
    bindings[index] = {m->data(), {m->data(), m->bytes()}};
  }
  ConstantValues values;
  for (const auto& [index, bytes] : constants) {
    values[index].assign(bytes.c_str(), bytes.c_str() + bytes.size());
  }
  Counters counters;
  const std::string fault = run_kernel(*library, *found, values, bindings, threadgroup, grid.data(),
                                       threads.data(), seed, &counters);
  nb::dict out;
  for (const auto& [index, m] : memory) {
    out[nb::int_(index)] = nb::bytes(static_cast<const char*>(m->data()), m->bytes());
  }
  return nb::make_tuple(fault, out, counters_dict(counters));
}

}  // namespace

void bind_emulator(nb::module_& m) {
  m.def(
      "configure",
      [](const std::map<std::string, long long>& values) {
        for (const auto& [name, value] : values) {
          DeviceSettings& s = settings();
          if (name == "seed")
            s.seed = static_cast<std::uint64_t>(value);
          else if (name == "wrap")
            s.wrap = value != 0;
          else if (name == "available")
            s.available = value != 0;
          else if (name == "supports_family")
            s.supports_family = value != 0;
          else if (name == "memory_limit")
            s.memory_limit = value;
          else if (name == "lost")
            s.lost = value != 0;
          else
            throw nb::key_error(name.c_str());
        }
      },
      "Sets seed, wrap, available, supports_family, memory_limit or lost (ints)");
  m.def(
      "take_records",
      [] {
        nb::list out;
        for (const DispatchRecord& r : take_records()) {
          nb::dict row = counters_dict(r.counters);
          row["kernel"] = r.name;
          row["grid"] = nb::make_tuple(r.grid[0], r.grid[1], r.grid[2]);
          out.append(row);
        }
        return out;
      },
      "Dispatches since the last call, each with its counters");
  m.def(
      "set_source",
      [](const std::string& name, const std::string& text) {
        const std::pair<const char*, const char**> all[] = {
            {"probe", &kProbeSource},     {"forward", &kForwardSource}, {"delta", &kDeltaSource},
            {"dq", &kDqSource},           {"dkdv", &kDkdvSource},       {"dbias", &kDbiasSource},
            {"sum_rows", &kSumRowsSource}};
        for (const auto& [known, source] : all) {
          if (name != known) continue;
          *source = (new std::string(text))->c_str();  // kept: pipelines may still compile from it
          if (Device* device = Device::get(nullptr)) device->pipelines().clear();
          return;
        }
        throw nb::key_error(name.c_str());
      },
      "Replaces an embedded kernel source, for mutation checks");
  m.def("take_sources", &take_sources, "Sources compiled since the last call");
  m.def("run", &run_source, nb::arg("source"), nb::arg("kernel"), nb::arg("buffers"),
        nb::arg("constants") = std::map<int, nb::bytes>(),
        nb::arg("threadgroup") = std::map<int, std::size_t>(),
        nb::arg("grid") = std::vector<unsigned>{1, 1, 1},
        nb::arg("threads") = std::vector<unsigned>{32, 1, 1}, nb::arg("seed") = 1,
        nb::arg("macros") = std::vector<std::string>(),
        "Runs one kernel: (fault or \"\", {index: bytes}, counters)");
}

}  // namespace jft::metal
