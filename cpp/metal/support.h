// Which calls the Metal kernels take, by the facts that Python knows while tracing (native.py).
#pragma once

#include <map>
#include <string>
#include <utility>

namespace jft::metal {

using Facts = std::map<std::string, long long>;

// (kernel, "") or ("", reason).
std::pair<std::string, std::string> explain(const Facts& facts);

// Is the GPU expected to beat the CPU kernel? A round trip costs about 0.13 ms (docs/metal.md).
bool preferred(const Facts& facts);

}  // namespace jft::metal
