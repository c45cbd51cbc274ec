#pragma once

// Replays the step programs of a plan for one rank.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "worker/comm/communicator.h"
#include "worker/model/module.h"
#include "worker/shard/flat_buffer.h"
#include "worker/shard/parameter_group.h"

namespace ravel::shard {

// What a program asks of the optimizer. Implemented in worker/optim.
class StepActions {
 public:
  virtual ~StepActions() = default;
  // kStatsReduce: this rank's message, of equal length on all ranks ...
  virtual std::vector<std::byte> PackStatistics() = 0;
  // ... and those of all ranks, one after another.
  virtual void UnpackStatistics(std::span<const std::byte> all) = 0;
  // kDecideStep, after the former.
  virtual void Decide() = 0;
  // kOptimizerStep, after the former: updates this rank's shard of a unit, or nothing in a skipped
  // step.
  virtual void UpdateUnit(int unit) = 0;
};

// Runs instructions in list order, which the plan's checker has proved correct. Weights are used
// only in the generation that the optimizer last wrote, staging memory only in the order fresh,
// written, reduced: both are checked always, being cheap, and a violation is a bug. Used only from
// the thread of its rank.
class UnitExecutor {
 public:
  // All arguments outlive the executor; `actions` may be null where only kEval runs. One module per
  // unit.
  struct Args {
    const plan::ShardingPlan& plan;
    comm::Communicator& communicator;
    kernels::Stream& stream;
    const ArenaBuffers& buffers;
    std::vector<ParameterGroup>& groups;
    const std::vector<std::unique_ptr<model::Module>>& modules;
    StepActions* actions = nullptr;
  };
  explicit UnitExecutor(const Args& args);

  // One turn: this rank's lane forward and backward, its part of every collective. A rank without a
  // lane takes part in the collectives only. Errors are the communicator's, with unit and
  // instruction named.
  absl::Status Run(plan::Phase phase, int64_t turn);

  const std::vector<TensorView>& shared() const { return shared_; }

 private:
  enum class StagingState { kIdle, kFresh, kWritten };
  struct GatheredState {
    int unit = -1;
    Generation generation{};
    bool valid = false;
  };
  struct BoundInstruction {
    plan::Instruction instruction;
    model::UnitMemory memory;                     // kForward, kBackward
    std::vector<model::FreshGradient> gradients;  // kBackward
  };
  struct BoundProgram {
    plan::Phase phase;
    std::vector<BoundInstruction> instructions;
  };

  BoundInstruction Bind(const plan::Instruction& instruction) const;
  const BoundProgram& ProgramOf(plan::Phase phase) const;
  absl::Status RunInstruction(const BoundInstruction& bound, plan::Phase phase, int64_t turn);
  absl::Status Gather(const plan::Instruction& instruction);
  absl::Status ReduceStatistics(const plan::Instruction& instruction);
  absl::Status ReduceScatter(const plan::Instruction& instruction, int64_t turn);
  void Compute(const BoundInstruction& bound, plan::Phase phase);
  void Free(int buffer);
  void CheckAtRest() const;
  void CheckCurrent(int gathered, int unit) const;

  const Args args_;
  std::vector<TensorView> shared_;
  std::vector<BoundProgram> programs_;
  std::vector<GatheredState> gathered_;  // per buffer
  std::vector<StagingState> staging_;    // per buffer
};

}  // namespace ravel::shard
