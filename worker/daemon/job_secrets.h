#pragma once

// Secrets of jobs: files on this node, NAMESPACE/SECRET/KEY beneath --secrets-root. A text is read
// when trainers start and goes into their environment alone. Kubernetes mounts a Secret so, with
// links within its folder.

#include <string>

#include "common/status.h"

namespace ravel::daemon {

// FailedPrecondition unless `root` is an absolute path of a folder that other users cannot read or
// change.
absl::Status CheckSecretsRoot(const std::string& root);

// The text of SECRET/KEY for a job of that namespace, without the line break at its end. A secret
// of another namespace, one that links lead away from, one that others may read or write, an empty
// or a too long one are refused; no error holds a part of the text.
absl::StatusOr<std::string> ReadSecret(const std::string& root,
                                       const std::string& namespace_name,
                                       const std::string& reference);

}  // namespace ravel::daemon
