#pragma once

// The reasons of a refusal, cut to fit the metadata of an answer: gRPC drops an answer whose
// metadata is above 8 KiB, and with it the reason.

#include <string>
#include <vector>

#include "coordinator/api/job_file_proto.h"
#include "proto/jobs.pb.h"

namespace ravel::coordinator {

inline constexpr const char* kErrorDetailKey = "ravel-error-detail-bin";
inline constexpr size_t kMaxDetailBytes = 4096;   // of the serialized detail
inline constexpr size_t kMaxMessageBytes = 1536;  // of the status message

// As many violations as have room, each of its texts cut where it is long; `more` counts the rest.
v1::ErrorDetail MakeErrorDetail(const std::string& job,
                                const std::vector<JobViolation>& violations);

// "a: expected x, got y; b: ...", cut at an end of a violation, with "; and N more".
std::string ViolationText(const std::vector<JobViolation>& violations);

// At most so many bytes as metadata has them (characters beyond ASCII take three times their bytes
// there), cut at a character's end, with "..." where something is missing.
std::string CutMessage(std::string text, size_t max_bytes = kMaxMessageBytes);

}  // namespace ravel::coordinator
