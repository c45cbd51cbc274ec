#include "coordinator/saves/found_saves.h"

#include <algorithm>
#include <string_view>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "common/store/committed_step.h"

namespace ravel::coordinator {

namespace {

std::string SaveIdText(const ckpt::SaveId& id) {
  return Hex(std::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}

}  // namespace

CommittedSave DescribeSave(const store::ObjectStore& files,
                           const CommittedStepInfo& info,
                           std::span<const ckpt::MeshAxisRecord> mesh) {
  return {info.step,
          files.Locate(info.directory),
          info.commit.bytes,
          info.commit.files,
          SaveIdText(info.commit.save_id),
          MeshText(mesh)};
}

std::vector<FoundSave> FindSaves(const store::ObjectStore& files,
                                 const std::string& job_uid,
                                 const StepListing& listing,
                                 const std::set<std::string>& known) {
  std::vector<FoundSave> found;
  for (const CommittedStepInfo& info : listing.steps) {
    const ckpt::CommitRecord& commit = info.commit;
    if (commit.job != job_uid || known.contains(SaveIdText(commit.save_id))) {
      continue;
    }
    const absl::StatusOr<store::CommittedStep> step =
        store::CommittedStep::Open(&files, info.directory);
    if (!step.ok()) {
      log::Warning(absl::StrCat(
          files.Locate(info.directory), ": is not listed: ", std::string(step.status().message())));
      continue;
    }
    const ckpt::Manifest& manifest = step->manifest();
    found.push_back({.saved = {.save = DescribeSave(files, info, manifest.mesh),
                               .epoch = commit.epoch,
                               .attempt = commit.attempt,
                               .world_size = manifest.ranks()},
                     .created_ms = manifest.created_ns / 1'000'000,
                     .bad = info.bad});
  }
  std::sort(found.begin(), found.end(), [](const FoundSave& a, const FoundSave& b) {
    return a.saved.save.step < b.saved.save.step;
  });
  return found;
}

}  // namespace ravel::coordinator
