#pragma once

// Messages of the API as JSON values for people and programs: names as in proto JSON, every field
// present, and numbers as numbers (proto JSON writes 64-bit ones as text; ours stay text only
// beyond 2^53, where many readers would lose digits).

#include <google/protobuf/message.h>

#include "common/json.h"
#include "proto/jobs.pb.h"

namespace ravel::ctl {

json::Value ToDocument(const google::protobuf::Message& message);

// A job with `apiVersion` and `kind` first, so that what is printed is a job file again:
// ParseJobFile passes over what only a coordinator knows.
json::Value JobDocument(const v1::Job& job);

}  // namespace ravel::ctl
