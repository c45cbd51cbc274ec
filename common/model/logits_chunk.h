#pragma once

// Number of tokens that the fused head and loss work on at a time. Each chunk reads and writes the
// gradient of the head's whole table, so few large chunks move fewer bytes, and keep more logits.
// A function of the job, never of the number of ranks: sums over tokens have the chunk's order.

#include <cstdint>

#include "common/model/model_inventory.h"

namespace ravel::plan {

// The most tokens, a power of two between the fewest and the most below, whose logits take at most
// so many bytes; the fewest, where none does. The fewest of CPUs are kLogitsChunkTokens.
inline constexpr int64_t kFewestGpuLogitsTokens = 1024;
inline constexpr int64_t kMostLogitsTokens = 4096;
inline constexpr int64_t kMostLogitsBytes = int64_t{512} << 20;
inline constexpr int64_t kMostCpuLogitsTokens = 1024;
inline constexpr int64_t kMostCpuLogitsBytes = int64_t{32} << 20;
int64_t LogitsChunkTokens(bool cpu_devices, int64_t vocabulary, int64_t element_bytes);

// The head's "logits" have that many rows, or one for each token of the micro-batch, if fewer.
void ReserveLogits(int64_t chunk_tokens,
                   const MicroBatchShape& micro_batch,
                   ModelInventory& inventory);

}  // namespace ravel::plan
