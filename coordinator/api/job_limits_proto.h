#pragma once

// Size limits of a submitted job. They are checked first, before anything is copied, hashed or
// repeated in a message.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/api/job_file_proto.h"

namespace ravel {

inline constexpr int64_t kMaxJobBytes = int64_t{1} << 20;  // of the whole message
inline constexpr int64_t kMaxFieldBytes = 4096;            // of one text
// Bytes of a key of labels or annotations. YAML takes 1024 characters, and a quote is two of them.
inline constexpr int64_t kMaxKeyBytes = 500;
inline constexpr int64_t kMaxAnnotationBytes = 64 << 10;  // of all annotations together
inline constexpr int kMaxListEntries = 1024;              // token files, patterns
inline constexpr int64_t kMaxReasonBytes = 1024;          // of why somebody asks for something

// Every text and list that is too long, and every text with control characters; the whole job last.
// Messages name the field and its size, never its content. Empty: within all limits.
std::vector<JobViolation> CheckJobLimits(const v1::TrainingJob& job);

// InvalidArgument naming `field` when a reason, a node or a name is too long or holds control
// characters.
absl::Status CheckPlainText(std::string_view field, std::string_view text, int64_t max_bytes);

}  // namespace ravel
