#pragma once

// The parts of a coordinator that speaks TLS: its registry, and the calls that are alive.

#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "common/status.h"
#include "coordinator/access/access_registry.h"
#include "coordinator/access/call_budget.h"
#include "coordinator/access/live_calls.h"

namespace ravel::coordinator {

struct Security {
  std::unique_ptr<AccessRegistry> registry;
  LiveCalls live;
  CallBudget calls{SystemClock::Get(), {}};
};

// Opens the authority of a state directory; certificates of nodes are good for `node_ms`.
// FailedPrecondition where there is none.
absl::StatusOr<std::unique_ptr<Security>> OpenSecurity(const std::string& state_dir,
                                                       int64_t node_ms);

// Ends calls whose certificate has expired, and renews the coordinator's own.
void WatchCertificates(Security& security);

// Ends of the coordinator's and the authority's certificates as they lie on disk, in ms since 1970;
// 0: not readable. Reads two small files.
struct CertificateEnds {
  int64_t server_ms = 0;
  int64_t authority_ms = 0;
};
CertificateEnds ReadCertificateEnds(const Security& security);

}  // namespace ravel::coordinator
