#include "common/model/logits_chunk.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::plan {

int64_t LogitsChunkTokens(bool cpu_devices, int64_t vocabulary, int64_t element_bytes) {
  CHECK(vocabulary > 0 && element_bytes > 0);
  const int64_t fewest = cpu_devices ? kLogitsChunkTokens : kFewestGpuLogitsTokens;
  const int64_t most_bytes = cpu_devices ? kMostCpuLogitsBytes : kMostLogitsBytes;
  int64_t tokens = cpu_devices ? kMostCpuLogitsTokens : kMostLogitsTokens;
  while (tokens > fewest && tokens * vocabulary * element_bytes > most_bytes) {
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
