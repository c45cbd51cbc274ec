#include "worker/optim/device_statistics.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::optim {
namespace {

constexpr int64_t kWordBytes = sizeof(int64_t);

kernels::CudaStream& CudaStreamOf(kernels::Stream& stream) {
  CHECK_MSG(stream.backend() == kernels::Backend::kCuda, "a stream of the device is expected");
  return static_cast<kernels::CudaStream&>(stream);
}

}  // namespace

absl::Status DeviceStatistics::CopyTables() {
  kernels::CudaStream& stream = streams_.compute();
  stream.FillZero(device_.data(), device_.bytes());
  const auto copy = [&](const auto& values, auto* to) -> absl::Status {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(values[0]));
    if (bytes == 0) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(kernels::CudaMemory from, streams_.gpu().AllocatePinned(bytes));
    std::memcpy(from.data(), values.data(), Size(bytes));
    stream.CopyMemory(to, from.data(), bytes);
    copied_.push_back(std::move(from));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(copy(tables().nodes, nodes_));
  RETURN_IF_ERROR(copy(tables().sums.steps, steps_));
  RETURN_IF_ERROR(copy(tables().sums.level_ends, level_ends_));
  return streams_.Finish(stream);
}

absl::Status DeviceStatistics::Allocate() {
  kernels::CudaGpu& gpu = streams_.gpu();
  auto device = gpu.AllocateDevice(Place(nullptr));
  if (!device.ok()) {
    return Annotate(device.status(), "statistics");
  }
  device_ = *std::move(device);
  Place(static_cast<std::byte*>(device_.data()));
  RETURN_IF_ERROR(CopyTables());
  for (Slot& slot : slots_) {
    ASSIGN_OR_RETURN(slot.begins, gpu.AllocatePinned((words() + 4) * kWordBytes));
    ASSIGN_OR_RETURN(slot.records,
                     gpu.AllocatePinned(gathered_bytes() + int64_t{sizeof(kernels::StepOutcome)}));
    ASSIGN_OR_RETURN(slot.recorded, gpu.MakeEvent());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceStatistics>> DeviceStatistics::Create(
    const Args& args, shard::DeviceStreams& streams) {
  std::unique_ptr<DeviceStatistics> made(new DeviceStatistics(args, streams));
  RETURN_IF_ERROR(made->Allocate());
  return made;
}

void DeviceStatistics::BeginStep(kernels::Stream& stream, const Beginning& beginning) {
  CHECK_MSG(begun_ - read_ < kUnread, "the slot's record has not been read");
  kernels::CudaStream& on = CudaStreamOf(stream);
  Slot& slot = At(slots_, begun_++ % kUnread);
  auto* message = static_cast<int64_t*>(slot.begins.data());
  const kernels::StatisticsHeader header = beginning.header();
  std::fill_n(message, nodes_word(), 0);
  std::memcpy(message, &header, sizeof(header));
  on.CopyMemory(message_, message, nodes_word() * kWordBytes);
  if (!beginning.weight_nodes.empty()) {
    CHECK_MSG(norms(), "norms have no room in the message");
    const int64_t lists = nodes_word() + longest();
    std::copy(beginning.weight_nodes.begin(),
              beginning.weight_nodes.end(),
              reinterpret_cast<double*>(message + lists));
    std::copy(beginning.update_nodes.begin(),
              beginning.update_nodes.end(),
              reinterpret_cast<double*>(message + lists + longest()));
    on.CopyMemory(message_ + lists, message + lists, 2 * longest() * kWordBytes);
  }
  int64_t* counts = message + words();
  counts[0] = beginning.step;
  on.CopyMemory(&outcome_->step, counts, kWordBytes);
  if (beginning.updates.has_value()) {
    counts[1] = *beginning.updates;
    on.CopyMemory(&outcome_->updates, counts + 1, kWordBytes);
  }
  if (beginning.loss_scale.has_value()) {
    const auto scale = static_cast<float>(beginning.loss_scale->scale);
    std::memcpy(counts + 2, &scale, sizeof(scale));
    on.CopyMemory(&outcome_->loss_scale, counts + 2, sizeof(scale));
    counts[3] = beginning.loss_scale->good_steps;
    on.CopyMemory(&outcome_->good_steps, counts + 3, kWordBytes);
  }
}

void DeviceStatistics::EndStep(kernels::Stream& stream) {
  CHECK_EQ(ended_ + 1, begun_);
  kernels::CudaStream& on = CudaStreamOf(stream);
  Slot& slot = At(slots_, ended_++ % kUnread);
  auto* to = static_cast<std::byte*>(slot.records.data());
  on.CopyMemory(to, gathered_, gathered_bytes());
  on.CopyMemory(to + gathered_bytes(), outcome_, sizeof(kernels::StepOutcome));
  on.Record(slot.recorded);
}

absl::StatusOr<StepStatistics::Record> DeviceStatistics::Read() {
  CHECK_MSG(unread() > 0, "no step is left to read");
  Slot& slot = At(slots_, read_ % kUnread);
  RETURN_IF_ERROR(streams_.WaitFor(slot.recorded));
  ++read_;
  const auto* from = static_cast<const std::byte*>(slot.records.data());
  const size_t bytes = Size(gathered_bytes());
  return Record{.messages = {from, bytes},
                .outcome = reinterpret_cast<const kernels::StepOutcome*>(from + bytes)};
}

void DeviceStatistics::BeginEvaluation(kernels::Stream& stream) {
  CudaStreamOf(stream).FillZero(evaluation_,
                                args_.plan.lanes.turns() * static_cast<int64_t>(sizeof(LaneLoss)));
}

}  // namespace ravel::optim
