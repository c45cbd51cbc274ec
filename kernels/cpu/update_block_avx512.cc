#include "kernels/cpu/update_block_loops.h"

namespace ravel::kernels::cpu {

__attribute__((flatten)) void UpdateBlockAvx512(const UpdateBlock& block) {
  UpdateLoops(block);
}

}  // namespace ravel::kernels::cpu
