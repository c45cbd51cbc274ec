#pragma once

// Explains an answer of S3 that is no success: the setting to change, and what to do. Pure.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/store_refusal.h"

namespace ravel::store {

// Settings of the requests to a bucket, for messages. No keys.
struct S3Setup {
  std::string url;       // s3://BUCKET
  std::string endpoint;  // https://HOST
  std::string region;
  std::string keys_file;  // that the keys are of; empty: of the environment
  bool job_keys = false;  // the environment's are those that the job brought along
  int64_t now_ms = 0;     // this host's clock
};

struct S3Answer {
  long code = 0;
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;
};

// Keys that are refused: PermissionDenied. A bucket that is missing, another region, a clock that
// is wrong: FailedPrecondition. All of these are marked (store_refusal.h). Else by the code: 404
// NotFound, 401 and 403 PermissionDenied, 412 AlreadyExists, FailedPrecondition. `what`: the
// request, with the object's URL.
absl::Status S3Refusal(std::string_view what, const S3Answer& answer, const S3Setup& setup);

}  // namespace ravel::store
