#include "kernels/cpu/simd_ops.h"

#include <atomic>

#include "common/check.h"
#include "kernels/cpu/attention_tiles.h"

namespace ravel::kernels::cpu {

bool RunsHere(SimdPath path) {
  return path == SimdPath::kPortable ||
         (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
}

const SimdOps& OpsOf(SimdPath path) {
  return path == SimdPath::kAvx2 ? Avx2Ops() : PortableOps();
}

namespace {

const SimdOps* BestOps() {
  return &OpsOf(RunsHere(SimdPath::kAvx2) ? SimdPath::kAvx2 : SimdPath::kPortable);
}

std::atomic<const SimdOps*>& Active() {
  static std::atomic<const SimdOps*> active = BestOps();
  return active;
}

}  // namespace

const SimdOps& ActiveOps() {
  return *Active().load(std::memory_order_relaxed);
}

void UseSimdPath(SimdPath path) {
  CHECK_MSG(RunsHere(path), "the processor lacks the instructions of this path");
  Active().store(&OpsOf(path), std::memory_order_relaxed);
}

void UseBestSimdPath() {
  Active().store(BestOps(), std::memory_order_relaxed);
}

int64_t AttentionWorkspaceElements(const AttentionShape& shape) {
  return AttentionSizes(shape).WorkspaceElements();
}

}  // namespace ravel::kernels::cpu
