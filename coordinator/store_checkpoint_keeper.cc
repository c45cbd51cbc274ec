#include "coordinator/store_checkpoint_keeper.h"

#include <set>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "common/logging.h"
#include "common/plan/save_plan.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "coordinator/retention.h"
#include "coordinator/saves.h"

namespace ravel::coordinator {
namespace {

using store::FileStore;

constexpr const char* kBuild = "ravel";

SaveContext ContextOf(const SaveRequest& request) {
  SaveContext context;
  context.job = request.job_uid;
  context.key = {request.step, request.epoch, request.attempt};
  context.created_ns = request.created_ms * 1'000'000;
  context.build = kBuild;
  context.numerics = "f32";
  context.virtual_ranks = request.world->plan.lanes.lanes;
  context.ranks = request.world->plan.ranks;
  return context;
}

std::string Hex(const ckpt::SaveId& id) {
  std::string text;
  for (const uint8_t byte : id) {
    absl::StrAppend(&text, absl::Hex(byte, absl::kZeroPad2));
  }
  return text;
}

CommittedSave Describe(const FileStore& files, const CommittedStepInfo& info) {
  return {info.step,
          files.Locate(info.directory),
          info.commit.bytes,
          info.commit.files,
          Hex(info.commit.save_id)};
}

}  // namespace

std::string StoreCheckpointKeeper::Root(const plan::JobSpec& spec) const {
  std::string base = std::string(absl::StripPrefix(spec.checkpoint.store, "file://"));
  while (base.size() > 1 && base.back() == '/') {
    base.pop_back();
  }
  // A name holds no dot, so no two jobs of a coordinator share a folder.
  return spec.namespace_name == "default"
             ? absl::StrCat(base, "/", spec.name)
             : absl::StrCat(base, "/", spec.namespace_name, ".", spec.name);
}

absl::Status StoreCheckpointKeeper::Check(const plan::JobSpec& spec) {
  FileStore files(Root(spec));
  RETURN_IF_ERROR(Annotate(files.MakeRoot(), "spec.checkpoint.store"));
  RETURN_IF_ERROR(Annotate(store::RemoveTree(files, "write-probe"), "spec.checkpoint.store"));
  RETURN_IF_ERROR(Annotate(files.MakeDirectory("write-probe"), "spec.checkpoint.store"));
  RETURN_IF_ERROR(Annotate(files.Remove("write-probe"), "spec.checkpoint.store"));
  if (spec.checkpoint.resume_from == "none" && !spec.checkpoint.fresh) {
    ASSIGN_OR_RETURN(const StepListing listing, ListSteps(files));
    if (!listing.steps.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("spec.checkpoint.resumeFrom: none, but ",
                       Root(spec),
                       " holds commits; set fresh: true or another store"));
    }
  } else if (spec.checkpoint.resume_from != "auto") {
    return Annotate(FindRestore(spec, false).status(), "spec.checkpoint.resumeFrom");
  }
  return absl::OkStatus();
}

absl::StatusOr<CommittedSave> StoreCheckpointKeeper::Commit(const plan::JobSpec& spec,
                                                            const SaveRequest& request) {
  ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan(request.world->plan));
  FileStore files(Root(spec));
  ASSIGN_OR_RETURN(const CommittedStepInfo info,
                   CommitSave(files, save_plan, ContextOf(request), request.seals));
  return Describe(files, info);
}

absl::StatusOr<std::optional<CommittedSave>> StoreCheckpointKeeper::Settle(
    const plan::JobSpec& spec, const SaveRequest& request) {
  ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan(request.world->plan));
  FileStore files(Root(spec));
  ASSIGN_OR_RETURN(const SettleResult result, SettleAttempt(files, save_plan, ContextOf(request)));
  if (result.state != SettledState::kCommitted || !result.committed) {
    return std::optional<CommittedSave>();
  }
  return std::optional<CommittedSave>(Describe(files, *result.committed));
}

absl::StatusOr<RestorePoint> StoreCheckpointKeeper::FindRestore(const plan::JobSpec& spec,
                                                                bool has_commit) {
  const std::string& wanted = spec.checkpoint.resume_from;
  int64_t only_step = -1;
  if (!has_commit && wanted == "none") {
    return RestorePoint();
  }
  if (!has_commit && wanted.starts_with("/")) {
    const size_t slash = wanted.find_last_of('/');
    FileStore parent(slash == 0 ? "/" : wanted.substr(0, slash));
    ASSIGN_OR_RETURN(const store::CommittedStep step,
                     store::CommittedStep::Open(&parent, wanted.substr(slash + 1)));
    return RestorePoint{step.commit().step, wanted, false};
  }
  if (!has_commit && wanted != "auto" && !absl::SimpleAtoi(wanted, &only_step)) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected auto, none, a step number or an absolute path, got ", wanted));
  }
  FileStore files(Root(spec));
  ASSIGN_OR_RETURN(const std::optional<CommittedStepInfo> found, PickRestore(files, only_step));
  return found ? RestorePoint{found->step, files.Locate(found->directory), true} : RestorePoint();
}

absl::Status StoreCheckpointKeeper::MarkBad(const plan::JobSpec& spec,
                                            int64_t step,
                                            const std::string& reason) {
  FileStore files(Root(spec));
  return ravel::coordinator::MarkBad(files, step, reason);
}

absl::StatusOr<std::vector<int64_t>> StoreCheckpointKeeper::Retain(const plan::JobSpec& spec,
                                                                   int64_t in_use_step) {
  FileStore files(Root(spec));
  std::set<int64_t> in_use;
  if (in_use_step >= 0) {
    in_use.insert(in_use_step);
  }
  return ApplyRetention(
      files,
      {.keep_last = spec.checkpoint.keep_last, .every_steps = spec.checkpoint.keep_every_steps},
      in_use);
}

absl::Status StoreCheckpointKeeper::SetAside(const plan::JobSpec& spec,
                                             const std::string& job_uid,
                                             const RestorePoint& start) {
  FileStore files(Root(spec));
  // Of another folder, or none at all: then no step that lies here is part of this history.
  const bool here = start.path.starts_with(Root(spec) + "/");
  ASSIGN_OR_RETURN(const std::vector<std::string> moved,
                   ravel::coordinator::SetAside(files, job_uid, here ? start.step : -1));
  if (!moved.empty()) {
    log::Info(absl::StrCat("job ",
                           spec.name,
                           ": ",
                           moved.size(),
                           " earlier steps were moved to ",
                           files.Locate(absl::StrCat("old-", job_uid))));
  }
  return absl::OkStatus();
}

absl::Status StoreCheckpointKeeper::CleanAttempts(const plan::JobSpec& spec) {
  FileStore files(Root(spec));
  return ravel::coordinator::CleanAttempts(files, {}).status();
}

}  // namespace ravel::coordinator
