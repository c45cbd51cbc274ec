#pragma once

// A context of ravelctl: where a coordinator is, whom to trust there, and who one is, as one JSON
// file of mode 0600.

#include <string>

#include "common/status.h"

namespace ravel::coordinator {

struct ContextFile {
  std::string coordinator;  // HOST:PORT
  std::string authority;    // PEM
  std::string certificate;
  std::string key;
};

absl::Status WriteContext(const std::string& path, const ContextFile& context);
// InvalidArgument names the file and the field. A file that others may read is FailedPrecondition.
absl::StatusOr<ContextFile> ReadContext(const std::string& path);

}  // namespace ravel::coordinator
