// Which instruction set the kernels use: the best that this machine has, or the one a test asks
// for.
#pragma once

#include <string>
#include <vector>

#include "jobs.h"

namespace jft::cpu {

// Levels this machine can run, best first.
std::vector<std::string> isa_levels();

// The level in use, and its kernels.
std::string isa();
const Kernels& kernels();

// Chooses a level of isa_levels() for the whole process; false if there is no such level.
bool set_isa(const std::string& name);

}  // namespace jft::cpu
