#pragma once

// Programs on a CUDA device: instructions in the order of the list, each on its stream; the
// program's waits become waits of streams for events, and the host waits for nothing. Programs
// follow each other with the waits that their operands ask for (program_crossing.h) and no others.
// A graph is one item of the compute stream: streams are drained before and after it.

#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/device_timeline.h"
#include "worker/shard/mesh_communicators.h"
#include "worker/shard/replay_backend.h"
#include "worker/shard/step_graphs.h"

namespace ravel::shard {

class DeviceReplay final : public ReplayBackend {
 public:
  // All outlive it, but its work is done before they go: streams go first.
  struct Args {
    const plan::ShardingPlan& plan;
    DeviceStreams& streams;
    MeshCommunicators& communicators;
  };
  // ResourceExhausted where the device has no room for the wire's gradients.
  static absl::StatusOr<std::unique_ptr<DeviceReplay>> Create(const Args& args);

  // Before Prepare: programs of training become graphs (step_graphs.h), where nobody looks at
  // single instructions. Of ranks that exchange: all of them ask for it, or none.
  void UseGraphs(bool use) { use_graphs_ = use; }
  // Device memory beside the arena.
  int64_t device_bytes() const { return wire_.bytes(); }

  kernels::Stream& stream(plan::StreamId stream) override { return args_.streams.of(stream); }
  absl::Status Prepare(const std::vector<BoundProgram>& programs,
                       const model::Modules& modules) override;
  absl::Status Run(const ProgramRun& program) override;
  absl::Status Finish() override { return args_.streams.FinishAll(); }
  void FillBytes(kernels::Stream& stream, void* to, uint8_t byte, int64_t bytes) override;
  absl::Status ExchangeStatistics(comm::Communicator& world,
                                  const comm::CollectiveTag& tag,
                                  const StatisticsMessages& messages,
                                  kernels::Stream& stream) override;
  void* PackForWire(kernels::Stream& stream, float* staging, int64_t elements) override;
  absl::Status BeginTraced(plan::StreamId stream) override;
  void EndTraced(plan::StreamId stream,
                 const trace::Event& event,
                 trace::Recorder& recorder) override;
  absl::Status CollectTrace(trace::Recorder& recorder) override;
  const StepGraphs* graphs() const override { return graphs_.get(); }

 private:
  // An instruction's place in the order: the events of instructions of other streams that it waits
  // for, and its own where another one waits for it, as positions in events_. `range` is its name
  // in profilers, "Forward layers.0".
  static constexpr size_t kNoEvent = std::numeric_limits<size_t>::max();
  // `crossing` and `leaving` are the same for instructions of earlier programs, in leaving_.
  struct Order {
    std::vector<size_t> waits;
    size_t event = kNoEvent;
    std::vector<size_t> crossing;
    size_t leaving = kNoEvent;
    std::string range;
  };
  struct Prepared {
    std::string range;  // "program first, whole"
    plan::IdVector<plan::InstructionId, Order> orders;
  };
  explicit DeviceReplay(const Args& args) : args_(args), timeline_(args.streams) {}
  std::string RangeOf(const plan::Instruction& instruction) const;
  absl::Status PrepareProgram(const BoundProgram& program, const model::Modules& modules);
  absl::Status PrepareCrossing(const std::vector<BoundProgram>& programs);
  // Says if the program's streams follow those of the programs before it, or are drained.
  enum class Ends { kCrossed, kDrained };
  absl::Status Issue(const ProgramRun& program, Ends ends);
  absl::Status RunGraph(const ProgramRun& program);
  bool UsesGraph(const ProgramRun& program) const;
  // Collective. Returns the first rank's objection to capturing this program, or "".
  absl::StatusOr<std::string> AgreeOnGraph(const std::string& difference) const;
  // Marks the collectives of a captured program as complete where its streams have joined.
  absl::Status MarkCollectives();

  const Args args_;
  kernels::CudaMemory wire_;  // the largest fp32 staging buffer in bf16
  std::map<const BoundProgram*, Prepared> prepared_;
  std::vector<kernels::CudaEvent> events_;
  // An event that was last recorded in a capture cannot be waited for outside of it, so these are
  // never recorded where a graph is made.
  struct Leaving {
    kernels::CudaEvent event;
    bool recorded = false;  // since the streams were drained last
  };
  std::vector<Leaving> leaving_;
  bool drained_ = false;  // no program has run since the streams were drained
  DeviceTimeline timeline_;
  bool use_graphs_ = false;
  std::unique_ptr<StepGraphs> graphs_;
};

}  // namespace ravel::shard
