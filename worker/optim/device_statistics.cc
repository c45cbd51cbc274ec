#include "worker/optim/device_statistics.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::optim {
namespace {

constexpr int64_t kAlignment = 256;

kernels::CudaStream& CudaStreamOf(kernels::Stream& stream) {
  CHECK_MSG(stream.backend() == kernels::Backend::kCuda, "a stream of the device is expected");
  return static_cast<kernels::CudaStream&>(stream);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceStatistics>> DeviceStatistics::Create(const Args& args) {
  std::unique_ptr<DeviceStatistics> made(new DeviceStatistics(args));
  const plan::ModelInventory& inventory = args.plan.inventory;
  int64_t rows = 0;
  for (const shard::ParameterGroup& group : args.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      rows += RowsOf(inventory, piece);
    }
  }
  made->rows_bytes_ = RoundUp(rows * static_cast<int64_t>(sizeof(float)), kAlignment);
  const int64_t bytes = made->rows_bytes_ + static_cast<int64_t>(inventory.tensors.size()) *
                                                static_cast<int64_t>(sizeof(int64_t));
  kernels::CudaGpu& gpu = args.streams.gpu();
  auto device = gpu.AllocateDevice(bytes);
  if (!device.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat("statistics: ", device.status().message()));
  }
  made->device_ = *std::move(device);
  ASSIGN_OR_RETURN(made->rows_, gpu.AllocatePinned(bytes));
  for (const plan::ActivationSpec& shared : inventory.shared) {
    if (shared.name == "loss") {
      made->loss_bytes_ = ElementCount(shared.shape) * static_cast<int64_t>(sizeof(float));
    }
  }
  CHECK_MSG(made->loss_bytes_ > 0, "a model without token losses");
  made->most_micro_batches_ = args.plan.lanes.programs();
  ASSIGN_OR_RETURN(made->losses_,
                   gpu.AllocatePinned(made->loss_bytes_ * made->most_micro_batches_));
  made->micro_batches_.reserve(static_cast<size_t>(made->most_micro_batches_));
  return made;
}

void DeviceStatistics::AddMicroBatch(kernels::Stream& stream, const MicroBatch& micro_batch) {
  const auto index = static_cast<int64_t>(micro_batches_.size());
  CHECK_LT(index, most_micro_batches_);
  CHECK_EQ(micro_batch.losses.elements() * static_cast<int64_t>(sizeof(float)), loss_bytes_);
  MicroBatch read = micro_batch;
  read.losses.data = static_cast<std::byte*>(losses_.data()) + index * loss_bytes_;
  CudaStreamOf(stream).CopyMemory(read.losses.data, micro_batch.losses.data, loss_bytes_);
  micro_batches_.push_back(read);
}

void DeviceStatistics::MeasureGradients(kernels::Stream& stream) {
  kernels::CudaStream& on = CudaStreamOf(stream);
  auto* sums = static_cast<float*>(device_.data());
  auto* counts = reinterpret_cast<int64_t*>(static_cast<std::byte*>(device_.data()) + rows_bytes_);
  on.FillZero(counts, device_.bytes() - rows_bytes_);
  for (const shard::ParameterGroup& group : args_.groups) {
    for (const plan::OwnedPiece& piece : group.measured_pieces()) {
      MeasureRows(stream,
                  args_.plan.inventory,
                  piece,
                  group.reduced(0) + piece.shard_offset,
                  sums,
                  counts + piece.tensor);
      sums += RowsOf(args_.plan.inventory, piece);
    }
  }
  on.CopyMemory(rows_.data(), device_.data(), device_.bytes());
}

absl::Status DeviceStatistics::Finish(kernels::Stream& stream) {
  return args_.streams.Finish(CudaStreamOf(stream));
}

const int64_t* DeviceStatistics::non_finite() const {
  return reinterpret_cast<const int64_t*>(static_cast<const std::byte*>(rows_.data()) +
                                          rows_bytes_);
}

}  // namespace ravel::optim
