#pragma once

// When the instructions of a traced step ran on a device, by events on their streams.

#include <cstdint>
#include <vector>

#include "common/status.h"
#include "common/trace.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/shard/device_streams.h"

namespace ravel::shard {

// Used only from the thread that issues the rank's work. Nothing of it may be captured: the times
// of events in a graph cannot be asked for.
class DeviceTimeline {
 public:
  // The streams outlive it.
  explicit DeviceTimeline(DeviceStreams& streams) : streams_(streams) {}

  // What `stream` is given until End is one instruction. The first after a Collect waits for the
  // device, so that its clock and the host's can be compared.
  absl::Status Begin(kernels::CudaStream& stream);
  // `event` says what it was; its times are when the host issued it.
  void End(kernels::CudaStream& stream, const trace::Event& event);

  // Waits for the device, and gives the recorder what has run since the last time: times are those
  // of the device on the host's clock, `issue_ns` is what the host needed to issue it.
  absl::Status Collect(trace::Recorder& recorder);

 private:
  struct Span {
    kernels::CudaEvent begin;
    kernels::CudaEvent end;
    trace::Event event;
  };
  absl::Status CompareClocks();
  absl::StatusOr<int64_t> TimeOf(const kernels::CudaEvent& event) const;

  DeviceStreams& streams_;
  kernels::CudaEvent reference_;
  int64_t reference_ns_ = 0;  // when it was, on the host's clock
  std::vector<Span> spans_;   // kept for the next step
  size_t used_ = 0;
};

}  // namespace ravel::shard
