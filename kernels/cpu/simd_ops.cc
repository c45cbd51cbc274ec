#include "kernels/cpu/simd_ops.h"

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "common/check.h"
#include "kernels/cpu/attention_tiles.h"

namespace ravel::kernels::cpu {

bool RunsHere(SimdPath path) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  switch (path) {
    case SimdPath::kPortable:
      return true;
    case SimdPath::kAvx2:
      return avx2;
    case SimdPath::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return false;
}

const SimdOps& OpsOf(SimdPath path) {
  switch (path) {
    case SimdPath::kPortable:
      return PortableOps();
    case SimdPath::kAvx2:
      return Avx2Ops();
    case SimdPath::kAvx512:
      return Avx512Ops();
  }
  CHECK_MSG(false, "a SIMD path");
  return PortableOps();
}

namespace {

// RAVEL_CPU_ISA (portable, avx2 or avx512) caps the width, for comparisons; the bits are the same
// on every path.
SimdPath WidestAllowed() {
  const char* text = std::getenv("RAVEL_CPU_ISA");
  const std::string_view isa = text == nullptr ? "avx512" : text;
  CHECK_MSG(isa == "portable" || isa == "avx2" || isa == "avx512",
            "RAVEL_CPU_ISA must be portable, avx2 or avx512");
  return isa == "portable" ? SimdPath::kPortable
                           : (isa == "avx2" ? SimdPath::kAvx2 : SimdPath::kAvx512);
}

const SimdOps* BestOps() {
  const SimdPath widest = WidestAllowed();
  for (const SimdPath path : {SimdPath::kAvx512, SimdPath::kAvx2}) {
    if (path <= widest && RunsHere(path)) {
      return &OpsOf(path);
    }
  }
  return &PortableOps();
}

std::atomic<const SimdOps*>& Active() {
  static std::atomic<const SimdOps*> active = BestOps();
  return active;
}

PageOrder BestPageOrder() {
  return __builtin_cpu_is("amd") ? PageOrder::kOneByOne : PageOrder::kSeveralAtOnce;
}

std::atomic<PageOrder>& ActiveOrder() {
  static std::atomic<PageOrder> active = BestPageOrder();
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

PageOrder ActivePageOrder() {
  return ActiveOrder().load(std::memory_order_relaxed);
}

void UsePageOrder(PageOrder order) {
  ActiveOrder().store(order, std::memory_order_relaxed);
}

void UseBestPageOrder() {
  UsePageOrder(BestPageOrder());
}

int64_t AttentionWorkspaceElements(const AttentionShape& shape) {
  return AttentionSizes(shape).WorkspaceElements();
}

}  // namespace ravel::kernels::cpu
