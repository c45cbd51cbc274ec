#include "kernels/cpu/narrow_constants.h"

namespace ravel::kernels::cpu {

const NarrowConstants kNarrow;

}  // namespace ravel::kernels::cpu
