#include "kernels/cpu/lanes_avx2.h"
#include "kernels/cpu/update_vectors.h"

namespace ravel::kernels::cpu {

__attribute__((flatten)) void UpdateBlockAvx2(const UpdateBlock& block) {
  UpdateVectors<Avx2Lanes>(block);
}

}  // namespace ravel::kernels::cpu
