#pragma once

// The memory that the ranks of a shared-memory group have in common, between threads or between
// processes.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/status.h"

namespace ravel::comm {

// Zero-filled; freed with the object. Mapped where huge pages are allowed, and touched.
class PrivateMapping {
 public:
  static absl::StatusOr<PrivateMapping> Create(int64_t bytes);
  PrivateMapping() = default;
  PrivateMapping(PrivateMapping&& other) noexcept;
  PrivateMapping& operator=(PrivateMapping&& other) noexcept;
  ~PrivateMapping();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// First the control block (group_block.h), later one arena. CreateArena is called by rank 0 alone,
// then, with a barrier between, MapArena by every rank, which then reserves its own part.
class SharedSegment {
 public:
  virtual ~SharedSegment() = default;
  virtual const char* transport() const = 0;
  virtual std::byte* block() = 0;
  virtual absl::Status CreateArena(int64_t bytes) = 0;
  virtual absl::StatusOr<std::byte*> MapArena(int64_t bytes) = 0;
  // Makes the pages of [offset, offset + bytes) of the arena real, so that a lack of memory is an
  // error here and not a signal later.
  virtual absl::Status ReserveArena(int64_t offset, int64_t bytes) = 0;
};

// Anonymous memory of this process; all ranks hold the same object.
class LocalSegment final : public SharedSegment {
 public:
  static absl::StatusOr<std::unique_ptr<LocalSegment>> Create(int size);
  const char* transport() const override { return "local"; }
  std::byte* block() override { return block_.data(); }
  absl::Status CreateArena(int64_t bytes) override;
  absl::StatusOr<std::byte*> MapArena(int64_t bytes) override;
  absl::Status ReserveArena(int64_t offset, int64_t bytes) override;

 private:
  PrivateMapping block_;
  PrivateMapping arena_;
};

// A memfd that rank 0 makes and the other processes of the host open through /proc. It has no name
// in any file system, so nothing is left behind however the processes end.
class MemfdSegment final : public SharedSegment {
 public:
  // What the others need to open it: process, descriptor, nonce, size. A secret.
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> Create(int size);
  std::string record() const;
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> Open(const std::string& record, int size);

  ~MemfdSegment() override;
  const char* transport() const override { return "shm"; }
  std::byte* block() override { return block_; }
  absl::Status CreateArena(int64_t bytes) override;
  absl::StatusOr<std::byte*> MapArena(int64_t bytes) override;
  absl::Status ReserveArena(int64_t offset, int64_t bytes) override;

 private:
  MemfdSegment(int fd, int size) : fd_(fd), size_(size) {}
  absl::Status MapBlock();

  int fd_ = -1;
  int size_ = 0;
  int64_t block_bytes_ = 0;
  std::byte* block_ = nullptr;
  int64_t arena_bytes_ = 0;
  std::byte* arena_ = nullptr;
};

}  // namespace ravel::comm
