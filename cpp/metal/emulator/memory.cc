#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <new>

namespace jft::emu {

GuardedMemory::GuardedMemory(std::size_t bytes, std::size_t alignment) : bytes_(bytes) {
  const auto page = static_cast<std::size_t>(getpagesize());
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  const std::size_t body = (rounded + page - 1) / page * page;
  map_bytes_ = body + 2 * page;
  void* p = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  map_ = static_cast<char*>(p);
  mprotect(map_, page, PROT_NONE);
  mprotect(map_ + page + body, page, PROT_NONE);
  data_ = map_ + page + body - rounded;
  poison();
}

GuardedMemory::~GuardedMemory() { munmap(map_, map_bytes_); }

void GuardedMemory::poison() { std::memset(data_, 0xFF, bytes_); }

bool GuardedMemory::in_guard(const void* address) const {
  auto* p = static_cast<const char*>(address);
  return p >= map_ && p < map_ + map_bytes_ && (p < data_ || p >= data_ + bytes_);
}

}  // namespace jft::emu
