#pragma once

// What differs between the replay of a program on a host and on a device: streams, the order of
// their work, and how values leave for other ranks. An executor is given one and asks no further.

#include <cstdint>
#include <functional>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "kernels/stream.h"
#include "worker/comm/communicator.h"
#include "worker/model/module.h"
#include "worker/shard/bound_program.h"

namespace ravel::shard {

class StepGraphs;

// Messages of statistics in memory of the stream's backend, in words of 8 bytes.
struct StatisticsMessages {
  const int64_t* mine = nullptr;
  int64_t* all = nullptr;  // of all ranks, one after another
  int64_t words = 0;       // of one
};

// One program's run: which micro-batch of which lane.
struct ReplayTurn {
  plan::StepSlot slot;
  // Per unit, whether this rank's micro-batch uses it, if it is optional. Empty: all are used.
  plan::IdVector<plan::UnitId, bool> used = {};
  int64_t step = 0;       // for traces and reports
  double loss_scale = 1;  // of the gradient of the loss (UnitMemory::loss_scale)
  // Its calls are not those of other steps: tensors' norms are measured.
  bool measured = false;
};

// Used only from the thread of its rank, but for what `ProgramRun::run` does on other threads of
// the backend's own.
class ReplayBackend {
 public:
  virtual ~ReplayBackend() = default;

  virtual kernels::Stream& stream(plan::StreamId stream) = 0;

  // Before the first program runs. All outlive the backend.
  virtual absl::Status Prepare(const std::vector<BoundProgram>& programs,
                               const model::Modules& modules) = 0;

  struct ProgramRun {
    const BoundProgram& program;  // of those prepared
    const ReplayTurn& turn;
    // Single instructions are observed or traced.
    bool watched = false;
    // Does an instruction's work, or gives it to its stream; `wait_ns` is how long the stream stood
    // still before it. An error ends the program.
    std::function<absl::Status(const BoundInstruction& bound, int64_t wait_ns)> run;
  };
  // Calls `run` for every instruction of a stream, in an order that the program's waits allow.
  virtual absl::Status Run(const ProgramRun& program) = 0;

  // Returns when all work of all streams is done.
  virtual absl::Status Finish() = 0;

  // Every byte of [to, to + bytes) becomes `byte`, at that point of the stream.
  virtual void FillBytes(kernels::Stream& stream, void* to, uint8_t byte, int64_t bytes) = 0;
  // Exchanges the messages of all ranks, on `stream`.
  virtual absl::Status ExchangeStatistics(comm::Communicator& world,
                                          const comm::CollectiveTag& tag,
                                          const StatisticsMessages& messages,
                                          kernels::Stream& stream) = 0;
  // Rounds a lane's gradient that is staged in fp32 to the bf16 of the wire. Returns where it lies.
  virtual void* PackForWire(kernels::Stream& stream, float* staging, int64_t elements) = 0;

  // The times of an instruction in `event` are those of its calls on the host; a backend whose work
  // runs later replaces them by its own, which CollectTrace waits for.
  virtual absl::Status BeginTraced(plan::StreamId stream) = 0;
  virtual void EndTraced(plan::StreamId stream,
                         const trace::Event& event,
                         trace::Recorder& recorder) = 0;
  virtual absl::Status CollectTrace(trace::Recorder& recorder) = 0;

  // Programs as graphs; nullptr where there are none.
  virtual const StepGraphs* graphs() const { return nullptr; }
};

}  // namespace ravel::shard
