#pragma once

// Programs on a host: instructions in the order of the list, which the plan's checker has proved
// correct, on the calling thread.

#include <vector>

#include "worker/shard/replay_backend.h"

namespace ravel::shard {

class HostReplay : public ReplayBackend {
 public:
  kernels::Stream& stream(plan::StreamId) override { return stream_; }
  absl::Status Prepare(const std::vector<BoundProgram>&, const model::Modules&) override {
    return absl::OkStatus();
  }
  absl::Status Run(const ProgramRun& program) override;
  absl::Status Finish() override { return absl::OkStatus(); }
  void FillBytes(kernels::Stream& stream, void* to, uint8_t byte, int64_t bytes) override;
  absl::Status ExchangeStatistics(comm::Communicator& world,
                                  const comm::CollectiveTag& tag,
                                  const StatisticsMessages& messages,
                                  kernels::Stream& stream) override;
  void* PackForWire(kernels::Stream& stream, float* staging, int64_t elements) override;
  absl::Status BeginTraced(plan::StreamId) override { return absl::OkStatus(); }
  void EndTraced(plan::StreamId, const trace::Event& event, trace::Recorder& recorder) override {
    recorder.Record(event);
  }
  absl::Status CollectTrace(trace::Recorder&) override { return absl::OkStatus(); }

 private:
  kernels::CpuStream stream_;
};

}  // namespace ravel::shard
