#pragma once

// The cut of a model by a `tensor` axis, or by an order of sums that depends on none: P parts, of
// which each of `degree` ranks has an aligned block. Sums that a rank could cut are trees over the
// parts, so that every degree up to P gives the same bits. Pure.

#include <cstdint>

#include "common/model/architecture/model_config.h"

namespace ravel::plan {

inline constexpr int64_t kMostTensorParts = 16;
inline constexpr int64_t kMostTensorChunks = 16;

struct TensorCut {
  int64_t parts = 1;       // P, a power of two; 1: nothing is cut
  int64_t degree = 1;      // ranks, a divisor of P
  int64_t coordinate = 0;  // of this rank
  // Tokens between the layers' products are cut, too: each rank has its blocks alone.
  bool sequence = false;
  // Chunks of tokens in which ranks exchange sums between the layers' products, a power of two: one
  // moves while the next is computed. No bit depends on it.
  int64_t chunks = 1;

  bool cuts() const { return parts > 1; }
  int64_t local_parts() const { return parts / degree; }
  int64_t first_part() const { return coordinate * local_parts(); }
  // Equal blocks of tokens that this rank sums apart for weights that all tokens share.
  int64_t token_blocks() const { return sequence ? local_parts() : parts; }
  // Tokens of the residual stream that a rank has, of those of a micro-batch.
  int64_t stream_tokens(int64_t tokens) const {
    return sequence ? (tokens + degree - 1) / degree : tokens;
  }
  bool operator==(const TensorCut&) const = default;
};

// Sizes of a rank's share of a model.
struct LocalSizes {
  int64_t query_heads = 0;
  int64_t kv_heads = 0;
  // Heads in the gradients of keys and values: kv_heads, or, where several parts share one, a slot
  // for each part.
  int64_t kv_slots = 0;
  int64_t kv_sharing = 1;  // slots of one key head
  int64_t inner = 0;       // of the MLP
  int64_t first_row = 0;   // of the vocabulary
  int64_t vocabulary_rows = 0;
};
LocalSizes LocalSizesOf(const ModelConfig& config, const TensorCut& cut);

// Rows of the vocabulary of part p: blocks of RoundUp(ceil(V / P), 8), the last ones shorter or
// empty. With P = 1 the whole.
struct VocabularyBlock {
  int64_t first = 0;
  int64_t rows = 0;
};
VocabularyBlock VocabularyBlockOf(const TensorCut& cut, int64_t vocabulary, int64_t part);

}  // namespace ravel::plan
