#include "worker/daemon/preflight_paths_proto.h"

#include "proto/plan.pb.h"

namespace ravel::daemon {

namespace {

// The trainer's own list is worker/trainer/job_paths.cc.
std::vector<RootedPath> NamedPaths(const v1::StartTrainer& start, const v1::PlannedJob& job) {
  std::vector<RootedPath> named = {
      {"checkpoint.store", start.checkpoint_root(), PathUse::kWrite},
      {"checkpoint.resumeFrom", start.restore_path(), PathUse::kRead, PathShape::kFolderOfFiles},
      {"model.from", job.model_from(), PathUse::kRead, PathShape::kFolderOfFiles},
      {"data.tokenizer", job.tokenizer(), PathUse::kRead},
      {"training.optimizer.offload.path", job.offload_path(), PathUse::kWrite},
      {"observability.trace.directory", job.trace_directory(), PathUse::kWrite}};
  for (const v1::PlannedSource& source : job.train()) {
    named.push_back({"data.train", source.path(), PathUse::kRead, PathShape::kTokens});
  }
  for (const v1::PlannedSource& source : job.validation()) {
    named.push_back({"data.validation", source.path(), PathUse::kRead, PathShape::kTokens});
  }
  return named;
}

}  // namespace

PreflightPaths PathsOf(const v1::StartTrainer& start) {
  PreflightPaths paths{.checkpoint_root = start.checkpoint_root()};
  v1::PlannedJob job;
  const bool parsed = job.ParseFromString(start.job());
  paths.named = NamedPaths(start, job);
  if (!parsed) {
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
