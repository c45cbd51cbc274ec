#pragma once

// The streams of a rank's plan on a CUDA device.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::shard {

// One stream for each StreamId that the plan's programs name. Used only from the thread that issues
// the rank's work.
class DeviceStreams {
 public:
  // `failure`, asked whenever the host waits for the device, ends that wait by an error: work of a
  // stream that waits for a lost peer does not end by itself. Device and plan outlive the streams.
  // ResourceExhausted where the device has no room for the scratch memory of the streams.
  static absl::StatusOr<std::unique_ptr<DeviceStreams>> Create(
      kernels::CudaGpu& gpu, const plan::ShardingPlan& plan, std::function<absl::Status()> failure);
  // Waits until the device is done with all that was issued, or `failure` says that it never will
  // be: memory that work refers to may go afterwards.
  ~DeviceStreams();
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  kernels::CudaGpu& gpu() { return gpu_; }
  kernels::CudaStream& of(plan::StreamId stream);
  kernels::CudaStream& compute() { return of(plan::StreamId::kCompute); }
  // The stream of what the host of a device does in order with its copies; only where the plan
  // names kUpload.
  kernels::CudaStream& host_work();
  // Device memory beside the arena: scratch of gemms. Streams but compute need none.
  int64_t scratch_bytes() const;

  // All later work of any stream waits for all work so far of every stream; the host does not.
  void Join();
  // Sets the log of all streams, or nullptr (CudaStream::set_log).
  void set_log(kernels::CudaCallLog* log);
  // These calls as a graph of the compute stream, which ends when all of them have. Nothing runs.
  // An error names the call that cannot be captured.
  absl::StatusOr<kernels::CudaGraph> Capture(const kernels::CudaCalls& calls);
  // The host waits for what `stream` has been given.
  absl::Status Finish(kernels::CudaStream& stream);
  absl::Status FinishAll();
  absl::Status WaitFor(const kernels::CudaEvent& event);
  // Number of times the host has waited for the device.
  int64_t host_waits() const { return host_waits_; }

 private:
  struct Member {
    kernels::CudaMemory scratch;  // outlives the stream
    std::unique_ptr<kernels::CudaStream> stream;
    kernels::CudaEvent joined;
  };
  DeviceStreams(kernels::CudaGpu& gpu, std::function<absl::Status()> failure)
      : gpu_(gpu), failure_(std::move(failure)) {}
  absl::Status Add(plan::StreamId stream);
  absl::Status AddCopyStream(Member& member);

  kernels::CudaGpu& gpu_;
  const std::function<absl::Status()> failure_;
  // By StreamIndex, then that of host work.
  std::array<Member, plan::kStreamCount + 1> members_;
  kernels::CudaEvent finished_;
  int64_t host_waits_ = 0;
};

}  // namespace ravel::shard
