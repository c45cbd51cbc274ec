#include "worker/store/upload_book.h"

#include <limits>

#include <absl/strings/str_cat.h>

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
