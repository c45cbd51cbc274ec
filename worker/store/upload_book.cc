#include "worker/store/upload_book.h"

#include <cerrno>
#include <limits>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ravel::store_server {
namespace {

constexpr size_t kMaxSums = 1024;

}  // namespace

absl::Status UploadBook::Reserve(int64_t bytes) {
  const MutexLock lock(mutex_);
  if (bytes > 0 && quota_bytes_ > 0 && used_ + reserved_ + bytes > quota_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("the store's quota of ",
                                                     quota_bytes_,
                                                     " bytes is used up: ",
                                                     used_ + reserved_,
                                                     " are used, ",
                                                     bytes,
                                                     " more were asked for"));
  }
  reserved_ += bytes;
  return absl::OkStatus();
}

void UploadBook::Add(int64_t used, int64_t reserved) {
  const MutexLock lock(mutex_);
  used_ += used;
  reserved_ += reserved;
}

int64_t UploadBook::used_bytes() const {
  const MutexLock lock(mutex_);
  return used_;
}

int64_t UploadBook::LeftBytes() const {
  const MutexLock lock(mutex_);
  return quota_bytes_ > 0 ? quota_bytes_ - used_ - reserved_ : std::numeric_limits<int64_t>::max();
}

bool UploadBook::BeginWriting(int fd) {
  const MutexLock lock(mutex_);
  struct stat status = {};
  if (::fstat(fd, &status) != 0 || status.st_nlink == 0) {
    return false;
  }
  written_.emplace(status.st_dev, status.st_ino);
  return true;
}

void UploadBook::EndWriting(int fd) {
  const MutexLock lock(mutex_);
  struct stat status = {};
  if (::fstat(fd, &status) == 0 && written_.erase({status.st_dev, status.st_ino}) > 0 &&
      status.st_nlink == 0) {
    used_ -= status.st_size;
  }
}

int UploadBook::Unlink(const std::string& path) {
  // Held, so that the file system frees its blocks after the lock: others wait for it.
  const int held = ::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC);
  int result = -1;
  int error = 0;
  {
    const MutexLock lock(mutex_);
    struct stat status = {};
    const bool is_file = ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
    result = ::unlink(path.c_str());
    error = errno;
    if (result == 0 && is_file && !written_.contains({status.st_dev, status.st_ino})) {
      used_ -= status.st_size;
    }
  }
  if (held >= 0) {
    ::close(held);
  }
  errno = error;
  return result;
}

void UploadBook::Remember(const std::string& part, int64_t size, uint32_t crc32c) {
  const MutexLock lock(mutex_);
  if (sums_.size() >= kMaxSums) {
    sums_.erase(sums_.begin());
  }
  sums_[part] = {size, crc32c};
}

std::optional<uint32_t> UploadBook::Recall(const std::string& part, int64_t size) {
  const MutexLock lock(mutex_);
  const auto found = sums_.find(part);
  if (found == sums_.end()) {
    return std::nullopt;
  }
  const PartSum sum = found->second;
  sums_.erase(found);
  return sum.size == size ? std::optional<uint32_t>(sum.crc32c) : std::nullopt;
}

}  // namespace ravel::store_server
