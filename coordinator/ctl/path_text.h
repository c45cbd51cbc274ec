#pragma once

// Paths of this machine as people type them.

#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::ctl {

// InvalidArgument for what looks like a URL: gs://b, S3://b, ravel:/host. It would become a folder
// here, and what was to be stored elsewhere would lie in it. "./gs:/b" is a path, and so is what
// begins with "file://" and an absolute path. The error begins with `field`.
absl::Status CheckIsPath(std::string_view field, std::string_view text);

}  // namespace ravel::ctl
