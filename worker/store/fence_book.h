#pragma once

// Epochs of a job that may still write saves into its folder. Durable: one small file per fence.

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"

namespace ravel::store_server {

// Thread-safe.
class FenceBook {
 public:
  // Reads what the folder holds, which is made when it is missing. DataLoss names a file that does
  // not parse.
  static absl::StatusOr<std::unique_ptr<FenceBook>> Open(const std::string& folder);

  // A fence only rises; durable when it returns.
  absl::Status Raise(std::string_view job_folder, uint32_t job_tag, int64_t min_epoch);
  // 0 without a fence.
  int64_t MinEpoch(std::string_view job_folder, uint32_t job_tag) const;

 private:
  using Key = std::pair<std::string, uint32_t>;
  explicit FenceBook(std::string folder) : folder_(std::move(folder)) {}

  const std::string folder_;
  mutable Mutex mutex_;
  std::map<Key, int64_t> epochs_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::store_server
