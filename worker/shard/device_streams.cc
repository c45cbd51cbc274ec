// The streams and events of one rank's device: priorities, workspaces of gemms, events of
// instructions, and captures that fork from the compute stream and join it again.

#include "worker/shard/device_streams.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::shard {
namespace {

// A wait asks without a pause for so long, then now and again.
constexpr std::chrono::microseconds kEager{200};
constexpr std::chrono::microseconds kPause{50};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceStreams>> DeviceStreams::Create(
    kernels::CudaGpu& gpu, const plan::ShardingPlan& plan, std::function<absl::Status()> failure) {
  std::unique_ptr<DeviceStreams> made(new DeviceStreams(gpu, std::move(failure)));
  RETURN_IF_ERROR(made->Add(plan::StreamId::kCompute));
  // Gemms leave to collectives what the job gives those, on any number of ranks.
  const auto blocks = static_cast<int32_t>(plan.options.communication_blocks);
  if (blocks > 0) {
    made->compute().UseMultiprocessors(std::max(1, gpu.properties().multiprocessors - blocks));
  }
  for (const plan::StepProgram& program : plan.programs) {
    for (const plan::Instruction& instruction : program.instructions) {
      if (instruction.stream != plan::StreamId::kHost) {
        RETURN_IF_ERROR(made->Add(instruction.stream));
      }
    }
  }
  if (made->members_[plan::StreamIndex(plan::StreamId::kUpload)].stream != nullptr) {
    RETURN_IF_ERROR(made->AddCopyStream(made->members_.back()));
  }
  ASSIGN_OR_RETURN(made->finished_, gpu.MakeEvent());
  return made;
}

// What others wait for comes first where both could run. Sums, casts and copies take no scratch.
absl::Status DeviceStreams::AddCopyStream(Member& member) {
  ASSIGN_OR_RETURN(member.joined, gpu_.MakeEvent());
  ASSIGN_OR_RETURN(member.stream, gpu_.MakeCopyStream(kernels::CudaGpu::Priority::kHigh));
  return absl::OkStatus();
}

absl::Status DeviceStreams::Add(plan::StreamId stream) {
  Member& member = members_[plan::StreamIndex(stream)];
  if (member.stream != nullptr) {
    return absl::OkStatus();
  }
  if (stream != plan::StreamId::kCompute) {
    return AddCopyStream(member);
  }
  ASSIGN_OR_RETURN(member.joined, gpu_.MakeEvent());
  auto scratch = gpu_.AllocateDevice(kernels::cuda::kScratchBytes);
  if (!scratch.ok()) {
    return Annotate(scratch.status(), "scratch memory of gemms");
  }
  member.scratch = *std::move(scratch);
  ASSIGN_OR_RETURN(member.stream,
                   gpu_.MakeStream(kernels::CudaGpu::Priority::kNormal, member.scratch.data()));
  return absl::OkStatus();
}

DeviceStreams::~DeviceStreams() {
  FinishAll().IgnoreError();  // an error was, or will be, somebody's: here it only ends the wait
}

kernels::CudaStream& DeviceStreams::of(plan::StreamId stream) {
  Member& member = members_[plan::StreamIndex(stream)];
  CHECK_MSG(member.stream != nullptr, "a stream that the plan does not name");
  return *member.stream;
}

kernels::CudaStream& DeviceStreams::host_work() {
  CHECK_MSG(members_.back().stream != nullptr, "the plan gives the host nothing to do");
  return *members_.back().stream;
}

int64_t DeviceStreams::scratch_bytes() const {
  int64_t bytes = 0;
  for (const Member& member : members_) {
    bytes += member.scratch.bytes();
  }
  return bytes;
}

void DeviceStreams::Join() {
  for (Member& member : members_) {
    if (member.stream != nullptr) {
      member.stream->Record(member.joined);
    }
  }
  for (const Member& member : members_) {
    for (const Member& other : members_) {
      if (member.stream != nullptr && other.stream != nullptr && &member != &other) {
        member.stream->Wait(other.joined);
      }
    }
  }
}

void DeviceStreams::set_log(kernels::CudaCallLog* log) {
  for (const Member& member : members_) {
    if (member.stream != nullptr) {
      member.stream->set_log(log);
    }
  }
}

absl::StatusOr<kernels::CudaGraph> DeviceStreams::Capture(const kernels::CudaCalls& calls) {
  kernels::CudaStream& origin = compute();
  origin.BeginCapture();
  origin.Record(finished_);
  absl::Status status;
  for (Member& member : members_) {
    if (member.stream != nullptr && member.stream.get() != &origin) {
      member.stream->Wait(finished_);  // which brings it into the capture
    }
  }
  for (size_t i = 0; i < calls.size() && status.ok(); ++i) {
    status = calls[i].stream->Do(calls[i]);
  }
  for (Member& member : members_) {
    if (status.ok() && member.stream != nullptr && member.stream.get() != &origin) {
      member.stream->Record(member.joined);
      origin.Wait(member.joined);
    }
  }
  absl::StatusOr<kernels::CudaGraph> graph = origin.EndCapture();
  RETURN_IF_ERROR(status);
  return graph;
}

absl::Status DeviceStreams::WaitFor(const kernels::CudaEvent& event) {
  ++host_waits_;
  if (kernels::CudaCallLog* log = compute().log(); log != nullptr) {
    log->Refuse("a wait of the host for the device");
  }
  const auto eager_until = std::chrono::steady_clock::now() + kEager;
  for (;;) {
    ASSIGN_OR_RETURN(const bool done, event.Done());
    if (done) {
      return absl::OkStatus();
    }
    if (std::chrono::steady_clock::now() < eager_until) {
      std::this_thread::yield();
      continue;
    }
    RETURN_IF_ERROR(failure_ ? failure_() : absl::OkStatus());
    std::this_thread::sleep_for(kPause);
  }
}

absl::Status DeviceStreams::Finish(kernels::CudaStream& stream) {
  stream.Record(finished_);
  return WaitFor(finished_);
}

absl::Status DeviceStreams::FinishAll() {
  for (Member& member : members_) {
    if (member.stream != nullptr) {
      RETURN_IF_ERROR(Finish(*member.stream));
    }
  }
  return absl::OkStatus();
}

}  // namespace ravel::shard
