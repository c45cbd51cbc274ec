#pragma once

// Single layers of known models, as inventories of one unit: names and shapes without a model.

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/bundles.h"

namespace ravel::plan::testing {

struct LayerTensor {
  std::string name;
  Shape shape;
  int bundle = -1;
};
struct Layer {
  std::string name;
  std::vector<LayerTensor> tensors;
};

// Matrices in blocks of `block_rows` rows; vectors have none.
inline ModelInventory InventoryOf(const Layer& layer, int64_t block_rows = 1) {
  ModelInventory inventory;
  inventory.units.push_back({});
  inventory.units[0].name = layer.name;
  for (const LayerTensor& from : layer.tensors) {
    const int index = static_cast<int>(inventory.tensors.size());
    TensorSpec tensor;
    tensor.name = from.name;
    tensor.shape = from.shape;
    tensor.bundle = from.bundle;
    tensor.block_rows = from.shape.size() > 1 ? block_rows : 1;
    if (from.bundle >= 0) {
      if (inventory.bundles.size() <= static_cast<size_t>(from.bundle)) {
        inventory.bundles.resize(static_cast<size_t>(from.bundle) + 1);
      }
      BundleSpec& bundle = inventory.bundles[static_cast<size_t>(from.bundle)];
      bundle.name += (bundle.name.empty() ? "" : "|") + from.name;
      bundle.tensors.push_back(index);
    }
    inventory.units[0].tensors.push_back(index);
    inventory.tensors.push_back(std::move(tensor));
  }
  DissolveBundles(inventory);
  return inventory;
}

struct LayerSizes {
  int64_t hidden = 0;
  int64_t inner = 0;
  int64_t query = 0;
  int64_t key_value = 0;
  int64_t head_norm = 0;  // Qwen3's norms of query and key heads
};
inline Layer LlamaLayer(const std::string& name, const LayerSizes& sizes) {
  Layer layer = {name,
                 {{"input_norm", {sizes.hidden}},
                  {"q", {sizes.query, sizes.hidden}, 0},
                  {"k", {sizes.key_value, sizes.hidden}, 0},
                  {"v", {sizes.key_value, sizes.hidden}, 0},
                  {"o", {sizes.hidden, sizes.query}},
                  {"post_norm", {sizes.hidden}},
                  {"gate", {sizes.inner, sizes.hidden}, 1},
                  {"up", {sizes.inner, sizes.hidden}, 1},
                  {"down", {sizes.hidden, sizes.inner}}}};
  if (sizes.head_norm > 0) {
    layer.tensors.push_back({"q_norm", {sizes.head_norm}});
    layer.tensors.push_back({"k_norm", {sizes.head_norm}});
  }
  return layer;
}

// The four layers whose padding the design tabulates.
inline std::vector<Layer> KnownLayers() {
  return {LlamaLayer("Llama-3-8B", {4096, 14336, 4096, 1024, 0}),
          LlamaLayer("Llama-3-70B", {8192, 28672, 8192, 1024, 0}),
          LlamaLayer("Qwen3-0.6B", {1024, 3072, 2048, 1024, 128}),
          {"DeepSeek-V3 dense",
           {{"input_norm", {7168}},
            {"q_a", {1536, 7168}},
            {"q_a_norm", {1536}},
            {"q_b", {24576, 1536}},
            {"kv_a", {576, 7168}},
            {"kv_a_norm", {512}},
            {"kv_b", {32768, 512}},
            {"o", {7168, 16384}},
            {"post_norm", {7168}},
            {"gate", {18432, 7168}, 0},
            {"up", {18432, 7168}, 0},
            {"down", {7168, 18432}}}}};
}

}  // namespace ravel::plan::testing
