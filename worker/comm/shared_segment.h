#pragma once

// The memory that the ranks of a shared-memory group have in common, between threads or between
// processes.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"

namespace ravel::comm {

// Zero-filled; freed with the object. Mapped where huge pages are allowed, and touched.
class PrivateMapping {
 public:
  static absl::StatusOr<PrivateMapping> Create(int64_t bytes);
  // Pages come to be when they are first used.
  static absl::StatusOr<PrivateMapping> CreateUntouched(int64_t bytes);
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

  // A segment of its own, without arena, for groups that are split off. Made by one rank; the
  // others open it by its record, a secret, while the maker holds it.
  struct Child {
    std::shared_ptr<SharedSegment> segment;
    std::string record;
  };
  virtual absl::StatusOr<Child> CreateChild(int64_t block_bytes) = 0;
  virtual absl::StatusOr<std::shared_ptr<SharedSegment>> OpenChild(const std::string& record,
                                                                   int64_t block_bytes) = 0;
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
  absl::StatusOr<Child> CreateChild(int64_t block_bytes) override;
  absl::StatusOr<std::shared_ptr<SharedSegment>> OpenChild(const std::string& record,
                                                           int64_t block_bytes) override;

 private:
  PrivateMapping block_;
  PrivateMapping arena_;
  Mutex mutex_;
  std::vector<std::shared_ptr<SharedSegment>> children_ ABSL_GUARDED_BY(mutex_);
};

// A memfd that rank 0 makes and the other processes of the host open through /proc. It has no name
// in any file system, so nothing is left behind however the processes end.
class MemfdSegment final : public SharedSegment {
 public:
  // The record by which the others open it: process, descriptor, nonce, bytes. A secret.
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> Create(int size);
  std::string record() const;
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> Open(const std::string& record, int size);

  ~MemfdSegment() override;
  const char* transport() const override { return "shm"; }
  std::byte* block() override { return block_; }
  absl::Status CreateArena(int64_t bytes) override;
  absl::StatusOr<std::byte*> MapArena(int64_t bytes) override;
  absl::Status ReserveArena(int64_t offset, int64_t bytes) override;
  absl::StatusOr<Child> CreateChild(int64_t block_bytes) override;
  absl::StatusOr<std::shared_ptr<SharedSegment>> OpenChild(const std::string& record,
                                                           int64_t block_bytes) override;

 private:
  MemfdSegment(int fd, int64_t block_bytes) : fd_(fd), block_bytes_(block_bytes) {}
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> Make(int64_t block_bytes);
  static absl::StatusOr<std::unique_ptr<MemfdSegment>> OpenBlock(const std::string& record,
                                                                 int64_t block_bytes);
  absl::Status MapBlock();
  // In the file: whole huge pages after its begin. The gap takes no memory.
  int64_t arena_offset() const;

  int fd_ = -1;
  const int64_t block_bytes_;
  std::byte* block_ = nullptr;
  int64_t arena_bytes_ = 0;
  std::byte* arena_ = nullptr;
};

}  // namespace ravel::comm
