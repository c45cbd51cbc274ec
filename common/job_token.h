#pragma once

// Tokens that the coordinator gives to the nodes of a job's epoch, and ravel-store asks for: a node
// writes files of saves of that job alone. Signed (common/crypto.h), so that stores, which know the
// public key, can make none. A token has no date of its end: it is worth nothing once the store has
// fenced its epoch off.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel {

// Name of the gRPC metadata that carries a token.
inline constexpr std::string_view kJobTokenMetadata = "ravel-job-token";

struct JobToken {
  std::string folder;     // hash of the job's folder in a store: JobFolderHash
  uint32_t job_tag = 0;   // ckpt::JobTag of the job, in the names of its saves
  int64_t epoch = 0;      // and those before
  std::string node = {};  // its id
  bool operator==(const JobToken&) const = default;
};

// SHA-256 in hexadecimal of a path in a store, "team/job".
std::string JobFolderHash(std::string_view path);

// One line of ASCII, about 250 bytes and the node's id. CHECKs the key; InvalidArgument for a node
// id that is empty or has spaces.
absl::StatusOr<std::string> FormatJobToken(const JobToken& token, std::string_view private_key);
// PermissionDenied: not signed by the owner of one of the keys, or of another form. The message
// never repeats the text.
absl::StatusOr<JobToken> CheckJobToken(std::string_view text,
                                       const std::vector<std::string>& public_keys);

}  // namespace ravel
