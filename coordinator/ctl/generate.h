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

struct GeneratedText {
  std::vector<int32_t> tokens;  // the new ones
  std::string ended_by;         // "maxNewTokens", "stopToken" or "positions"
  int64_t positions = 0;        // that prompt and text may have
};

// Runs `TRAINER --generate --checkpoint DIR`, writes one JSON line {"tokens", "maxNewTokens",
// "temperature", "topK", "seed", "stopToken"} to its stdin and reads {"tokens": [...], "endedBy",
// "positions"} from its stdout; its stderr is ours. Errors carry its exit code.
absl::StatusOr<GeneratedText> GenerateTokens(const std::string& trainer,
                                             const GenerateRequest& request);

// One line for people when the model's positions ended the text before its tokens did; else empty.
std::string EarlyEndText(const GenerateRequest& request, const GeneratedText& text);

// The path of another program of this installation: beside the running binary.
absl::StatusOr<std::string> SiblingBinary(const std::string& name);

}  // namespace ravel::ctl
