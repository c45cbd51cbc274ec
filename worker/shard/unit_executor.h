#pragma once

// Replays the step programs of a plan for one rank.

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "kernels/cpu_queue.h"
#include "worker/shard/device_timeline.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/step_graphs.h"

namespace ravel::shard {

// kInline: instructions run in list order, which the plan's checker has proved correct, on the
// calling thread. kQueued: each stream is a queue with a thread of its own, and only the program's
// waits order them, as on a device. An executor on a device (Args::device) has neither: it issues
// instructions in list order, each on its CUDA stream, and the program's waits become waits of
// streams for events; the next program's work begins where all streams are done with this one's.
enum class StreamMode { kInline, kQueued };

struct ExecutorOptions {
  StreamMode streams = StreamMode::kInline;
  // Tests: kQueued delays each instruction by a random time.
  std::optional<uint64_t> delay_seed = std::nullopt;
  bool poison = false;  // fills fresh staging memory with NaN
  // On a device: programs of training become graphs (step_graphs.h), where nobody looks at single
  // instructions. `exchanging_graphs`: of ranks that exchange, too, where their communicator lets
  // them (Communicator::Captures); equal on all ranks.
  bool graphs = true;
  bool exchanging_graphs = false;
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
  // On a device, before the first Run: makes its events.
  absl::Status PrepareDevice();
  // On a device, before the first Run: the products that a lane's programs, all of them, will ask
  // for. Nothing runs.
  kernels::CudaStream::Products RehearseProducts();
  ~UnitExecutor();
  UnitExecutor(const UnitExecutor&) = delete;
  UnitExecutor& operator=(const UnitExecutor&) = delete;

  // One micro-batch of this rank's lane, forward and backward, and its part of every collective. A
  // rank without a lane takes part in the collectives only. Errors name instruction, unit, phase
  // and turn.
  absl::Status Run(const ReplayTurn& turn);

  const std::vector<TensorView>& shared() const { return shared_; }
  Generation generation(plan::GroupId group) const { return runner_.state().generation(group); }
  // nullptr where there are none.
  const StepGraphs* graphs() const { return graphs_.get(); }
  void set_recorder(trace::Recorder* recorder) { options_.recorder = recorder; }
  // On a device: waits for it, and gives `recorder` what was recorded since the last call.
  absl::Status CollectTrace(trace::Recorder& recorder);
  // nullptr: none. Runs on the stream's thread.
  void set_observer(InstructionObserver* observer) { observer_ = observer; }

 private:
  // What orders an instruction on a device: the events of instructions of other streams that it
  // waits for, and its own where another one waits for it, as positions in events_. `range` is its
  // name in profilers, "Forward layers.0".
  static constexpr size_t kNoEvent = std::numeric_limits<size_t>::max();
  struct DeviceOrder {
    std::vector<size_t> waits;
    size_t event = kNoEvent;
    std::string range;
  };
  struct DeviceProgram {
    std::string range;  // "program first, whole"
    plan::IdVector<plan::InstructionId, DeviceOrder> orders;
  };
  const BoundProgram& ProgramOf(const plan::StepSlot& slot) const;
  std::string RangeOf(const plan::Instruction& instruction) const;
  std::string NameOf(const BoundInstruction& bound, const ReplayTurn& turn) const;
  absl::Status RunInline(const BoundProgram& program, const ReplayTurn& turn);
  absl::Status RunQueued(const BoundProgram& program, const ReplayTurn& turn);
  absl::Status RunOnDevice(const BoundProgram& program, const ReplayTurn& turn);
  absl::Status IssueOnDevice(const BoundProgram& program, const ReplayTurn& turn);
  bool UsesGraph(const ReplayTurn& turn) const;
  // Of step_graphs.h, over all ranks.
  absl::StatusOr<std::string> AgreeOnGraph(const std::string& difference) const;
  // What a log saw of collectives is through with the programs' work.
  absl::Status MarkCollectives();
  absl::Status DrillOf(const plan::Instruction& instruction) const;
  // An instruction of a stream with what comes into force after it.
  absl::Status RunOne(const BoundProgram& program,
                      const BoundInstruction& bound,
                      const ReplayTurn& turn,
                      int64_t wait_ns);
  void Poison(const plan::Instruction& alloc, const ReplayTurn& turn);
  absl::Status BeginTraced(const plan::Instruction& instruction);
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
  std::array<std::unique_ptr<kernels::CpuQueue>, plan::kStreamCount> queues_;
  std::map<const BoundProgram*, DeviceProgram> device_programs_;  // of programs_
  std::vector<kernels::CudaEvent> events_;
  std::unique_ptr<DeviceTimeline> timeline_;  // of a device
  std::unique_ptr<StepGraphs> graphs_;
  uint64_t runs_ = 0;
};

}  // namespace ravel::shard
