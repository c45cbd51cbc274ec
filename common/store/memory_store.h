#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::store {

// A file system in memory that knows what is durable, in the steps that a file system takes: bytes,
// rename, entries of a folder. For tests, which fail a step or cut the power at any of them.
class MemoryStore : public ObjectStore {
 public:
  MemoryStore();
  ~MemoryStore() override;

  absl::Status MakeRoot() override { return absl::OkStatus(); }
  absl::Status ProbeWritable() const override { return absl::OkStatus(); }

  absl::StatusOr<std::unique_ptr<FileWriter>> Create(std::string_view path,
                                                     int64_t expected_bytes) override;
  absl::StatusOr<std::unique_ptr<FileReader>> Open(std::string_view path) const override;
  absl::StatusOr<std::vector<ListedEntry>> List(std::string_view directory) const override;
  absl::Status MakeDirectory(std::string_view path) override;
  absl::Status PublishIfAbsent(std::string_view from, std::string_view to) override;
  absl::Status Withdraw(std::string_view path) override;
  std::string Locate(std::string_view path) const override;

  // The content that is left after a crash of the machine. kDurableOnly: only what was made
  // durable. kEntriesKept: all names, but only durable file bytes (a file system that journals
  // metadata before data).
  enum class PowerLoss { kDurableOnly, kEntriesKept };
  void LosePower(PowerLoss kind);

  // Changing steps (creation, append, fdatasync, mkdir, rename, removal of one entry, fsync of a
  // folder) so far.
  int64_t operations() const;
  // The changing step number `operation` (from 0) and all later ones do nothing and fail with
  // `status`; < 0: none.
  void FailFrom(int64_t operation, absl::Status status);
  // Only that one operation fails.
  void FailOnce(int64_t operation, absl::Status status);
  // Bytes that fit; an Append or a reservation beyond is ResourceExhausted "no space left".
  void SetCapacity(int64_t bytes);

  // Damage done behind everybody's back.
  absl::Status FlipBit(std::string_view path, int64_t byte, int bit);
  absl::Status Truncate(std::string_view path, int64_t size);
  absl::Status Overwrite(std::string_view path, std::string_view contents);

  struct Node;

 private:
  friend class MemoryFileWriter;
  absl::Status Count() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Node>> Find(std::string_view path) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Rename(std::string_view from, std::string_view to)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RemoveTree(std::string_view path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Sync(std::string_view folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  // Shared: a writer keeps its file when that is renamed or removed, as POSIX does.
  std::shared_ptr<Node> root_ ABSL_GUARDED_BY(mutex_);
  int64_t operations_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t fail_from_ ABSL_GUARDED_BY(mutex_) = -1;
  int64_t fail_once_ ABSL_GUARDED_BY(mutex_) = -1;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  int64_t capacity_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t parts_ ABSL_GUARDED_BY(mutex_) = 0;  // numbers the names of unfinished files
};

}  // namespace ravel::store
