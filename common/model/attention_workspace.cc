#include "common/model/attention_workspace.h"

#include <algorithm>

#include "common/check.h"
#include "common/dtype.h"

namespace ravel::plan {
namespace {

constexpr int64_t kF32Bytes = 4;
constexpr int64_t kBf16Bytes = 2;
// Room that engines ask for beside arrays: counters, alignment.
constexpr int64_t kSlackBytes = int64_t{1} << 20;
// Engines keep rows in whole tiles.
constexpr int64_t kTileTokens = 128;

int64_t SmallestPrimeFactor(int64_t number) {
  for (int64_t factor = 2; factor * factor <= number; ++factor) {
    if (number % factor == 0) {
      return factor;
    }
  }
  return number;
}

}  // namespace

int64_t AttentionEngineBytes(const AttentionPass& pass) {
  const int64_t tokens = RoundUp(pass.sequence_tokens, kTileTokens);
  const int64_t rows = pass.sequences * pass.query_heads * tokens;
  const int64_t head = RoundUp(pass.head_dim, 8);
  int64_t bytes = rows * kF32Bytes + rows * head * kF32Bytes + kSlackBytes;
  if (pass.query_heads != pass.kv_heads) {
    bytes += 2 * rows * head * kBf16Bytes;
  }
  if (pass.exact) {
    bytes += rows * tokens * kBf16Bytes;
  }
  return bytes;
}

int64_t AttentionWorkspaceBytes(const AttentionPass& whole) {
  CHECK(whole.sequences > 0 && whole.kv_heads > 0 && whole.query_heads % whole.kv_heads == 0);
  const int64_t group = whole.query_heads / whole.kv_heads;
  AttentionPass part = whole;
  while (AttentionEngineBytes(part) > kMostAttentionBytes &&
         (part.sequences > 1 || part.kv_heads > 1)) {
    if (part.sequences > 1) {
      part.sequences /= SmallestPrimeFactor(part.sequences);
    } else {
      part.kv_heads /= SmallestPrimeFactor(part.kv_heads);
      part.query_heads = part.kv_heads * group;
    }
  }
  return AttentionEngineBytes(part);
}

int64_t AttentionWorkspaceBytes(const ModelConfig& config,
                                const MicroBatchShape& micro_batch,
                                bool exact) {
  return AttentionWorkspaceBytes({.sequences = micro_batch.sequences,
                                  .sequence_tokens = micro_batch.sequence_tokens,
                                  .query_heads = config.num_attention_heads,
                                  .kv_heads = config.num_key_value_heads,
                                  .head_dim = config.head_dim,
                                  .exact = exact});
}

void ReserveAttentionWorkspace(int64_t bytes, ModelInventory& inventory) {
  for (UnitSpec& unit : inventory.units) {
    for (ActivationSpec& spec : unit.workspace) {
      if (spec.name == "scratch") {
        const int64_t elements = DivCeil(bytes, DTypeBytes(spec.dtype));
        spec.shape = {std::max(ElementCount(spec.shape), elements)};
      }
    }
  }
}

}  // namespace ravel::plan
