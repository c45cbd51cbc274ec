#pragma once

// State of the optimizer outside of memory: a file of this rank alone, mapped, whose pages come
// when they are fetched and go when they are released.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "common/mutex.h"
#include "common/status.h"
#include "worker/shard/host_access.h"

namespace ravel::shard {

// The job field that names the folder, as errors say it.
inline constexpr char kOffloadField[] = "training.optimizer.offload.path";

// The file has no name, so it goes with the process, however that ends. All of its room is taken
// when it is made: no access later can find the disk full. A disk that fails is DataLoss of
// Fetch where it cannot read, and of the next Release of the same pages where it could not write;
// every later call returns the first one. Thread-safe for ranges of different calls.
class OffloadTier {
 public:
  // `bytes` of zeros in a file in `folder`. Errors name kOffloadField: NotFound, PermissionDenied,
  // ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<OffloadTier>> Create(const std::string& folder,
                                                             int64_t bytes);
  ~OffloadTier();
  OffloadTier(const OffloadTier&) = delete;
  OffloadTier& operator=(const OffloadTier&) = delete;

  std::span<std::byte> all() const { return all_; }
  bool Holds(const void* address) const;
  // True if the folder is of a file system that lies in memory: nothing is saved.
  bool in_memory() const { return in_memory_; }

  enum class For { kReading, kWriting };
  // Brings the pages of a range into memory, and returns when they are there.
  absl::Status Fetch(std::span<const std::byte> range, For use);
  // Begins to write what has changed, and gives up the range's memory. What it holds stays
  // readable. After a Fetch for reading also the memory of the pages around the range that the
  // kernel has mapped with it.
  absl::Status Release(std::span<const std::byte> range, For use = For::kWriting);

 private:
  OffloadTier(int file, std::span<std::byte> all, bool in_memory)
      : file_(file), all_(all), in_memory_(in_memory) {}
  // The whole blocks of so many bytes that a range touches.
  std::span<std::byte> BlocksOf(std::span<const std::byte> range, size_t bytes) const;
  absl::Status Failed(const char* what, int error);
  absl::Status first_failure() const;

  const int file_;
  const std::span<std::byte> all_;
  const bool in_memory_;
  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

// An arena in host memory, a part of which is a tier: what is read or written there is fetched
// before, a bounded part at a time, and released afterwards.
class TieredAccess final : public HostAccess {
 public:
  // The tier outlives it; nullptr: there is none.
  explicit TieredAccess(OffloadTier* tier = nullptr) : tier_(tier) {}

  bool in_place() const override { return true; }
  absl::Status Read(const void* from, std::span<std::byte> to) override;
  absl::Status Write(std::span<const std::byte> from, void* to) override;
  absl::Status Settle(std::span<const std::byte> used) override;

 private:
  OffloadTier* tier_;
};

}  // namespace ravel::shard
