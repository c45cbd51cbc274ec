#pragma once

// trace merge, gantt, stalls, overlap, memory: verbs about recorded steps, without a coordinator.

#include <cstdint>
#include <string>
#include <vector>

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct TraceOptions {
  std::vector<std::string> inputs;  // files of ranks, or directories of them
  std::string output;               // merged file
  int64_t step = -1;                // -1: the last one
  int width = 100;
  double least_share = 0.01;
};
int RunTraceMerge(const CommonOptions& common, const TraceOptions& options);
int RunTraceGantt(const CommonOptions& common, const TraceOptions& options);
int RunTraceStalls(const CommonOptions& common, const TraceOptions& options);
int RunTraceOverlap(const CommonOptions& common, const TraceOptions& options);
int RunTraceMemory(const CommonOptions& common, const TraceOptions& options);

}  // namespace ravel::ctl
