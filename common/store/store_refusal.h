#pragma once

// Whose fault it is that a store refuses a request, beside the status that says what happened. It
// stays with the status when context is added.

#include "common/status.h"

namespace ravel::store {

// Set to 1 by daemons in the environment of trainers whose job brought keys along.
inline constexpr char kKeysOfJobVariable[] = "RAVEL_S3_KEYS_OF_JOB";

enum class RefusalCause {
  kNone,
  kSettings,  // of this process or host: bucket, region, clock
  kKeys,      // of this process
  kJobKeys,   // that the job brought along
};

absl::Status MarkRefused(absl::Status status, RefusalCause cause);
// kNone for a status that is not marked.
RefusalCause RefusalOf(const absl::Status& status);

}  // namespace ravel::store
