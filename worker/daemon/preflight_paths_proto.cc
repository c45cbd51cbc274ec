#include "worker/daemon/preflight_paths_proto.h"

#include "proto/plan.pb.h"

namespace ravel::daemon {

PreflightPaths PathsOf(const v1::StartTrainer& start) {
  PreflightPaths paths{.checkpoint_root = start.checkpoint_root()};
  v1::PlannedJob job;
  if (!job.ParseFromString(start.job())) {
    return paths;
  }
  for (const auto* sources : {&job.train(), &job.validation()}) {
    for (const v1::PlannedSource& source : *sources) {
      paths.token_files.push_back(source.path());
    }
  }
  paths.format = static_cast<TokenFormat>(job.token_format());
  paths.tokenizer = job.tokenizer();
  if (job.offload_fraction() > 0 || job.offload_automatic()) {
    paths.offload_folder = job.offload_path();
  }
  if (start.restore_path().empty()) {
    paths.model_directory = job.model_from();  // else its weights are not read any more
  }
  return paths;
}

}  // namespace ravel::daemon
