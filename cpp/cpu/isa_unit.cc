// The kernels of one instruction set. CMake compiles this file once per level, each time with other
// flags and another JFT_ISA (the name of the namespace that everything in it lives in).
#include "backward.h"
#include "forward.h"
#include "isa.h"

namespace jft::cpu {

extern const Kernels JFT_ISA_TABLE;
const Kernels JFT_ISA_TABLE = {
    {JFT_ISA::forward_tile<float>, JFT_ISA::forward_tile<double>},
    {JFT_ISA::delta_tile<float>, JFT_ISA::delta_tile<double>},
    {JFT_ISA::backward_tile<float>, JFT_ISA::backward_tile<double>},
};

}  // namespace jft::cpu
