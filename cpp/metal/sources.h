// The kernel sources as strings (made by embed.py at build time).
#pragma once

namespace jft::metal {

extern const char* const kForwardSource;
extern const char* const kDeltaSource;
extern const char* const kDqSource;
extern const char* const kDkdvSource;
extern const char* const kDbiasSource;
extern const char* const kSumRowsSource;

}  // namespace jft::metal
