#include "common/plan/logits_chunk.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::plan {

int64_t LogitsChunkTokens(bool cpu_devices, int64_t vocabulary, int64_t element_bytes) {
  CHECK(vocabulary > 0 && element_bytes > 0);
  if (cpu_devices) {
    return kLogitsChunkTokens;
  }
  int64_t tokens = kMostLogitsTokens;
  while (tokens > kFewestGpuLogitsTokens &&
         tokens * vocabulary * element_bytes > kMostLogitsBytes) {
    tokens /= 2;
  }
  return tokens;
}

void ReserveLogits(int64_t chunk_tokens,
                   const MicroBatchShape& micro_batch,
                   ModelInventory& inventory) {
  const int64_t tokens = micro_batch.sequences * micro_batch.sequence_tokens;
  for (UnitSpec& unit : inventory.units) {
    for (ActivationSpec& spec : unit.workspace) {
      if (spec.name == "logits") {
        spec.shape[0] = std::min(tokens, chunk_tokens);
      }
    }
  }
}

}  // namespace ravel::plan
