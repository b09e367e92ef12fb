// What the tests can turn on the emulated Metal device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"

namespace jft::emu {

struct DeviceSettings {
  std::uint64_t seed = 1;  // of the order in which threads run
  bool wrap = false;       // newBufferWithBytesNoCopy works; else nil, so the host stages copies
  bool available = true;   // MTLCreateSystemDefaultDevice returns a device
  bool supports_family = true;     // Apple7 and newer
  std::int64_t memory_limit = -1;  // bytes that newBufferWithLength gives out, -1 = no limit
  bool lost = false;               // command buffers end with an error
};

struct DispatchRecord {
  std::string name;
  std::uint32_t grid[3];
  Counters counters;
};

DeviceSettings& settings();
// Dispatches since the last call.
std::vector<DispatchRecord> take_records();
// SHA-256 is the tests' business: the sources that were compiled since the last call.
std::vector<std::string> take_sources();

}  // namespace jft::emu
