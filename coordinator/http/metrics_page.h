#pragma once

// The page /metrics of the coordinator: numbers in, the text format of Prometheus out. Pure. Each
// family is named here once; dashboards and alert rules in deploy/monitoring use these names.

#include <cstdint>
#include <string>
#include <vector>

#include "common/http/http_server.h"
#include "common/latency_histogram.h"
#include "coordinator/jobs/controller_metrics.h"
#include "coordinator/jobs/rpc_meter.h"
#include "coordinator/jobs/strand_lag.h"

namespace ravel::coordinator {

// Numbers of the process that the controller does not have.
struct ProcessMetrics {
  std::string version;
  bool insecure = false;
  double start_seconds = 0;  // of the process, since 1970
  LagSummary lag;            // of the last minute
  int64_t turns = 0;
  int64_t lag_alarms = 0;
  LatencyHistogram::Look persist;
  int64_t failed_writes = 0;
  bool store_writable = true;
  std::vector<RpcLook> rpcs;
  int64_t calls_over_rate = 0;
  // End of certificates, in seconds since 1970; 0: there is none, or it cannot be read.
  int64_t server_certificate_end = 0;
  int64_t authority_end = 0;
  http::ServerCounts http;
};

std::string MetricsPage(const ControllerMetrics& metrics, const ProcessMetrics& process);

}  // namespace ravel::coordinator
