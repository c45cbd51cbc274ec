#include "kernels/cpu/quantize_loops.h"

namespace ravel::kernels::cpu {

constexpr QuantizeLoops kQuantizeAvx512 = kQuantizeLoops;

}  // namespace ravel::kernels::cpu
