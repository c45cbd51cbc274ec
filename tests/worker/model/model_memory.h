#pragma once

// A whole small model in plain memory: what the engine's buffers are in a test without an engine.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/model/model_inventory.h"
#include "tests/worker/model/segment_watch.h"
#include "worker/model/module.h"

namespace ravel::model {

class ModelMemory {
 public:
  struct Options {
    plan::RecomputePolicy recompute = plan::RecomputePolicy::kNone;
    // Tensors whose names contain it are not trained; empty: all are.
    std::string frozen = {};
    int64_t parts = 1;  // of sums (plan::TensorCut)
  };
  ModelMemory(const plan::ModelConfig& config, plan::MicroBatchShape shape)
      : ModelMemory(config, shape, Options()) {}
  ModelMemory(const plan::ModelConfig& config, plan::MicroBatchShape shape, Options options);

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

  // Forward and backward; gradients per tensor, none for frozen ones. A tied table's two gradients
  // are added, and so are those of several calls of a unit. `Gradient` is FreshGradient, which
  // overwrites what is there (NaN), or AccumulatingGradient, which adds to `start`. Between its
  // passes all of a unit's memory but what is saved, and the shared stream, is NaN.
  template <typename Gradient>
  std::vector<std::vector<float>> Gradients(float start);

  // The same with FreshGradient, segment by segment, watched.
  struct Watched {
    std::vector<std::vector<float>> gradients;
    std::string fault;
  };
  using Part = SegmentWatch::Part;
  using Without = SegmentWatch::Without;
  Watched WatchedGradients(const Without& without = nullptr);

 private:
  void RunWatched(SegmentWatch& watch,
                  plan::UnitId unit,
                  plan::UnitPass pass,
                  const UnitMemory& memory,
                  const std::vector<FreshGradient>& gradients);
  template <typename Gradient>
  std::vector<std::vector<float>> Gradients(float start, SegmentWatch* watch);
  // In a forward there is nothing remade.
  enum class Pass { kForward, kBackward };
  // `call`: position among the inventory's calls.
  UnitMemory MemoryOf(size_t call, Pass pass);
  std::vector<plan::TensorId> TensorsOf(size_t unit) const;
  void LoadBatch();
  int64_t PlaceTensors();
  std::vector<TensorView> Views(const std::vector<plan::ActivationSpec>& specs,
                                std::vector<std::byte>& storage);

  plan::ModelInventory inventory_;
  Modules modules_;
  kernels::CpuStream stream_;
  std::vector<std::vector<float>> weights_;
  // Bundled tensors share one vector; weights_ of its parts are then copied from and to it.
  std::vector<float> flat_;
  std::vector<int64_t> offsets_;
  const std::vector<plan::UnitId> calls_;      // in forward order
  std::vector<std::vector<std::byte>> saved_;  // by call
  std::vector<std::vector<std::byte>> remade_;
  std::vector<std::vector<std::byte>> workspace_;
  std::vector<std::vector<std::byte>> leaves_;  // by unit
  std::vector<std::byte> shared_storage_;
  std::vector<TensorView> shared_;
  std::vector<int32_t> ids_;
  std::vector<int32_t> targets_;
};

}  // namespace ravel::model
