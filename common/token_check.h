#pragma once

// Token files checked without mapping them: they are read in blocks, so that a file which shrinks
// meanwhile is an error and no signal. TokenFile::Open tells the same faults in the same words.

#include <cstdint>
#include <functional>
#include <string>

#include "common/path_facts.h"
#include "common/status.h"
#include "common/token_file.h"

namespace ravel {

struct TokenCheckOptions {
  int64_t scanned_tokens = 0;                 // ids to take the largest of, from the beginning
  bool sample = false;                        // fill sample_digest: reads at kSamplePlaces places
  std::function<bool()> abandoned = nullptr;  // true: the answer is not wanted any more; Cancelled
};

// Checks all that TokenFile::Open checks, in memory of a few blocks whatever the files hold. A FIFO
// is refused and not waited for.
absl::StatusOr<TokenFileFacts> CheckTokenFile(const std::string& path,
                                              TokenFormat format,
                                              const TokenCheckOptions& options);

// The faults that follow from names and sizes.
absl::Status MissingIndex(const std::string& prefix);
absl::Status CheckFlatBytes(const std::string& path, int64_t bytes, int64_t id_bytes);
absl::Status CheckPairBytes(const std::string& prefix, int64_t bytes, int64_t expected);

}  // namespace ravel
