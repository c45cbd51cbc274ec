#pragma once

// The coordinator's tokens for nodes that write to ravel-store (common/job_token.h). Their key lies
// in the state folder, so that a restarted coordinator's are those of before.

#include <string>

#include "common/job_token.h"
#include "common/status.h"

namespace ravel::coordinator {

// Immutable.
class StoreTokens {
 public:
  // From STATE/store-tokens.key, which is made if it is missing (mode 0600). DataLoss names a file
  // that holds no key.
  static absl::StatusOr<StoreTokens> Open(const std::string& state_dir);

  const std::string& public_key() const { return public_key_; }
  // The text that a node shows. InvalidArgument for a node id that has spaces.
  absl::StatusOr<std::string> Sign(const JobToken& token) const {
    return FormatJobToken(token, private_key_);
  }

 private:
  explicit StoreTokens(std::string private_key);
  std::string private_key_;
  std::string public_key_;
};

}  // namespace ravel::coordinator
