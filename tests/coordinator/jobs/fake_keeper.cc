#include "tests/coordinator/jobs/fake_keeper.h"

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

namespace ravel::coordinator {

absl::StatusOr<CommittedSave> FakeKeeper::Commit(const CheckpointJob& job,
                                                 const SaveRequest& request) {
  RETURN_IF_ERROR(commit_failure);
  if (gone.contains(request.step)) {
    return absl::NotFoundError("list model: No such file or directory");
  }
  EXPECT_EQ(static_cast<int64_t>(request.seals.size()), request.world->plan.ranks);
  if (!steps[job.spec.name].emplace(request.step, request.epoch).second) {
    return absl::AlreadyExistsError(absl::StrCat("step ", request.step, " is committed"));
  }
  return CommittedSave{
      request.step, absl::StrCat(Root(job.spec), "/step-", request.step), 100, 3, "id"};
}

absl::StatusOr<std::optional<CommittedSave>> FakeKeeper::Settle(const CheckpointJob& job,
                                                                const SaveRequest& request) {
  ++settled;
  steps[job.spec.name].emplace(request.step, request.epoch);
  return std::optional<CommittedSave>(CommittedSave{
      request.step, absl::StrCat(Root(job.spec), "/step-", request.step), 100, 3, "id"});
}

absl::StatusOr<RestorePoint> FakeKeeper::PrepareRestore(const CheckpointJob& job,
                                                        const RestoreQuery& query) {
  ++prepared;
  RETURN_IF_ERROR(restore_failure);
  std::map<int64_t, int64_t>& own = steps[job.spec.name];
  RestorePoint point;
  if (query.rollback_step >= 0) {
    rolled_back.push_back(query.rollback_step);
    std::erase_if(own, [&](const auto& step) { return step.first > query.rollback_step; });
    sealed.erase(job.spec.name);
  }
  ASSIGN_OR_RETURN(point.settled, Release(job, query));
  if (!query.has_commit && job.spec.checkpoint.resume_from == "none") {
    own.clear();  // set aside
    return point;
  }
  std::string damages;
  for (const auto& [step, epoch] : own) {
    if (bad.contains({job.spec.name, step})) {
      absl::StrAppend(&damages, damages.empty() ? "" : "; ", "step ", step, ": checksum");
      continue;
    }
    point.step = step;
    point.path = absl::StrCat(Root(job.spec), "/step-", step);
  }
  if (point.step < 0 && query.has_commit) {
    return absl::DataLossError(absl::StrCat(Root(job.spec), " holds no good step: ", damages));
  }
  point.fallback_reason = point.step < query.committed_step ? damages : "";
  point.numerics_change = point.step < 0 ? "" : numerics_change;
  if (point.step > query.committed_step) {
    point.found = Unknown(query.known_saves);
  }
  return point;
}

absl::StatusOr<std::string> FakeKeeper::CheckRollback(const CheckpointJob& job, int64_t step) {
  if (!steps[job.spec.name].contains(step) || bad.contains({job.spec.name, step})) {
    return absl::FailedPreconditionError(absl::StrCat("no good step ", step));
  }
  return absl::StrCat(Root(job.spec), "/step-", step);
}

absl::StatusOr<StepVerdict> FakeKeeper::Condemn(const CheckpointJob& job,
                                                int64_t step,
                                                const std::string& /*reason*/) {
  if (verdict == StepVerdict::kDamaged) {
    bad.insert({job.spec.name, step});
  }
  return verdict;
}

absl::StatusOr<std::vector<int64_t>> FakeKeeper::Retain(const CheckpointJob& job,
                                                        int64_t /*in_use_step*/) {
  ++retained;
  RETURN_IF_ERROR(retain_failure);
  std::vector<int64_t> deleted;
  std::map<int64_t, int64_t>& kept = steps[job.spec.name];
  while (static_cast<int64_t>(kept.size()) > job.spec.checkpoint.keep_last) {
    deleted.push_back(kept.begin()->first);
    kept.erase(kept.begin());
  }
  return deleted;
}

absl::StatusOr<std::optional<SettledSave>> FakeKeeper::Release(const CheckpointJob& job,
                                                               const RestoreQuery& query) {
  ++cleaned;
  RETURN_IF_ERROR(release_failure);
  const std::map<int64_t, int64_t> attempts = std::exchange(sealed[job.spec.name], {});
  if (attempts.empty() || attempts.rbegin()->first <= query.committed_step) {
    return std::optional<SettledSave>();
  }
  const auto [step, epoch] = *attempts.rbegin();
  steps[job.spec.name].emplace(step, epoch);
  return std::optional<SettledSave>(
      SettledSave{{step, absl::StrCat(Root(job.spec), "/step-", step), 100, 3, "id"}, epoch, 1, 1});
}

std::vector<FoundSave> FakeKeeper::Unknown(const std::set<std::string>& known_saves) const {
  std::vector<FoundSave> unknown = found;
  std::erase_if(unknown, [&known_saves](const FoundSave& save) {
    return known_saves.contains(save.saved.save.save_id);
  });
  return unknown;
}

absl::StatusOr<FolderView> FakeKeeper::Look(const CheckpointJob& job,
                                            const std::set<std::string>& known_saves) {
  RETURN_IF_ERROR(restore_failure);
  FolderView view;
  for (const auto& [step, epoch] : steps[job.spec.name]) {
    view.steps.push_back(step);
  }
  view.found = Unknown(known_saves);
  return view;
}

}  // namespace ravel::coordinator
