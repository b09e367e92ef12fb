// The smallest test harness that serves: count failures, say where.
#pragma once

#include <cstdio>

namespace jft::testing {

inline int failures = 0;

// Prints at most a few dozen failures; the count goes on.
inline bool report(bool ok, const char* file, int line, const char* what) {
  if (!ok && ++failures <= 40) std::printf("FAIL %s:%d %s\n", file, line, what);
  return ok;
}

}  // namespace jft::testing

#define CHECK(condition) ::jft::testing::report((condition), __FILE__, __LINE__, #condition)
