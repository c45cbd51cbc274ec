#pragma once

// The coordinator's tokens for nodes that write to ravel-store (common/job_token.h). Their key lies
// in the state folder, so that a restarted coordinator's are those of before.

#include <cstdint>
#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::coordinator {

// Immutable.
class StoreTokens {
 public:
  // From STATE/store-tokens.key, which is made if it is missing (mode 0600). DataLoss names a file
  // that holds no key.
  static absl::StatusOr<StoreTokens> Open(const std::string& state_dir);

  const std::string& public_key() const { return public_key_; }
  // For a node of the job's epoch. `root`: URL of the job's folder; empty answer where that is in
  // no ravel-store.
  std::string For(std::string_view root,
                  std::string_view job_uid,
                  int64_t epoch,
                  const std::string& node) const;

 private:
  explicit StoreTokens(std::string private_key);
  std::string private_key_;
  std::string public_key_;
};

}  // namespace ravel::coordinator
