#include "worker/trainer/device_batches.h"

#include "common/check.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kSteps = 2;

}  // namespace

absl::StatusOr<DeviceBatches> DeviceBatches::Create(kernels::CudaGpu& gpu,
                                                    int64_t micro_batches,
                                                    const BatchViews& device) {
  CHECK_EQ(device.ids.elements(), device.targets.elements());
  DeviceBatches made;
  made.device_ = device;
  made.part_bytes_ = device.ids.elements() * DTypeBytes(device.ids.dtype);
  made.micro_batches_ = micro_batches;
  ASSIGN_OR_RETURN(made.pinned_, gpu.AllocatePinned(kSteps * 2 * made.part_bytes_ * micro_batches));
  return made;
}

BatchViews DeviceBatches::host(int64_t micro_batch) const {
  CHECK(micro_batch >= 0 && micro_batch < micro_batches_);
  const int64_t place = steps_ % kSteps * micro_batches_ + micro_batch;
  auto* begin = static_cast<std::byte*>(pinned_.data()) + 2 * part_bytes_ * place;
  BatchViews batch = device_;
  batch.ids.data = begin;
  batch.targets.data = begin + part_bytes_;
  return batch;
}

void DeviceBatches::Upload(kernels::CudaStream& stream, int64_t micro_batch) const {
  const BatchViews from = host(micro_batch);
  stream.CopyMemory(device_.ids.data, from.ids.data, part_bytes_);
  stream.CopyMemory(device_.targets.data, from.targets.data, part_bytes_);
}

}  // namespace ravel::trainer
