#pragma once

// list, get, describe, events, logs, metrics, nodes, top, version: verbs that only look.

#include <cstdint>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct ListOptions {
  bool all_namespaces = false;
  std::string selector = {};  // key=value,...
  std::string state = {};     // of v1::JobState, any case; "": all
};
int RunList(const CommonOptions& common, const ListOptions& options);
int RunGet(const CommonOptions& common, const std::string& job);
int RunDescribe(const CommonOptions& common, const std::string& job);

struct EventsOptions {
  std::string job = {};
  bool follow = false;
  std::string since = {};  // a duration
};
int RunEvents(const CommonOptions& common, const EventsOptions& options);

struct LogsOptions {
  std::string job = {};
  int64_t rank = -1;
  int64_t attempt = 0;
  std::string node = {};
  std::string grep = {};  // only lines with this text
  bool follow = false;
  int64_t tail = 0;
  std::string since = {};  // a duration
};
int RunLogs(const CommonOptions& common, const LogsOptions& options);

struct MetricsOptions {
  std::string job = {};
  MetricsFilter filter = {};
  std::string tensorboard = {};  // a folder: event files instead of text
};
int RunMetrics(const CommonOptions& common, const MetricsOptions& options);

int RunNodesList(const CommonOptions& common);
int RunTop(const CommonOptions& common);
// `client_only`: no coordinator is asked.
int RunVersion(const CommonOptions& common, bool client_only);

}  // namespace ravel::ctl
