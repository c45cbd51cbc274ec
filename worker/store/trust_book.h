#pragma once

// The enrolments whose certificates are refused, and the keys of jobs' tokens, as the coordinator
// told last. Durable: a store
// that starts while the coordinator is away refuses what it refused before.

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/mutex.h"
#include "common/status.h"

namespace ravel::store_server {

struct RevokedEnrolment {
  std::string owner;          // "node/n1"
  std::string serial_prefix;  // 16 hexadecimal digits, which begin the serial of each certificate
  int64_t revoked_ms = 0;
};

// Thread-safe.
class TrustBook {
 public:
  // Reads the file, which may be missing. DataLoss names one that does not parse.
  static absl::StatusOr<std::unique_ptr<TrustBook>> Open(const std::string& path);

  // In place of what was known. Holds at once, whether or not it can be written (atomically, mode
  // 0600). InvalidArgument names a malformed field and changes nothing; other errors name the file.
  absl::Status Keep(const std::vector<RevokedEnrolment>& revoked,
                    const std::vector<std::string>& job_keys = {});
  // PermissionDenied for a certificate of a revoked enrolment, by its serial number in hex.
  absl::Status Check(std::string_view serial) const;
  // Keys that verify tokens of jobs, 32 bytes each; none: tokens are not asked for.
  std::vector<std::string> job_keys() const;

  // Notes an answer of the coordinator, changed or not; wall time. 0: none since the start.
  void Heard(int64_t now_ms) { heard_ms_ = now_ms; }
  int64_t heard_ms() const { return heard_ms_; }

 private:
  explicit TrustBook(std::string path) : path_(std::move(path)) {}
  absl::Status Read(const std::string& text);
  using Owners = std::map<std::string, std::string, std::less<>>;  // by prefix

  const std::string path_;
  std::atomic<int64_t> heard_ms_ = 0;
  mutable Mutex mutex_;
  Owners owners_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> job_keys_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::store_server
