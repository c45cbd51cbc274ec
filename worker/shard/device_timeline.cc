#include "worker/shard/device_timeline.h"

#include <chrono>
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

absl::Status DeviceTimeline::Begin(kernels::CudaStream& stream) {
  if (used_ == 0) {
    RETURN_IF_ERROR(streams_.FinishAll());
    ASSIGN_OR_RETURN(reference_, streams_.gpu().MakeEvent(CudaGpu::Timing::kOn));
    streams_.compute().Record(reference_);
    RETURN_IF_ERROR(streams_.WaitFor(reference_));
    reference_ns_ = SteadyNs();
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
