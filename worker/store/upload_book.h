#pragma once

// The uploads of a store share the account of its quota and the checksums of parts. What is used is
// the size of every file there, so each removal goes through the account.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <sys/types.h>

#include "common/mutex.h"
#include "common/status.h"

namespace ravel::store_server {

// Thread-safe.
class UploadBook {
 public:
  explicit UploadBook(int64_t quota_bytes) : quota_bytes_(quota_bytes) {}  // 0: none

  // Bytes that are promised to an upload. ResourceExhausted above the quota, but for none at all:
  // it may have been lowered below what is there.
  absl::Status Reserve(int64_t bytes);
  // Adds to the bytes that are there, and to those that are promised.
  void Add(int64_t used, int64_t reserved);
  int64_t used_bytes() const;
  // Bytes that the quota has left; the most there are without one.
  int64_t LeftBytes() const;

  // An upload writes this file, which it has open, and adds what it writes. False: the file was
  // removed before.
  bool BeginWriting(int fd);
  // It writes no more.
  void EndWriting(int fd);
  // Removes a file as unlink(2) does and counts it off. One that is written may still grow: it is
  // counted off when its upload ends.
  int Unlink(const std::string& path);

  // The checksum of a part between two streams of its upload, so that the second does not read what
  // the first has written. Only a few are kept; Recall forgets.
  void Remember(const std::string& part, int64_t size, uint32_t crc32c);
  std::optional<uint32_t> Recall(const std::string& part, int64_t size);

 private:
  struct PartSum {
    int64_t size = 0;
    uint32_t crc32c = 0;
  };

  using FileId = std::pair<dev_t, ino_t>;

  const int64_t quota_bytes_;
  mutable Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<FileId> written_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, PartSum> sums_ ABSL_GUARDED_BY(mutex_);  // by the path of the part
};

}  // namespace ravel::store_server
