#pragma once

// What every call of the Jobs service does with its request and its answer.

#include <string>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/status.h"
#include "coordinator/job_controller.h"

namespace ravel::coordinator {

inline constexpr size_t kMaxRequestId = 128;

inline grpc::Status ToGrpc(const absl::Status& status) {
  return status.ok() ? grpc::Status::OK
                     : grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                                    std::string(status.message()));
}

inline JobKey KeyOf(const std::string& namespace_name, const std::string& name) {
  return {namespace_name.empty() ? "default" : namespace_name, name};
}

inline absl::Status CheckRequestId(const std::string& id) {
  if (id.empty() || id.size() > kMaxRequestId) {
    return absl::InvalidArgumentError("request_id: expected a UUID");
  }
  return absl::OkStatus();
}

}  // namespace ravel::coordinator
