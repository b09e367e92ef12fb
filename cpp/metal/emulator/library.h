// A compiled .metal source: its kernels, their arguments and the function constants.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "machine.h"

namespace jft::emu {

struct Argument {
  bool threadgroup;  // else a buffer
  int index;
  std::string name;
  const bool* flag;  // function constant that must be true for the argument to exist, or null
};

struct Constant {
  std::string name;
  int index;
  std::size_t bytes;
  void* value;
};

struct Kernel {
  std::string name;
  void (*entry)(EmuArguments*);
  std::vector<Argument> arguments;
};

// Function constants of one pipeline: index -> bytes.
using ConstantValues = std::map<int, std::vector<char>>;

class Library {
 public:
  // Compiles (or finds in the cache) and loads. Throws std::runtime_error with the compiler's
  // message.
  static std::shared_ptr<Library> compile(const std::string& source,
                                          const std::vector<std::string>& macros = {});

  const Kernel* find(const std::string& name) const;
  const std::vector<Constant>& constants() const { return constants_; }
  // Writes the values into the loaded code; "" or the name of a constant without a value.
  std::string set_constants(const ConstantValues& values) const;

 private:
  std::vector<Kernel> kernels_;
  std::vector<Constant> constants_;
};

// One bound buffer: address of the first byte, and the range that the kernel may touch.
struct Binding {
  void* data = nullptr;
  Range range{nullptr, 0};
};

// Checks that every argument is bound, then runs. Returns "" or the fault.
std::string run_kernel(const Library& library, const Kernel& kernel,
                       const ConstantValues& constants, const std::map<int, Binding>& buffers,
                       const std::map<int, std::size_t>& threadgroup_bytes, const unsigned grid[3],
                       const unsigned threads[3], std::uint64_t seed, Counters* counters);

}  // namespace jft::emu
