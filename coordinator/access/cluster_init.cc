#include "coordinator/access/cluster_init.h"

#include <absl/strings/str_cat.h>

#include "coordinator/access/access_registry.h"
#include "coordinator/access/context_file.h"

namespace ravel::coordinator {

absl::StatusOr<InitResult> InitCluster(const InitOrder& order, const Clock& clock) {
  RETURN_IF_ERROR(CheckIdentityName("--admin", order.admin));
  ASSIGN_OR_RETURN(
      AuthorityFiles files,
      MakeAuthorityFiles(order.state_dir, order.names, order.authority, clock.WallMs()));
  InitResult result{
      .context_path = absl::StrCat(order.state_dir, "/", order.admin, ".context.json"),
      .coordinator = {},
      .fingerprint = files.fingerprint};
  const std::string& host = order.names.front();
  const bool six = host.find(':') != std::string::npos;
  result.coordinator = absl::StrCat(six ? "[" : "", host, six ? "]:" : ":", order.port);
  ASSIGN_OR_RETURN(const std::unique_ptr<AccessRegistry> registry,
                   AccessRegistry::Open(order.state_dir, std::move(files), &clock, {}));
  ContextFile context{.coordinator = result.coordinator,
                      .authority = registry->files().trusted,
                      .certificate = {},
                      .key = MakePrivateKey()};
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(context.key));
  ASSIGN_OR_RETURN(
      const Enrolment enrolment,
      registry->EnrolHere({.kind = IdentityKind::kUser, .name = order.admin, .role = Role::kAdmin},
                          request));
  context.certificate = enrolment.certificate;
  RETURN_IF_ERROR(WriteContext(result.context_path, context));
  return result;
}

}  // namespace ravel::coordinator
