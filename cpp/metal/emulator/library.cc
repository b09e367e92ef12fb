#include "library.h"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <stdexcept>

namespace jft::emu {
namespace {

// Layouts that compile.py writes into every library.
struct ArgInfo {
  int kind, index;
  const char* name;
  const void* flag;
};
struct KernelInfo {
  const char* name;
  void (*entry)(EmuArguments*);
  int count;
  const ArgInfo* arguments;
};
struct ConstantInfo {
  const char* name;
  int index, bytes;
  void* value;
};

std::string cache_folder() {
  if (const char* chosen = std::getenv("JFT_EMULATOR_CACHE")) return chosen;
  const char* tmp = std::getenv("TMPDIR");
  return std::string(tmp ? tmp : "/tmp") + "/jax_flashtrain_emulator_" + std::to_string(getuid());
}

std::string quoted(const std::string& text) {
  std::string out = "'";
  for (char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

std::shared_ptr<Library> Library::compile(const std::string& source,
                                          const std::vector<std::string>& macros) {
  const std::string cache = cache_folder();
  mkdir(cache.c_str(), 0700);
  std::string path = cache + "/sourceXXXXXX";
  const int file = mkstemp(path.data());
  if (file < 0) throw std::runtime_error("cannot write to the emulator's cache " + cache);
  const bool written =
      write(file, source.data(), source.size()) == static_cast<ssize_t>(source.size());
  close(file);
  if (!written) throw std::runtime_error("cannot write to the emulator's cache " + cache);
  std::string command = std::string(JFT_EMULATOR_PYTHON) + " " + quoted(JFT_EMULATOR_SCRIPT) + " " +
                        quoted(path) + " --cache " + quoted(cache) + " --clang " +
                        quoted(JFT_EMULATOR_CLANG);
  for (const std::string& macro : macros) command += " -D " + quoted(macro);
  command += " 2>&1";
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) throw std::runtime_error("cannot start the emulator's compiler");
  char buffer[4096];
  while (std::size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) output.append(buffer, n);
  const int status = pclose(pipe);
  unlink(path.c_str());
  if (status != 0) throw std::runtime_error(output);
  while (!output.empty() && output.back() == '\n') output.pop_back();

  void* handle = dlopen(output.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  *static_cast<const EmuApi**>(dlsym(handle, "emu_api")) = api();
  auto library = std::make_shared<Library>();
  for (auto* k = static_cast<const KernelInfo*>(dlsym(handle, "emu_kernels")); k->name; ++k) {
    Kernel kernel{k->name, k->entry, {}};
    for (int i = 0; i < k->count; ++i) {
      const ArgInfo& a = k->arguments[i];
      kernel.arguments.push_back({a.kind == 1, a.index, a.name, static_cast<const bool*>(a.flag)});
    }
    library->kernels_.push_back(kernel);
  }
  for (auto* c = static_cast<const ConstantInfo*>(dlsym(handle, "emu_constants")); c->name; ++c) {
    library->constants_.push_back(
        {c->name, c->index, static_cast<std::size_t>(c->bytes), c->value});
  }
  return library;
}

const Kernel* Library::find(const std::string& name) const {
  for (const Kernel& kernel : kernels_) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
}

std::string Library::set_constants(const ConstantValues& values) const {
  for (const Constant& constant : constants_) {
    auto found = values.find(constant.index);
    if (found == values.end() || found->second.size() != constant.bytes) return constant.name;
    std::memcpy(constant.value, found->second.data(), constant.bytes);
  }
  return "";
}

std::string run_kernel(const Library& library, const Kernel& kernel,
                       const ConstantValues& constants, const std::map<int, Binding>& buffers,
                       const std::map<int, std::size_t>& threadgroup_bytes, const unsigned grid[3],
                       const unsigned threads[3], std::uint64_t seed, Counters* counters) {
  const std::string missing = library.set_constants(constants);
  if (!missing.empty()) return "function constant " + missing + " has no value";
  Dispatch dispatch;
  dispatch.name = kernel.name;
  dispatch.entry = kernel.entry;
  for (const Argument& argument : kernel.arguments) {
    if (argument.flag && !*argument.flag) continue;
    const auto text = (argument.threadgroup ? "threadgroup memory " : "buffer ") +
                      std::to_string(argument.index) + " (" + argument.name + ") of kernel " +
                      kernel.name + " is not bound";
    if (argument.threadgroup) {
      auto found = threadgroup_bytes.find(argument.index);
      if (found == threadgroup_bytes.end()) return text;
      if (dispatch.threadgroup_bytes.size() <= static_cast<std::size_t>(argument.index)) {
        dispatch.threadgroup_bytes.resize(static_cast<std::size_t>(argument.index) + 1);
      }
      dispatch.threadgroup_bytes[static_cast<std::size_t>(argument.index)] = found->second;
      continue;
    }
    auto found = buffers.find(argument.index);
    if (found == buffers.end() || !found->second.data) return text;
    dispatch.arguments.buffer[argument.index] = found->second.data;
    dispatch.buffers.push_back(found->second.range);
  }
  std::memcpy(dispatch.grid, grid, sizeof dispatch.grid);
  std::memcpy(dispatch.threads, threads, sizeof dispatch.threads);
  return run(dispatch, seed, counters);
}

}  // namespace jft::emu
