// The kernel sources as strings (made by embed.py at build time). The mutation check of the tests
// points them elsewhere; nothing else does.
#pragma once

namespace jft::metal {

extern const char* kProbeSource;
extern const char* kForwardSource;
extern const char* kDeltaSource;
extern const char* kDqSource;
extern const char* kDkdvSource;
extern const char* kDbiasSource;
extern const char* kSumRowsSource;

}  // namespace jft::metal
