#pragma once

#include <string>

#include "coordinator/ctl/endpoint.h"
#include "coordinator/ctl/jobs_client.h"
#include "coordinator/ctl/output.h"

namespace ravel::ctl {

inline constexpr char kDefaultCoordinator[] = "127.0.0.1:7070";

// Options that every verb has.
struct CommonOptions {
  Endpoint coordinator = kDefaultCoordinator;
  std::string namespace_name = "default";
  bool namespace_given = false;  // by --namespace
  Format format = Format::kTable;
  bool wide = false;  // tables of lists with all their columns
  bool no_headers = false;
};

inline JobName NameOf(const CommonOptions& common, const std::string& job) {
  const std::size_t slash = job.find('/');
  return slash == std::string::npos ? JobName{common.namespace_name, job}
                                    : JobName{job.substr(0, slash), job.substr(slash + 1)};
}

}  // namespace ravel::ctl
