#include "coordinator/api/request_checks_service.h"

#include "common/plain_text.h"
#include "coordinator/api/access_gate_service.h"
#include "coordinator/api/error_detail_proto.h"

namespace ravel::coordinator {
namespace {

constexpr size_t kMaxRequestId = 128;

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
