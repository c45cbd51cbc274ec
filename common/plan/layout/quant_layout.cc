#include "common/plan/layout/quant_layout.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::plan {
namespace {

constexpr int64_t kLineWords = 64;

// The domain of a tensor: its bundle's, where that is there already, else a new one.
int DomainOf(const ModelInventory& inventory,
             const TensorSpec& tensor,
             IdVector<BundleId, int>& of_bundle,
             std::vector<QuantDomain>& domains) {
  if (tensor.bundle >= 0 && of_bundle[tensor.bundle] >= 0) {
    return of_bundle[tensor.bundle];
  }
  const int made = static_cast<int>(domains.size());
  domains.push_back(
      {.name = tensor.bundle >= 0 ? inventory.bundles[tensor.bundle].name : tensor.name,
       .recipe = tensor.recipe});
  if (tensor.bundle >= 0) {
    of_bundle[tensor.bundle] = made;
  }
  return made;
}

bool ScalesTheWhole(Recipe recipe) {
  return BlockEdge(recipe) == 0 || recipe == Recipe::kNvFp4;
}

}  // namespace

QuantLayout QuantLayoutOf(const ModelInventory& inventory) {
  QuantLayout layout;
  layout.index_of = IdVector<TensorId, int>(inventory.tensors.size(), -1);
  IdVector<BundleId, int> of_bundle(inventory.bundles.size(), -1);
  for (const TensorId id : inventory.tensors.ids()) {
    const TensorSpec& tensor = inventory.tensors[id];
    if (tensor.recipe == Recipe::kNone) {
      continue;
    }
    QuantTensor made = {.tensor = id, .recipe = tensor.recipe};
    made.domain = DomainOf(inventory, tensor, of_bundle, layout.domains);
    QuantDomain& domain = layout.domains[static_cast<size_t>(made.domain)];
    if (ScalesTheWhole(tensor.recipe) && domain.amax < 0) {
      domain.amax = layout.weight_words++;
    }
    const int64_t edge = BlockEdge(tensor.recipe);
    made.grid = domain.amax;
    if (edge > 0) {
      made.grid_rows = DivCeil(tensor.shape[0], edge);
      made.grid_columns = DivCeil(tensor.shape[1], edge);
      made.grid = layout.weight_words;
      layout.weight_words += made.grid_rows * made.grid_columns;
    }
    layout.index_of[id] = static_cast<int>(layout.tensors.size());
    layout.tensors.push_back(made);
  }
  layout.words = layout.weight_words;
  for (QuantDomain& domain : layout.domains) {
    if (domain.recipe == Recipe::kDelayed) {
      domain.input = layout.words++;
      domain.gradient = layout.words++;
      layout.slots += kSlotsPerDomain;
    }
  }
  return layout;
}

QuantWords QuantWordsOf(const QuantLayout& layout, int64_t ranks, int64_t history) {
  QuantWords words;
  words.part = RoundUp(DivCeil(layout.words, ranks), kLineWords);
  words.amax = words.part * ranks;
  words.scales = layout.slots * (kScalesPerSlot + history);
  const auto tensors = static_cast<int64_t>(layout.index_of.size());
  words.flags = layout.tensors.empty() ? 0 : RoundUp(tensors, kLineWords);
  return words;
}

}  // namespace ravel::plan
