// Buffers whose last byte touches an inaccessible page, with a poisoned front.
#pragma once

#include <cstddef>

namespace jft::emu {

class GuardedMemory {
 public:
  // `alignment` of the first byte; up to alignment - 1 bytes may lie between the end and the guard.
  explicit GuardedMemory(std::size_t bytes, std::size_t alignment = 16);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  void poison();  // all ones: a NaN in every float type, -1 in every integer
  bool in_guard(const void* address) const;

 private:
  char* map_;
  std::size_t map_bytes_;
  char* data_;
  std::size_t bytes_;
};

}  // namespace jft::emu
