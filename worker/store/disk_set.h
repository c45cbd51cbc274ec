#pragma once

// Files of a store on one or several disks. Folders below the first two levels lie on one disk
// whole, so that publishing one is a rename; the first two levels, and so the folders of jobs, are
// spread: a new one goes to the disk with the most room. What nobody sees yet is a part beside its
// name. No network, no callers.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "common/store/file_store.h"
#include "worker/store/upload.h"

namespace ravel::store_server {

struct DiskOptions {
  std::vector<std::string> folders;  // absolute, one on each disk; they exist
  int64_t quota_bytes = 0;           // of all files, parts too; 0: none
  // Stay free on each disk. Files of up to 16 MiB may take half of it, empty ones all.
  int64_t min_free_bytes = 0;
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
  int64_t used_bytes() const { return book_.used_bytes(); }
  int64_t quota_bytes() const { return options_.quota_bytes; }
  // Parts that nobody has written to for `age_ms`; the number of bytes.
  int64_t RemoveOldParts(int64_t now_ms, int64_t age_ms);

 private:
  explicit DiskSet(DiskOptions options)
      : options_(std::move(options)), book_(options_.quota_bytes) {}
  // The disk of a file or folder; none: -1.
  int DiskOf(std::string_view path) const;
  int EmptiestDisk() const;
  // The disk for a new folder, by the rule above.
  int DiskForFolder(std::string_view path) const;
  static int64_t FreeOn(const store::FileStore& disk);
  // Bytes that a file of this size may take there.
  int64_t RoomFor(int64_t bytes, const store::FileStore& disk) const;

  const DiskOptions options_;
  std::vector<std::unique_ptr<store::FileStore>> disks_;
  Mutex names_;  // held while a name that another disk could have is given
  UploadBook book_;
};

}  // namespace ravel::store_server
