#pragma once

// Where the amaxes of a model's quantized matrices lie, in one vector of words that all ranks have.
// A word is the bits of a magnitude (kernels/quantize.h). Scales follow from amaxes alone, so what
// the ranks exchange, once per step, is this vector: its maximum over the ranks is the same on any
// mesh. A function of the inventory.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/model_inventory.h"

namespace ravel::plan {

// One quantized matrix.
struct QuantTensor {
  TensorId tensor = {};
  Recipe recipe = Recipe::kNone;
  int64_t grid_rows = 1;
  int64_t grid_columns = 1;
  int64_t grid = 0;  // first word of its grid of blocks; of a recipe without: its domain's word
  int domain = 0;
};

// Matrices that share one scale of the whole: those of a bundle, which one gemm reads, or one
// alone. Also the gemm's input and the gradient of its output, which have delayed scales.
struct QuantDomain {
  std::string name;  // of the bundle or the tensor
  Recipe recipe = Recipe::kNone;
  int64_t amax = -1;   // word of the weight; -1: the recipe has no scale of the whole
  int64_t input = -1;  // words of the activations; -1: scales are not delayed
  int64_t gradient = -1;
};

// True of recipes whose codes an update makes where it has all of a block: their scales follow from
// the block alone, or from steps before.
constexpr bool EncodesInUpdate(Recipe recipe) {
  return recipe == Recipe::kDelayed || recipe == Recipe::kFloat8Block || recipe == Recipe::kMxFp8;
}

// Delayed scales have a slot each: a history of amaxes. Three for each domain.
enum class QuantSlot : int { kWeight = 0, kInput = 1, kGradient = 2 };
inline constexpr int kSlotsPerDomain = 3;
// Words of a slot before its history: the scale of its codes, that of the next cast, and whether an
// update has cast by the first (kernels/quantize.h).
inline constexpr int kScalesPerSlot = 3;

struct QuantLayout {
  std::vector<QuantTensor> tensors;  // ascending by tensor
  std::vector<QuantDomain> domains;
  IdVector<TensorId, int> index_of;  // into `tensors`; -1
  int64_t weight_words = 0;          // those of weights come first
  int64_t words = 0;                 // without padding
  int64_t slots = 0;                 // of delayed scales

  const QuantTensor* Find(TensorId tensor) const {
    const int index = index_of[tensor];
    return index < 0 ? nullptr : &tensors[static_cast<size_t>(index)];
  }
  const QuantDomain& domain(const QuantTensor& of) const {
    return domains[static_cast<size_t>(of.domain)];
  }
};
QuantLayout QuantLayoutOf(const ModelInventory& inventory);

// Words of the buffers of quantization, 0 where a plan has none.
struct QuantWords {
  int64_t amax = 0;    // the vector; each rank finds the maximum of an equal part of whole lines
  int64_t part = 0;    // one such part
  int64_t scales = 0;  // fp32: kScalesPerSlot for each slot, then the histories
  int64_t flags = 0;   // a word for each tensor of the inventory
};
QuantWords QuantWordsOf(const QuantLayout& layout, int64_t ranks, int64_t history);

}  // namespace ravel::plan
