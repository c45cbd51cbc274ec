// Memory of devices, and what is counted of it (kernels/cuda_host/cuda_device.h).

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"

namespace ravel::kernels {

CudaGpu::MemoryUse CudaGpu::memory_use() const {
  return memory_count_->use();
}

void CudaGpu::ForgetMostBytes() {
  memory_count_->ForgetMost();
}

absl::StatusOr<int64_t> CudaGpu::FreeBytes() const {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  RETURN_IF_ERROR(library_.ToStatus(
      library_.functions().memory_info(index_, &free_bytes, &total_bytes), "free memory"));
  return static_cast<int64_t>(free_bytes);
}

// ", which has 1000000 of 85899345920 bytes free"; empty where the device does not say.
std::string CudaGpu::FreeText() const {
  const absl::StatusOr<int64_t> bytes = FreeBytes();
  return bytes.ok()
             ? absl::StrCat(", which has ", *bytes, " of ", properties_.memory_bytes, " bytes free")
             : "";
}

absl::StatusOr<CudaMemory> CudaGpu::AllocateDevice(int64_t bytes) const {
  CHECK_GE(bytes, 0);
  void* data = nullptr;
  const int32_t error =
      library_.functions().device_allocate(index_, static_cast<uint64_t>(bytes), &data);
  if (error != 0) {
    const std::string free = error == kCudaOutOfMemory ? FreeText() : "";
    return library_.ToStatus(error,
                             absl::StrCat("allocating ", bytes, " bytes on device ", index_, free));
  }
  constexpr CudaMemoryCount::Kind kKind = CudaMemoryCount::Kind::kDevice;
  memory_count_->Add(kKind, bytes);
  return CudaMemory(
      data, bytes, {index_, library_.functions().device_free, memory_count_.get(), kKind});
}

absl::StatusOr<CudaMemory> CudaGpu::AllocatePinned(int64_t bytes) const {
  CHECK_GE(bytes, 0);
  void* data = nullptr;
  const int32_t error =
      library_.functions().pinned_allocate(index_, static_cast<uint64_t>(bytes), &data);
  if (error != 0) {
    const absl::Status status = library_.ToStatus(
        error, absl::StrCat("allocating ", bytes, " bytes of pinned host memory"));
    // For want of the host's memory, which is no fault of the device.
    return error == kCudaOutOfMemory ? absl::ResourceExhaustedError(status.message()) : status;
  }
  constexpr CudaMemoryCount::Kind kKind = CudaMemoryCount::Kind::kPinned;
  memory_count_->Add(kKind, bytes);
  return CudaMemory(
      data, bytes, {index_, library_.functions().pinned_free, memory_count_.get(), kKind});
}

void CudaMemoryCount::Add(Kind kind, int64_t bytes) {
  MutexLock lock(mutex_);
  ++use_.changes;
  if (kind == Kind::kPinned) {
    use_.pinned_bytes += bytes;
    return;
  }
  use_.bytes += bytes;
  use_.most_bytes = std::max(use_.most_bytes, use_.bytes);
  ++use_.allocations;
}

void CudaMemoryCount::Remove(Kind kind, int64_t bytes) {
  MutexLock lock(mutex_);
  ++use_.changes;
  if (kind == Kind::kPinned) {
    use_.pinned_bytes -= bytes;
    return;
  }
  use_.bytes -= bytes;
  --use_.allocations;
}

CudaGpu::MemoryUse CudaMemoryCount::use() const {
  MutexLock lock(mutex_);
  return use_;
}

void CudaMemoryCount::ForgetMost() {
  MutexLock lock(mutex_);
  use_.most_bytes = use_.bytes;
}

CudaMemory& CudaMemory::operator=(CudaMemory&& other) noexcept {
  if (this != &other) {
    Free();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    owner_ = other.owner_;
  }
  return *this;
}

void CudaMemory::Free() {
  if (data_ != nullptr) {
    owner_.free(owner_.device, data_);  // fails only where the process is lost already
    data_ = nullptr;
    owner_.count->Remove(owner_.kind, bytes_);
  }
}

}  // namespace ravel::kernels
