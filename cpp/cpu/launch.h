// Runs one checked call on the kernels of the current instruction set.
#pragma once

#include "parallel.h"
#include "problem.h"

namespace jft::cpu {

// False when memory ran out; std::bad_alloc may be thrown for the same reason.
bool launch_forward(const Problem& p, Executor& pool);
bool launch_backward(const Problem& p, Executor& pool);

}  // namespace jft::cpu
