// Memory of the device and pinned memory are made before a rank is at work, and go when it is done:
// in between each could wait for all work of the device, and for peers with it.

#include <atomic>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

using kernels::CudaGpu;
using plan::StateRole;

// What a save reads, and a load in the middle of a run writes.
absl::Status ReadAndWriteState(RankEngine& engine) {
  for (const shard::ParameterGroup& group : engine.groups()) {
    std::vector<float> values(static_cast<size_t>(group.shard_elements()));
    for (const StateRole role : {StateRole::kParam, StateRole::kExpAvg, StateRole::kExpAvgSq}) {
      if (role != StateRole::kParam && !group.layout().trainable) {
        continue;
      }
      RETURN_IF_ERROR(optim::ReadStored(
          engine.memory(), group, role, 0, std::as_writable_bytes(std::span<float>(values))));
      RETURN_IF_ERROR(optim::WriteStored(engine.memory(), group, role, 0, values));
    }
  }
  return absl::OkStatus();
}

// Changes between the moment when every rank's engine is made and the one before the first goes.
int64_t ChangesAtWork(CudaGpu& gpu, const RecordArgs& args) {
  std::atomic<int64_t> changes = 0;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.Evaluate().status());  // all ranks' engines are made
    const int64_t before = gpu.memory_use().changes;
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 4; ++step) {  // graphs are made in the second
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      RETURN_IF_ERROR(engine.Evaluate().status());
    }
    RETURN_IF_ERROR(ReadAndWriteState(engine));
    RETURN_IF_ERROR(engine.RefreshWeights());
    RETURN_IF_ERROR(engine.TrainStep(4).status());
    RETURN_IF_ERROR(engine.ExchangeLastNorms());
    RETURN_IF_ERROR(engine.Evaluate().status());
    if (rank == 0) {
      changes = gpu.memory_use().changes - before;
    }
    return engine.Evaluate().status();  // nobody has gone before
  };
  EXPECT_EQ(RunOn(gpu, args, body), absl::OkStatus());
  return changes;
}

class GpuMemory : public GpuEngine {};

TEST_F(GpuMemory, IsNeitherMadeNorFreedAtWork) {
  for (const int64_t width : {1, 2, 4}) {
    RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = width, .in_place = width == 2});
    args.spec.steps = 8;
    args.spec.norms_every = 2;
    EXPECT_EQ(ChangesAtWork(gpu(), args), 0) << width << " ranks";
  }
}

TEST_F(GpuMemory, IsNeitherMadeNorFreedAtWorkInNarrowForms) {
  for (const int64_t width : {1, 2}) {
    RecordArgs args = DeviceSteps({.strategy = "ZeRO2", .width = width});
    args.spec.steps = 8;
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.optimizer.main_weights = plan::MainWeightForm::kBF16Remainder;
    args.spec.optimizer.state_types = plan::kBf16States;
    args.spec.gradient_wire = plan::WireType::kBF16;
    EXPECT_EQ(ChangesAtWork(gpu(), args), 0) << width << " ranks";
  }
}

TEST_F(GpuMemory, IsNeitherMadeNorFreedAtWorkWithARecipe) {
  for (const plan::Recipe recipe : {plan::Recipe::kDelayed, plan::Recipe::kNvFp4}) {
    RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = 2}, "recipes");
    args.spec.steps = 8;
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.recipe = {
        .recipe = recipe, .keep_bf16 = {}, .emulation = {plan::GemmPath::kDequantBf16}};
    EXPECT_EQ(ChangesAtWork(gpu(), args), 0);
  }
}

TEST_F(GpuMemory, EveryChangeIsCounted) {
  const int64_t before = gpu().memory_use().changes;
  { const kernels::CudaMemory device = *gpu().AllocateDevice(64); }
  { const kernels::CudaMemory pinned = *gpu().AllocatePinned(64); }
  EXPECT_EQ(gpu().memory_use().changes, before + 4);
}

}  // namespace
}  // namespace ravel::trainer
