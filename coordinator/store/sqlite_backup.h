#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/status.h"

namespace ravel::coordinator {

// A whole copy of DIRECTORY/NAME.db while work goes on: DIRECTORY/backup/NAME-<now_ms>.db, mode
// 0600. The newest `keep` of that name stay. Thread-safe for different names.
absl::Status BackUpDatabase(const std::string& directory,
                            const std::string& name,
                            int64_t now_ms,
                            size_t keep);

}  // namespace ravel::coordinator
