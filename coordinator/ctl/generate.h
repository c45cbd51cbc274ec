#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace ravel::ctl {

struct GenerateRequest {
  std::string checkpoint;  // a step directory
  std::vector<int32_t> tokens;
  int64_t max_new_tokens = 100;
  double temperature = 0.8;
  int64_t top_k = 40;
  uint64_t seed = 0;
  int32_t stop_token = -1;  // ends the text; -1: none
};

// Runs `TRAINER --generate --checkpoint DIR`, writes one JSON line {"tokens", "maxNewTokens",
// "temperature", "topK", "seed", "stopToken"} to its stdin and reads {"tokens": [...]} (the new
// ones) from its stdout; its stderr is ours. Errors carry its exit code.
absl::StatusOr<std::vector<int32_t>> GenerateTokens(const std::string& trainer,
                                                    const GenerateRequest& request);

// The path of another program of this installation: beside the running binary.
absl::StatusOr<std::string> SiblingBinary(const std::string& name);

}  // namespace ravel::ctl
