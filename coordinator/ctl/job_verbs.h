#pragma once

// submit, validate: verbs that take a job file.

#include <functional>
#include <string>

#include "coordinator/ctl/common_options.h"
#include "coordinator/ctl/local_paths.h"

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

// Reads, parses and canonicalises a job file; prints every violation as FILE:LINE:COLUMN and
// warnings. InvalidArgument when there are violations.
absl::StatusOr<CanonicalJob> LoadJobFile(const std::string& file, PathScope paths);
// The same of the job after `change`, as if the file said so.
absl::StatusOr<CanonicalJob> LoadJobFile(const std::string& file,
                                         PathScope paths,
                                         const std::function<void(v1::TrainingJob&)>& change);
// True if the file by itself has no violations; says nothing.
bool IsValidJobFile(const std::string& file, PathScope paths);

}  // namespace ravel::ctl
