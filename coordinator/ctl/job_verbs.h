#pragma once

// submit, validate, plan: verbs that take a job file.

#include "coordinator/ctl/common_options.h"

namespace ravel::ctl {

struct SubmitOptions {
  std::string file = {};     // "-": stdin
  std::string dry_run = {};  // "", "client" or "server"
  std::string request_id = {};
  bool wait = false;
  bool follow = false;
};
int RunSubmit(const CommonOptions& common, const SubmitOptions& options);

struct ValidateOptions {
  std::string file = {};
  bool check_paths = true;
};
int RunValidate(const CommonOptions& common, const ValidateOptions& options);

struct PlanOptions {
  std::string file = {};
  std::string devices = {};  // "4", "4xcpu"; "": the job's own count
};
int RunPlan(const CommonOptions& common, const PlanOptions& options);

// Reads, parses and canonicalises a job file; prints every violation as FILE:LINE:COLUMN and
// warnings. InvalidArgument when there are violations.
absl::StatusOr<CanonicalJob> LoadJobFile(const std::string& file,
                                         const CanonicalizeOptions& options);

}  // namespace ravel::ctl
