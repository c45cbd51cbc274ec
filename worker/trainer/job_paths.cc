#include "worker/trainer/job_paths.h"

#include <string>
#include <vector>

#include <absl/strings/str_cat.h>

namespace ravel::trainer {
namespace {

void AddSources(const std::string& field,
                const std::vector<plan::DataSource>& sources,
                std::vector<RootedPath>& named) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    named.push_back({absl::StrCat(field, "[", i, "].path"),
                     sources[i].path,
                     PathUse::kRead,
                     PathShape::kTokens});
  }
}

}  // namespace

absl::Status CheckJobPaths(const Assignment& assignment, const RootFolders& folders) {
  ASSIGN_OR_RETURN(const PathRoots roots, PathRoots::Create(folders));
  const plan::JobSpec& spec = assignment.spec;
  std::vector<RootedPath> named = {
      {"checkpoint.store", assignment.checkpoint_root, PathUse::kWrite},
      {"checkpoint.resumeFrom", assignment.restore_path, PathUse::kRead, PathShape::kFolderOfFiles},
      {"model.from", spec.model_from, PathUse::kRead, PathShape::kFolderOfFiles},
      {"data.tokenizer", spec.data.tokenizer, PathUse::kRead},
      {"training.optimizer.offload.path", spec.optimizer.offload.path, PathUse::kWrite},
      {"observability.trace.directory", spec.trace_directory, PathUse::kWrite}};
  AddSources("data.train", spec.data.train, named);
  AddSources("data.validation", spec.data.validation, named);
  return roots.CheckAll(named);
}

}  // namespace ravel::trainer
