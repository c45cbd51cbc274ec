#include "coordinator/api/request_checks_service.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/field_error.h"
#include "common/plain_text.h"
#include "coordinator/api/access_gate_service.h"
#include "coordinator/api/error_detail_proto.h"

namespace ravel::coordinator {
namespace {

constexpr size_t kMaxRequestId = 128;

void AddDetail(grpc::CallbackServerContext* context, const v1::ErrorDetail& detail) {
  context->AddTrailingMetadata(kErrorDetailKey, detail.SerializeAsString());
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) {
    return grpc::Status::OK;
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      CutMessage(EscapeControlText(std::string(status.message()))));
}

JobKey KeyOf(const std::string& namespace_name, const std::string& name) {
  return {namespace_name.empty() ? "default" : namespace_name, name};
}

absl::Status CheckRequestId(const std::string& id) {
  if (id.empty() || id.size() > kMaxRequestId || HasControlText(id)) {
    return absl::InvalidArgumentError("request_id: expected a UUID");
  }
  return absl::OkStatus();
}

absl::Status CheckCount(const char* field, int64_t asked, int64_t most) {
  return asked >= 0 && asked <= most ? absl::OkStatus()
                                     : absl::InvalidArgumentError(absl::StrCat(
                                           field, ": expected 0 to ", most, ", got ", asked));
}

absl::Status ViolationStatus(grpc::CallbackServerContext* context,
                             const std::string& job,
                             const std::vector<JobViolation>& violations) {
  AddDetail(context, MakeErrorDetail(job, violations));
  return absl::InvalidArgumentError(ViolationText(violations));
}

void AddFieldDetail(grpc::CallbackServerContext* context,
                    const std::string& job,
                    const absl::Status& status) {
  std::vector<JobViolation> violations;
  for (const FieldError& error : FieldErrorsOf(status)) {
    violations.push_back({absl::StrCat("spec.", error.path), 0, 0, error.expected, error.got});
  }
  if (violations.empty()) {
    JobViolation violation;
    violation.got = std::string(status.message());
    const size_t field = violation.got.find("spec.");
    if (field != std::string::npos) {
      const size_t end = violation.got.find_first_of(": ", field);
      violation.path = violation.got.substr(field, end - field);
    }
    if (field == 0) {  // "FIELD: what is wrong"
      violation.got.erase(0, std::min(violation.path.size() + 2, violation.got.size()));
    }
    violations.push_back(std::move(violation));
  }
  AddDetail(context, MakeErrorDetail(job, violations));
}

absl::Status CheckCaller(const AccessRegistry* access,
                         const grpc::CallbackServerContext& context,
                         const std::string& namespace_name) {
  if (access == nullptr) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const Identity caller, CallerOf(*access, context));
  return CheckNamespace(caller, namespace_name);
}

}  // namespace ravel::coordinator
