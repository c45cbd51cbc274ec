#include "kernels/cpu/update_block_loops.h"

namespace ravel::kernels::cpu {

__attribute__((flatten)) void UpdateBlockAvx2(const UpdateBlock& block) {
  UpdateLoops(block);
}

}  // namespace ravel::kernels::cpu
