#include "worker/shard/device_timeline.h"

#include <chrono>
#include <limits>
#include <utility>

namespace ravel::shard {
namespace {

using kernels::CudaGpu;

constexpr double kNanosecondsPerMillisecond = 1e6;

int64_t SteadyNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

// The event was between two looks at the host's clock. A host that is busy there looks late, so the
// closest two of some tries count.
absl::Status DeviceTimeline::CompareClocks() {
  constexpr int kTries = 8;
  RETURN_IF_ERROR(streams_.FinishAll());
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kTries; ++i) {
    ASSIGN_OR_RETURN(kernels::CudaEvent event, streams_.gpu().MakeEvent(CudaGpu::Timing::kOn));
    const int64_t before = SteadyNs();
    streams_.compute().Record(event);
    RETURN_IF_ERROR(streams_.WaitFor(event));
    const int64_t took = SteadyNs() - before;
    if (took < least) {
      least = took;
      reference_ = std::move(event);
      reference_ns_ = before + took / 2;
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceTimeline::Begin(kernels::CudaStream& stream) {
  if (used_ == 0) {
    RETURN_IF_ERROR(CompareClocks());
  }
  if (used_ == spans_.size()) {
    Span span;
    ASSIGN_OR_RETURN(span.begin, streams_.gpu().MakeEvent(CudaGpu::Timing::kOn));
    ASSIGN_OR_RETURN(span.end, streams_.gpu().MakeEvent(CudaGpu::Timing::kOn));
    spans_.push_back(std::move(span));
  }
  stream.Record(spans_[used_].begin);
  return absl::OkStatus();
}

void DeviceTimeline::End(kernels::CudaStream& stream, const trace::Event& event) {
  Span& span = spans_[used_++];
  stream.Record(span.end);
  span.event = event;
}

absl::StatusOr<int64_t> DeviceTimeline::TimeOf(const kernels::CudaEvent& event) const {
  ASSIGN_OR_RETURN(const float milliseconds, event.MillisecondsSince(reference_));
  return reference_ns_ + static_cast<int64_t>(double{milliseconds} * kNanosecondsPerMillisecond);
}

absl::Status DeviceTimeline::Collect(trace::Recorder& recorder) {
  if (used_ == 0) {
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(streams_.FinishAll());
  for (size_t i = 0; i < used_; ++i) {
    trace::Event event = spans_[i].event;
    event.issue_ns = event.end_ns - event.begin_ns;
    ASSIGN_OR_RETURN(event.begin_ns, TimeOf(spans_[i].begin));
    ASSIGN_OR_RETURN(event.end_ns, TimeOf(spans_[i].end));
    recorder.Record(event);
  }
  used_ = 0;
  return absl::OkStatus();
}

}  // namespace ravel::shard
