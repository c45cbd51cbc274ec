#include "kernels/cuda_host/cuda_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels {

std::string NameOf(const CudaCall& call) {
  switch (call.kind) {
    case CudaCall::Kind::kLaunch: {
      int32_t kernel = 0;
      std::memcpy(&kernel, call.arguments.data(), sizeof(kernel));
      return absl::StrCat("kernel ",
                          kernel / cuda::kKernelVariants,
                          " (variant ",
                          kernel % cuda::kKernelVariants,
                          ")");
    }
    case CudaCall::Kind::kCopy:
      return "a copy";
    case CudaCall::Kind::kFill:
      return "a fill";
    case CudaCall::Kind::kHostWork:
      return "work of the host";
    case CudaCall::Kind::kGemm:
      return "a gemm";
    case CudaCall::Kind::kAttention:
      return "attention";
    case CudaCall::Kind::kRecord:
      return "recording an event";
    case CudaCall::Kind::kWait:
      return "a wait for an event";
    case CudaCall::Kind::kGather:
      return "a gather of NCCL";
    case CudaCall::Kind::kExchange:
      return "an exchange of NCCL";
  }
  return "";
}

void CudaCalls::Append(const CudaCall& call) {
  places_.push_back({.kind = call.kind,
                     .stream = call.stream,
                     .begin = arguments_.size(),
                     .bytes = call.arguments.size()});
  arguments_.insert(arguments_.end(), call.arguments.begin(), call.arguments.end());
}

void CudaCalls::Clear() {
  places_.clear();
  arguments_.clear();
}

CudaCall CudaCalls::operator[](size_t index) const {
  const Place& place = places_[index];
  return {.kind = place.kind,
          .stream = place.stream,
          .arguments = std::span<const std::byte>(arguments_).subspan(place.begin, place.bytes)};
}

void CudaCallLog::Record() {
  CHECK(mode_ == Mode::kIdle);
  mode_ = Mode::kRecording;
  kept_.Clear();
  difference_.clear();
}

void CudaCallLog::Follow(const CudaCalls& calls) {
  CHECK(mode_ == Mode::kIdle);
  mode_ = Mode::kFollowing;
  expected_ = &calls;
  position_ = 0;
  difference_.clear();
}

bool CudaCallLog::Finish() {
  if (mode_ == Mode::kFollowing && position_ < expected_->size()) {
    Diverge(absl::StrCat("ends before ", NameOf((*expected_)[position_])));
  }
  mode_ = Mode::kIdle;
  expected_ = nullptr;
  return difference_.empty();
}

bool CudaCallLog::Takes(const CudaCall& call) {
  if (mode_ == Mode::kRecording) {
    kept_.Append(call);
  }
  if (mode_ != Mode::kFollowing) {
    return mode_ != Mode::kLost;
  }
  if (position_ < expected_->size()) {
    const CudaCall expected = (*expected_)[position_];
    if (expected.kind == call.kind && expected.stream == call.stream &&
        std::equal(expected.arguments.begin(),
                   expected.arguments.end(),
                   call.arguments.begin(),
                   call.arguments.end())) {
      ++position_;
      return false;
    }
  }
  Diverge(absl::StrCat(NameOf(call), " is new, or has other arguments"));
  return mode_ != Mode::kLost;
}

void CudaCallLog::Refuse(const std::string& what) {
  if (mode_ == Mode::kRecording && difference_.empty()) {
    difference_ = what;
  } else if (mode_ == Mode::kFollowing) {
    Diverge(what);
  }
}

void CudaCallLog::Diverge(const std::string& why) {
  difference_ = why;
  if (keeps_collectives()) {
    mode_ = Mode::kLost;
    return;
  }
  mode_ = Mode::kDiverged;
  for (size_t i = 0; i < position_; ++i) {
    const CudaCall call = (*expected_)[i];
    const absl::Status done = call.stream->Do(call);
    if (!done.ok()) {
      call.stream->gpu().Fail(done);
    }
  }
}

}  // namespace ravel::kernels
