#include "kernels/cpu/quantize_loops.h"

namespace ravel::kernels::cpu {

constexpr QuantizeLoops kQuantizePortable = kQuantizeLoops;

}  // namespace ravel::kernels::cpu
