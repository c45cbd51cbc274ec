#pragma once

// A whole small model in plain memory: what the engine's buffers are in a test without an engine.

#include <cstdint>
#include <memory>
#include <vector>

#include "common/plan/model_inventory.h"
#include "worker/model/module.h"

namespace ravel::model {

class ModelMemory {
 public:
  ModelMemory(const plan::ModelConfig& config, plan::MicroBatchShape shape);

  const plan::ModelInventory& inventory() const { return inventory_; }
  // Per tensor of the inventory.
  std::vector<float>& weight(int tensor) { return weights_[static_cast<size_t>(tensor)]; }
  std::vector<TensorView> weight_views();
  std::vector<int32_t>& ids() { return ids_; }
  std::vector<int32_t>& targets() { return targets_; }

  // Sum of the token losses, by forward passes alone.
  double Loss();
  // Token losses of the last pass.
  std::vector<float> TokenLosses() const;

  // Forward and backward; gradients per tensor. A tied table's two gradients are added. `Gradient`
  // is FreshGradient, which overwrites what is there (NaN), or AccumulatingGradient, which adds to
  // `start`.
  template <typename Gradient>
  std::vector<std::vector<float>> Gradients(float start);

 private:
  UnitMemory MemoryOf(size_t unit);
  void LoadBatch();
  std::vector<TensorView> Views(const std::vector<plan::ActivationSpec>& specs,
                                std::vector<std::byte>& storage);

  plan::ModelInventory inventory_;
  std::vector<std::unique_ptr<Module>> modules_;
  kernels::CpuStream stream_;
  std::vector<std::vector<float>> weights_;
  // Bundled tensors share one vector; weights_ of its parts are then copied from and to it.
  std::vector<float> flat_;
  std::vector<int64_t> offsets_;
  std::vector<std::vector<std::byte>> saved_;
  std::vector<std::vector<std::byte>> workspace_;
  std::vector<std::byte> shared_storage_;
  std::vector<TensorView> shared_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> targets_;
};

}  // namespace ravel::model
