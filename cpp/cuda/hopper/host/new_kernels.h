// Kernels that have not run on a GPU yet are reached only with JFT_HOPPER_NEW=1 in the environment.
#pragma once

#include <cstdlib>

namespace jft::hopper {

inline bool new_kernels() {
  static const bool on = [] {
    const char* text = std::getenv("JFT_HOPPER_NEW");
    return text != nullptr && text[0] == '1';
  }();
  return on;
}

}  // namespace jft::hopper
