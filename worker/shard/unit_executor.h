#pragma once

// Replays the step programs of a plan for one rank.

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/replay_backend.h"

namespace ravel::shard {

struct ExecutorOptions {
  bool poison = false;  // tests: fills fresh staging memory with NaN
  // Records every instruction; outlives the executor. On a device: when it ran there, after a
  // call to CollectTrace.
  trace::Recorder* recorder = nullptr;
};

// Sees every instruction of a rank before it starts and when it has completed; a device is waited
// for. An error ends the program.
class InstructionObserver {
 public:
  virtual ~InstructionObserver() = default;
  virtual absl::Status Starting(const BoundInstruction&, const ReplayTurn&) {
    return absl::OkStatus();
  }
  virtual absl::Status Completed(const BoundInstruction& bound, const ReplayTurn& turn) = 0;
};

// Weights are used only in the generation that the optimizer last wrote, staging memory only in the
// order fresh, written, reduced, sums only when complete: checked always (replay_state.h), being
// cheap. A violation is an error with code Internal. Used only from the thread of its rank.
class UnitExecutor {
 public:
  using Args = InstructionRunner::Args;
  explicit UnitExecutor(const Args& args, ExecutorOptions options = {});
  // Before the first Run.
  absl::Status Prepare() { return args_.backend.Prepare(programs_, args_.modules); }
  // Gives the work of every kForward, kRecompute and kBackward, of all programs, to its stream;
  // for rehearsals of gemms, where nothing runs.
  void IssueComputes() const;
  using Refresh = InstructionRunner::Refresh;
  absl::Status RefreshQuantized(Refresh refresh) { return runner_.RefreshAll(refresh); }
  quant::QuantState* quant() const { return runner_.quant(); }
  ~UnitExecutor();
  UnitExecutor(const UnitExecutor&) = delete;
  UnitExecutor& operator=(const UnitExecutor&) = delete;

  // One micro-batch of this rank's lane, forward and backward, and its part of every collective. A
  // rank without a lane takes part in the collectives only. Errors name instruction, unit, phase
  // and turn.
  absl::Status Run(const ReplayTurn& turn);

  const std::vector<TensorView>& shared() const { return shared_; }
  Generation generation(plan::GroupId group) const { return runner_.state().generation(group); }
  void set_recorder(trace::Recorder* recorder) { options_.recorder = recorder; }
  // Waits for a device, and gives `recorder` what was recorded there since the last call.
  absl::Status CollectTrace(trace::Recorder& recorder) {
    return args_.backend.CollectTrace(recorder);
  }
  // nullptr: none. Runs where the instruction's work runs, or is issued.
  void set_observer(InstructionObserver* observer) { observer_ = observer; }

 private:
  const BoundProgram& ProgramOf(const plan::StepSlot& slot) const;
  std::string NameOf(const BoundInstruction& bound, const ReplayTurn& turn) const;
  absl::Status DrillOf(const plan::Instruction& instruction) const;
  // An instruction of a stream with what comes into force after it.
  absl::Status RunOne(const BoundProgram& program,
                      const BoundInstruction& bound,
                      const ReplayTurn& turn,
                      int64_t wait_ns);
  void Poison(const plan::Instruction& alloc, const ReplayTurn& turn);
  void Record(const BoundInstruction& bound,
              const ReplayTurn& turn,
              int64_t begin_ns,
              int64_t wait_ns);

  const Args args_;
  ExecutorOptions options_;
  InstructionObserver* observer_ = nullptr;
  InstructionRunner runner_;
  std::vector<TensorView> shared_;
  std::vector<BoundProgram> programs_;
};

}  // namespace ravel::shard
