#pragma once

// The gate before every call of a coordinator that speaks TLS: who calls, may they, and what came
// of it.

#include <memory>

#include <grpcpp/grpcpp.h>

#include "common/status.h"
#include "coordinator/access/access_registry.h"
#include "coordinator/access/call_budget.h"
#include "coordinator/access/live_calls.h"

namespace ravel::coordinator {

// The identity behind a call's connection; Unauthenticated says why there is none.
absl::StatusOr<Identity> CallerOf(const AccessRegistry& registry,
                                  const grpc::ServerContextBase& context);

// TLS 1.2 or newer with the certificate of STATE/tls, read again when its file changes. A client's
// certificate is asked for and must be the authority's when one is shown. Before a call's message
// is read, its method and its caller are judged: every call but Enrol and the health check needs an
// identity, its role, room beside the calls under way in `live`, and a call left of its budget.
// Refusals are audited, but for those of room and budget: whoever calls too often would fill the
// log.
std::shared_ptr<grpc::ServerCredentials> GateCredentials(AccessRegistry* registry,
                                                         CallBudget* budget,
                                                         const LiveCalls* live);

// Audits calls that change something, with their result, and lists all calls that are under way in
// `live`, so that a revocation can end them.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CallWatcher(
    AccessRegistry* registry, LiveCalls* live);

}  // namespace ravel::coordinator
