#pragma once

// Checks every request before any work is done for it, and turns refusals into gRPC statuses.

#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "common/status.h"
#include "coordinator/api/job_file_proto.h"
#include "coordinator/api/job_limits_proto.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {

class AccessRegistry;

inline constexpr int64_t kMaxNameBytes = 253;

// The same code; the message without control characters and short enough for metadata.
grpc::Status ToGrpc(const absl::Status& status);

// An empty namespace is `default`.
JobKey KeyOf(const std::string& namespace_name, const std::string& name);

absl::Status CheckRequestId(const std::string& id);

// InvalidArgument "FIELD: expected 0 to MOST, got N": a number that is cut silently misleads.
absl::Status CheckCount(const char* field, int64_t asked, int64_t most);

// Checks the job's name in a request, before the name is repeated anywhere.
template <typename Request>
absl::Status CheckName(const Request& request) {
  RETURN_IF_ERROR(CheckPlainText("namespace", request.namespace_(), kMaxNameBytes));
  return CheckPlainText("name", request.name(), kMaxNameBytes);
}

// Checks a request that changes something of a job: its id, the job's name, the reason if it has
// one.
template <typename Request>
absl::Status CheckChange(const Request& request) {
  RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  RETURN_IF_ERROR(CheckName(request));
  if constexpr (requires { request.reason(); }) {
    return CheckPlainText("reason", request.reason(), kMaxReasonBytes);
  }
  return absl::OkStatus();
}

// InvalidArgument that tells the violations, which also go into the call's trailing metadata.
absl::Status ViolationStatus(grpc::CallbackServerContext* context,
                             const std::string& job,
                             const std::vector<JobViolation>& violations);

// Puts the field at fault into the call's trailing metadata. `status` is a refusal of the planner
// or of a store, whose message begins with that field.
void AddFieldDetail(grpc::CallbackServerContext* context,
                    const std::string& job,
                    const absl::Status& status);

// PermissionDenied unless the caller may change jobs of that namespace. A plaintext coordinator,
// which has no registry, knows one user who may do everything.
absl::Status CheckCaller(const AccessRegistry* access,
                         const grpc::CallbackServerContext& context,
                         const std::string& namespace_name);

}  // namespace ravel::coordinator
