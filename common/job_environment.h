#pragma once

// The names of variables that a job may set for its trainers, and references to secrets. The job
// file's rules and the nodes hold names against the same list: nodes trust no coordinator here.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace ravel {

inline constexpr int kMaxJobVariables = 64;
inline constexpr int64_t kMaxVariableNameBytes = 128;
inline constexpr int64_t kMaxVariableBytes = 4096;  // of a text in the job file
inline constexpr int64_t kMaxSecretBytes = 16 << 10;
// Names that nodes allow if their operator says nothing else: patterns with `*` at the end.
inline constexpr char kDefaultJobEnvironment[] =
    "NCCL_*,CUDA_*,GLOO_*,OMP_*,UCX_*,RAVEL_S3_ACCESS_KEY_ID,RAVEL_S3_SECRET_ACCESS_KEY,"
    "RAVEL_S3_SESSION_TOKEN";

// Says what is expected instead of a name that no job may set whatever an operator allows; "" for
// others. Those load libraries, name files, choose devices, addresses or threads, or steer Ravel.
std::string ExpectedName(std::string_view name);
// The same of SECRET/KEY.
std::string ExpectedSecret(std::string_view reference);
// False for names whose texts a library prints (NCCL_DEBUG, OMP_DISPLAY_ENV).
bool MayHoldSecret(std::string_view name);
// True for names that say of themselves that their text is secret: no job file holds it.
bool SoundsSecret(std::string_view name);

// NAME or BEGINNING*, separated by commas; InvalidArgument names the pattern that is neither.
absl::StatusOr<std::vector<std::string>> ParseNamePatterns(std::string_view text);
bool MatchesAny(std::string_view name, std::span<const std::string> patterns);

}  // namespace ravel
