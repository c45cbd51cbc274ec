#include "kernels/cpu/simd_ops.h"

#include "kernels/cpu/attention_tiles.h"

namespace ravel::kernels::cpu {

bool RunsHere(SimdPath path) {
  return path == SimdPath::kPortable ||
         (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
}

const SimdOps& OpsOf(SimdPath path) {
  return path == SimdPath::kAvx2 ? Avx2Ops() : PortableOps();
}

const SimdOps& BestOps() {
  static const SimdOps& ops =
      OpsOf(RunsHere(SimdPath::kAvx2) ? SimdPath::kAvx2 : SimdPath::kPortable);
  return ops;
}

int64_t AttentionWorkspaceElements(const AttentionShape& shape) {
  return AttentionSizes(shape).WorkspaceElements();
}

}  // namespace ravel::kernels::cpu
