#pragma once

// The daemon's HTTP server: /livez, /readyz and /metrics.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/http/http_server.h"
#include "common/http/page_access.h"
#include "common/latency_histogram.h"
#include "common/status.h"

namespace ravel::daemon {

struct TrainerMetrics {
  std::string job_uid;
  int64_t rank = 0;
  std::string state;
  std::string phase;
  int64_t step = 0;
  double phase_age_seconds = 0;
};

// Numbers of one moment.
struct DaemonMetrics {
  std::string node_id;
  std::string version;
  bool registered = false;  // a coordinator has welcomed it, and the stream is there
  bool stopping = false;
  std::map<std::string, int64_t> devices;  // by kind
  std::vector<TrainerMetrics> trainers;
  std::map<std::string, int64_t> exits;  // of trainers, by reason
  int64_t dropped = 0;
  int64_t welcomes = 0;
  LatencyHistogram::Look beat_latency;
};

struct DaemonPagesParts {
  // Runs work on the event loop, and `measure` there.
  std::function<void(std::function<void()>)> post;
  std::function<DaemonMetrics()> measure;
};

// /livez: 200 when the event loop takes its turn in time: it says nothing of coordinator or
// trainers. /readyz: 200 when the node is registered and does not stop; else 503 with the reason.
absl::StatusOr<std::unique_ptr<http::Server>> ServeDaemonPages(const http::PageFlags& flags,
                                                               DaemonPagesParts parts);
std::string DaemonMetricsPage(const DaemonMetrics& metrics);

}  // namespace ravel::daemon
