#pragma once

// The coordinator's HTTP server: /livez, /readyz and /metrics.

#include <functional>
#include <memory>
#include <string>

#include "common/http/http_server.h"
#include "common/http/page_access.h"
#include "coordinator/http/metrics_page.h"
#include "coordinator/jobs/executor.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {

// All outlive the server, but for what is called on the strand: once that has stopped, nothing of
// it is touched.
struct HttpPagesParts {
  Executor* strand = nullptr;
  const JobController* controller = nullptr;
  // Thread-safe, both: the database takes changes; the rest of what /metrics shows, but for the
  // server's own counts.
  std::function<bool()> writable;
  std::function<ProcessMetrics()> process;
};

// /livez: 200 when the controller's strand takes its turn in time. /readyz: 200 when it does and
// the store takes changes; else 503 with the reason. The state is recovered before the server
// starts.
absl::StatusOr<std::unique_ptr<http::Server>> ServeHttpPages(const http::PageFlags& flags,
                                                             HttpPagesParts parts);

}  // namespace ravel::coordinator
