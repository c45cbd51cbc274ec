#pragma once

// Files of a store on one or several disks. Folders below the first two levels lie on one disk
// whole, so that publishing one is a rename; the first two levels, and so the folders of jobs, are
// spread: a new one goes to the disk with the most room. What nobody sees yet is a part beside its
// name. No network, no callers.

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"
#include "common/store/file_store.h"

namespace ravel::store_server {

struct DiskOptions {
  std::vector<std::string> folders;  // absolute, one on each disk; they exist
  int64_t quota_bytes = 0;           // of all files, parts too; 0: none
  int64_t min_free_bytes = 0;        // stay free on each disk
};

// InvalidArgument unless `path` is one of a store: "" or parts of letters and signs without '/',
// control characters, "." and "..", none of more than 255 bytes, 16 at most, 1,024 bytes in all,
// the last one without the ending of a part.
absl::Status CheckPath(std::string_view field, std::string_view path);

struct FileFacts {
  bool is_folder = false;
  int64_t size = 0;
  int64_t changed_ms = 0;
};

class DiskSet;

// A file that is being written. Used from one thread at a time. Destroyed before Finish, it leaves
// its part, with which another upload of the same id can go on.
class Upload {
 public:
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  int64_t appended() const { return written_ + pending_; }
  // `crc32c` is that of data. ResourceExhausted above the quota. After an error the upload is only
  // good for being destroyed: its part holds what was flushed.
  absl::Status Append(std::string_view data, uint32_t crc32c);
  // A block more would be written together with those before; else Flush comes first.
  bool MayTakeMore() const;
  // After it the part has all that was appended: a process that is killed does not lose it.
  absl::Status Flush();
  // Durable, under its name. DataLoss, and the part is gone, unless the whole file has this size
  // and crc32c; AlreadyExists when the name is taken.
  absl::Status Finish(int64_t size, uint32_t crc32c);

 private:
  friend class DiskSet;
  Upload(DiskSet* disks, std::string part, std::string path)
      : disks_(disks), part_(std::move(part)), path_(std::move(path)) {}
  absl::Status Open(int64_t offset, int64_t expected_bytes);
  // Writes it behind what is written, whole or not at all.
  absl::Status Put(std::string_view data);
  // Writes past the page cache what can be written so; the number of bytes.
  absl::StatusOr<size_t> PutDirect(std::string_view data);

  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  DiskSet* disks_;
  const std::string part_;  // full paths
  const std::string path_;
  int fd_ = -1;
  int direct_fd_ = -1;  // of the same part, past the page cache; -1: the file system has none
  std::unique_ptr<char, Free> buffer_;  // aligned, for direct_fd_
  int64_t pending_ = 0;                 // bytes in it
  int64_t written_ = 0;                 // bytes of the part
  int64_t reserved_ = 0;                // of the quota, beyond what is written
  int64_t started_ = 0;                 // bytes whose way to the disk was begun
  uint32_t crc_ = 0;                    // of all that was appended
  bool spent_ = false;                  // failed or finished: crc_ is not that of a part
};

// Thread-safe. Paths are those of CheckPath.
class DiskSet {
 public:
  // Measures what is there. FailedPrecondition names a folder that is none.
  static absl::StatusOr<std::unique_ptr<DiskSet>> Open(const DiskOptions& options);

  // `upload`: 16 hexadecimal digits. Goes on at `offset`, at most what is written of it: OutOfRange
  // otherwise. AlreadyExists when the name is taken, NotFound without the folder,
  // ResourceExhausted when `expected_bytes` do not fit.
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::string_view path,
                                                      std::string_view upload,
                                                      int64_t offset,
                                                      int64_t expected_bytes);
  // Bytes of an upload that are written; 0 without one.
  absl::StatusOr<int64_t> WrittenOf(std::string_view path, std::string_view upload) const;
  // crc32c of a file that is there; reads all of it.
  absl::StatusOr<uint32_t> ChecksumOf(std::string_view path) const;

  absl::StatusOr<std::unique_ptr<store::FileReader>> OpenFile(std::string_view path) const;
  absl::StatusOr<FileFacts> Stat(std::string_view path) const;
  absl::StatusOr<std::vector<store::ListedEntry>> List(std::string_view path) const;
  // One folder in another that exists; `parents`: with all that are missing.
  absl::Status MakeFolder(std::string_view path, bool parents);
  absl::Status Publish(std::string_view from, std::string_view to);
  absl::Status Withdraw(std::string_view path);

  // Bytes that one more file may have.
  int64_t FreeBytes() const;
  int64_t used_bytes() const;
  int64_t quota_bytes() const { return options_.quota_bytes; }
  // Parts that nobody has written to for `age_ms`; the number of bytes.
  int64_t RemoveOldParts(int64_t now_ms, int64_t age_ms);

 private:
  friend class Upload;
  explicit DiskSet(DiskOptions options) : options_(std::move(options)) {}
  // The disk of a file or folder; none: -1.
  int DiskOf(std::string_view path) const;
  int EmptiestDisk() const;
  // The disk for a new folder, by the rule above.
  int DiskForFolder(std::string_view path) const;
  static int64_t FreeOn(const store::FileStore& disk);
  absl::Status Reserve(int64_t bytes);
  void AddUsed(int64_t bytes, int64_t reserved);
  // The checksum of a part between two streams of its upload, so that the second does not read what
  // the first has written. Only a few are kept; Recall forgets.
  void Remember(const std::string& part, int64_t size, uint32_t crc32c);
  std::optional<uint32_t> Recall(const std::string& part, int64_t size);

  struct PartSum {
    int64_t size = 0;
    uint32_t crc32c = 0;
  };

  const DiskOptions options_;
  std::vector<std::unique_ptr<store::FileStore>> disks_;
  Mutex names_;  // held while a name that another disk could have is given
  mutable Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, PartSum> sums_ ABSL_GUARDED_BY(mutex_);  // by the path of the part
};

}  // namespace ravel::store_server
