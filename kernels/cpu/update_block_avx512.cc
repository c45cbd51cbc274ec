#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/update_vectors.h"

namespace ravel::kernels::cpu {

__attribute__((flatten)) void UpdateBlockAvx512(const UpdateBlock& block) {
  UpdateVectors<Avx512Lanes>(block);
}

}  // namespace ravel::kernels::cpu
