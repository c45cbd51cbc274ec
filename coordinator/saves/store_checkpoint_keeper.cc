// CheckpointKeeper over a folder per job in a store. OWNER says whose folder it is and is checked
// before anything is changed, so that two jobs or clusters never write into each other's history;
// the first launch claims the folder. A restore first settles the newest attempt of which all seals
// are there (its commit may only have lacked the coordinator), then chooses the newest good step.
// Every call may block for long and runs on the store's pool; calls may be repeated after a crash.

#include "coordinator/saves/store_checkpoint_keeper.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "common/logging.h"
#include "common/plan/numerics.h"
#include "common/plan/save/save_plan.h"
#include "common/store/committed_step.h"
#include "common/store/open_store.h"
#include "coordinator/saves/checkpoint_leftovers.h"
#include "coordinator/saves/checkpoint_owner.h"
#include "coordinator/saves/checkpoint_pins.h"
#include "coordinator/saves/copy_marks.h"
#include "coordinator/saves/found_saves.h"
#include "coordinator/saves/named_start.h"
#include "coordinator/saves/retention.h"
#include "coordinator/saves/rollback.h"
#include "coordinator/saves/saves.h"
#include "coordinator/saves/step_inspection.h"

namespace ravel::coordinator {
namespace {

using store::ObjectStore;

constexpr const char* kBuild = "ravel";
constexpr int64_t kTidyEveryMs = 3600 * 1000;

OwnerRecord OwnerOf(const CheckpointJob& job, int64_t created_ms) {
  return {job.cluster_id,
          job.uid,
          absl::StrCat(job.spec.namespace_name, "/", job.spec.name),
          created_ms};
}

absl::Status CheckOurs(const ObjectStore& files, const CheckpointJob& job) {
  return CheckOwner(files, OwnerOf(job, 0));
}

SaveContext ContextOf(const plan::JobSpec& spec, const SaveRequest& request) {
  const plan::ShardingPlan& plan = request.world->plan;
  SaveContext context;
  context.job = request.job_uid;
  context.key = {.step = request.step,
                 .epoch = request.epoch,
                 .attempt = request.attempt,
                 .job_tag = ckpt::JobTag(request.job_uid)};
  context.created_ns = request.created_ms * 1'000'000;
  context.build = kBuild;
  context.numerics = plan::NumericsOf(spec);
  context.virtual_ranks = plan.lanes.lanes;
  for (const plan::MeshAxis& axis : plan.mesh.axes()) {
    context.mesh.push_back({axis.name, axis.size});
  }
  context.ranks = plan.ranks;
  return context;
}

absl::Status HoldsHistory(const ObjectStore& files, const CommittedStepInfo& newest) {
  return absl::InvalidArgumentError(
      absl::StrCat("spec.checkpoint.resumeFrom: ",
                   files.Locate(""),
                   " holds steps of an earlier job, up to ",
                   newest.step,
                   " (job uid ",
                   newest.commit.job,
                   "); to go on from it set resumeFrom: ",
                   files.Locate(newest.directory),
                   ", to begin anew set resumeFrom: none and fresh: true, or choose another name "
                   "or store"));
}

// The first launch of a job: its folder is made and becomes its own.
absl::Status ClaimRoot(ObjectStore& files, const CheckpointJob& job, int64_t now_ms) {
  RETURN_IF_ERROR(files.MakeRoot());
  Takeover takeover = Takeover::kSameCluster;
  if (job.spec.checkpoint.resume_from == "auto") {
    ASSIGN_OR_RETURN(const StepListing listing, ListSteps(files));
    for (const CommittedStepInfo& info : listing.steps) {
      if (info.commit.job != job.uid) {
        return HoldsHistory(files, info);
      }
    }
    takeover = listing.OthersAreWithdrawn() ? Takeover::kSameCluster : Takeover::kNever;
  }
  return ClaimFolder(files, OwnerOf(job, now_ms), takeover);
}

// A job that has run: OWNER must be there. Only a folder that another proof ties to the job, the
// COMMIT of the very step that its record names, gets the OWNER that releases before 2 did not
// write.
absl::Status CheckRoot(ObjectStore& files,
                       const CheckpointJob& job,
                       int64_t committed_step,
                       int64_t now_ms) {
  const absl::Status ours = CheckOurs(files, job);
  if (!absl::IsUnavailable(ours) || committed_step < 0) {
    return ours;
  }
  ASSIGN_OR_RETURN(const std::optional<OwnerRecord> owner, ReadOwner(files));
  const absl::StatusOr<store::CommittedStep> step =
      store::CommittedStep::Open(&files, ckpt::StepName(committed_step));
  if (owner || !step.ok() || step->commit().job != job.uid) {
    return ours;
  }
  return ClaimFolder(files, OwnerOf(job, now_ms), Takeover::kNever);
}

// Attempts of the job above the recorded commit, newest first.
absl::StatusOr<std::vector<ckpt::AttemptKey>> NewerAttempts(const ObjectStore& files,
                                                            const CheckpointJob& job,
                                                            int64_t committed_step) {
  ASSIGN_OR_RETURN(std::vector<ckpt::AttemptKey> attempts, ListAttempts(files));
  std::erase_if(attempts, [&](const ckpt::AttemptKey& key) {
    const bool foreign = key.job_tag && *key.job_tag != ckpt::JobTag(job.uid);
    return foreign || key.step <= committed_step;
  });
  std::reverse(attempts.begin(), attempts.end());
  return attempts;
}

// The epoch below which attempts are this coordinator's own to remove: one that comes back and does
// not know of its successor leaves what that one's trainers write.
int64_t EndOfOwn(int64_t epoch) {
  return epoch <= 1 ? kEveryEpoch : epoch;
}

// One attempt, if all its seals are there. Their number is the size of the epoch that made it; the
// hash of the plan in each of them proves it.
absl::StatusOr<std::optional<SettledSave>> SettleOne(ObjectStore& files,
                                                     const CheckpointJob& job,
                                                     const RestoreQuery& query,
                                                     const ckpt::AttemptKey& key,
                                                     int64_t now_ms) {
  ASSIGN_OR_RETURN(SettleResult result, SettleDescribedAttempt(files, job.uid, key));
  if (result.state == SettledState::kIncomplete) {
    ASSIGN_OR_RETURN(const std::vector<ckpt::Seal> seals, ReadSeals(files, key));
    const auto world =
        seals.empty() ? absl::NotFoundError("no seals") : query.plan(std::ssize(seals));
    if (!world.ok()) {
      // Another coordinator may have described the save since, and removed its seals.
      ASSIGN_OR_RETURN(result, SettleDescribedAttempt(files, job.uid, key));
    } else {
      ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan((*world)->plan));
      SaveRequest request{job.uid, key.step, key.epoch, key.attempt, now_ms, *world, {}};
      SaveContext context = ContextOf(job.spec, request);
      context.key = key;
      ASSIGN_OR_RETURN(result, SettleAttempt(files, save_plan, context));
    }
  }
  if (result.state != SettledState::kCommitted || !result.committed) {
    return std::optional<SettledSave>();
  }
  ASSIGN_OR_RETURN(const store::CommittedStep step,
                   store::CommittedStep::Open(&files, result.committed->directory));
  return std::optional<SettledSave>(
      SettledSave{DescribeSave(files, *result.committed, step.manifest().mesh),
                  key.epoch,
                  key.attempt,
                  step.manifest().ranks()});
}

absl::StatusOr<std::optional<SettledSave>> SettleNewest(ObjectStore& files,
                                                        const CheckpointJob& job,
                                                        const RestoreQuery& query,
                                                        int64_t now_ms) {
  if (!query.plan || query.rollback_step >= 0) {
    return std::optional<SettledSave>();
  }
  ASSIGN_OR_RETURN(const std::vector<ckpt::AttemptKey> attempts,
                   NewerAttempts(files, job, query.committed_step));
  for (const ckpt::AttemptKey& key : attempts) {
    ASSIGN_OR_RETURN(const std::optional<SettledSave> settled,
                     SettleOne(files, job, query, key, now_ms));
    if (settled) {
      log::Info(absl::StrCat("job ",
                             job.spec.name,
                             ": the finished save of step ",
                             key.step,
                             " (",
                             ckpt::AttemptName(key),
                             ") is committed"));
      return settled;
    }
  }
  return std::optional<SettledSave>();
}

// The commit of the job's own that it goes on from, also one that its record lacks: saves up to it
// are refused. Nothing: it has none, and begins where resumeFrom says.
absl::StatusOr<std::optional<RestorePoint>> ChooseOwn(ObjectStore& files,
                                                      const CheckpointJob& job,
                                                      const RestoreWindow& window) {
  ASSIGN_OR_RETURN(RestoreChoice choice, ChooseRestore(files, window));
  if (choice.step < 0 && job.spec.checkpoint.resume_from != "auto") {
    return std::optional<RestorePoint>();
  }
  return RestorePoint{.step = choice.step,
                      .path = choice.step < 0 ? "" : files.Locate(choice.directory),
                      .own = true,
                      .fallback_reason = std::move(choice.fallback_reason)};
}

// Settles and removes attempts of a job that is over. Pins are not touched.
absl::StatusOr<std::optional<SettledSave>> SettleAtEnd(const CheckpointJob& job,
                                                       const RestoreQuery& query,
                                                       const std::string& root,
                                                       int64_t now_ms) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(root));
  ObjectStore& files = *opened;
  if (!query.has_commit && !query.has_run) {
    return std::optional<SettledSave>();  // it never wrote
  }
  RETURN_IF_ERROR(CheckOurs(files, job));
  ASSIGN_OR_RETURN(const std::optional<SettledSave> settled,
                   SettleNewest(files, job, query, now_ms));
  // Tokens of nodes die with their epoch, also where no other one follows. The epoch that is named
  // here is that of the next launch, if there is one.
  RETURN_IF_ERROR(files.Fence("", ckpt::JobTag(job.uid), query.rollback_epoch));
  RETURN_IF_ERROR(CleanAttemptsOf(files, job.uid, EndOfOwn(query.rollback_epoch + 1)));
  return settled;
}

// Then what the job began from may go. A full store asks for retention before that, too.
bool HasOwnCommit(const ObjectStore& files, const CheckpointJob& job) {
  const absl::StatusOr<StepListing> listing = ListSteps(files);
  return listing.ok() &&
         std::any_of(
             listing->steps.begin(), listing->steps.end(), [&job](const CommittedStepInfo& info) {
               return info.commit.job == job.uid && !info.bad;
             });
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

absl::Status StoreCheckpointKeeper::Check(const CheckpointJob& job) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  const ObjectStore& files = *opened;
  RETURN_IF_ERROR(Annotate(files.ProbeWritable(), "spec.checkpoint.store"));
  const absl::StatusOr<std::optional<OwnerRecord>> owner = ReadOwner(files);
  RETURN_IF_ERROR(Annotate(owner.status(), "spec.checkpoint.store"));
  if (*owner && (*owner)->cluster_id != job.cluster_id) {
    return absl::InvalidArgumentError(
        absl::StrCat("spec.checkpoint.store: ",
                     files.Locate(""),
                     " belongs to job ",
                     (*owner)->job_name,
                     " (uid ",
                     (*owner)->job_uid,
                     ") of another cluster (",
                     (*owner)->cluster_id,
                     "); choose another name or store; resumeFrom: ",
                     files.Locate(""),
                     "/step-... may read its steps from there. If that cluster is gone for good, "
                     "remove ",
                     files.Locate(ckpt::kOwnerFile)));
  }
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(files));
  const plan::CheckpointSpec& wanted = job.spec.checkpoint;
  if (wanted.resume_from == "auto" && !listing.steps.empty()) {
    return HoldsHistory(files, listing.steps.front());
  }
  if (wanted.resume_from == "none" && !wanted.fresh && !listing.steps.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("spec.checkpoint.resumeFrom: none, but ",
                     files.Locate(""),
                     " holds commits; set fresh: true or another store"));
  }
  return NamesStart(job.spec) ? CheckNamedStart(files, job.spec) : absl::OkStatus();
}

absl::Status StoreCheckpointKeeper::PinStart(const CheckpointJob& job, int64_t for_seconds) {
  ASSIGN_OR_RETURN(const std::optional<store::StorePlace> start, StartElsewhere(job.spec));
  const std::optional<int64_t> step =
      start ? ckpt::ParseStepName(start->name) : std::optional<int64_t>();
  if (!step) {
    return absl::OkStatus();
  }
  const ckpt::PinName pin = {.step = *step,
                             .holder = JobPinHolder(job.uid),
                             .until_s = for_seconds > 0 ? NowSeconds() + for_seconds : 0};
  const std::string why = absl::StrCat(
      "job ", job.spec.namespace_name, "/", job.spec.name, " (uid ", job.uid, ") begins here\n");
  const absl::Status pinned = PinStep(*start->parent, pin, why);
  if (absl::IsFailedPrecondition(pinned)) {
    return Annotate(pinned, "spec.checkpoint.resumeFrom");
  }
  if (!pinned.ok()) {
    // A folder that may only be read, say. It is used without protection, as a person may.
    log::Warning(absl::StrCat("job ",
                              job.spec.name,
                              ": ",
                              job.spec.checkpoint.resume_from,
                              " cannot be pinned: ",
                              std::string(pinned.message())));
  }
  return absl::OkStatus();
}

absl::StatusOr<CommittedSave> StoreCheckpointKeeper::Commit(const CheckpointJob& job,
                                                            const SaveRequest& request) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan(request.world->plan));
  const SaveContext context = ContextOf(job.spec, request);
  ASSIGN_OR_RETURN(const CommittedStepInfo info,
                   CommitSave(files, save_plan, context, request.seals));
  return DescribeSave(files, info, context.mesh);
}

absl::StatusOr<std::optional<CommittedSave>> StoreCheckpointKeeper::Settle(
    const CheckpointJob& job, const SaveRequest& request) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  ASSIGN_OR_RETURN(const plan::SavePlan save_plan, plan::BuildSavePlan(request.world->plan));
  SaveContext context = ContextOf(job.spec, request);
  ASSIGN_OR_RETURN(SettleResult result, SettleAttempt(files, save_plan, context));
  if (result.state == SettledState::kIncomplete) {
    context.key.job_tag.reset();  // a name of a release before 2
    ASSIGN_OR_RETURN(result, SettleAttempt(files, save_plan, context));
  }
  if (result.state != SettledState::kCommitted || !result.committed) {
    return std::optional<CommittedSave>();
  }
  return std::optional<CommittedSave>(DescribeSave(files, *result.committed, context.mesh));
}

absl::StatusOr<RestorePoint> StoreCheckpointKeeper::PrepareRestore(const CheckpointJob& job,
                                                                   const RestoreQuery& query) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  const int64_t now_ms = clock_->WallMs();
  if (query.has_commit || query.has_run) {
    RETURN_IF_ERROR(CheckRoot(files, job, query.committed_step, now_ms));
  } else {
    RETURN_IF_ERROR(ClaimRoot(files, job, now_ms));
  }
  ASSIGN_OR_RETURN(std::optional<SettledSave> settled, SettleNewest(files, job, query, now_ms));
  // The epoch that is prepared now: what nodes of earlier ones still write is theirs alone.
  RETURN_IF_ERROR(files.Fence("", ckpt::JobTag(job.uid), query.rollback_epoch));
  const int64_t end_epoch = EndOfOwn(query.rollback_epoch);
  RETURN_IF_ERROR(query.rollback_step < 0 ? CleanAttemptsOf(files, job.uid, end_epoch)
                                          : RollBack(files,
                                                     {.job = job.uid,
                                                      .step = query.rollback_step,
                                                      .epoch = query.rollback_epoch,
                                                      .end_epoch = end_epoch}));
  ASSIGN_OR_RETURN(std::optional<RestorePoint> chosen,
                   ChooseOwn(files,
                             job,
                             {.job_uid = job.uid,
                              .committed_step = settled ? settled->save.step : query.committed_step,
                              .has_commit = query.has_commit || settled}));
  if (!chosen) {
    RETURN_IF_ERROR(PinStart(job, 0));
    ASSIGN_OR_RETURN(chosen, BeginHistory(files, job));
  }
  RestorePoint& restore = *chosen;
  if (restore.step >= 0) {
    ASSIGN_OR_RETURN(restore.numerics_change, NumericsChangeSince(restore.path, job.spec));
  }
  if (restore.own && restore.step >= 0 && !claims_.Reserve(job.uid, restore.step)) {
    return absl::UnavailableError(absl::StrCat(restore.path, " is being deleted"));
  }
  if (query.rollback_step >= 0) {
    claims_.EndWant(job.uid);  // the launch reserves it now
  }
  if (restore.own && restore.step > query.committed_step) {
    ASSIGN_OR_RETURN(const StepListing listing, ListSteps(files));
    restore.found = FindSaves(files, job.uid, listing, query.known_saves);
  }
  restore.settled = std::move(settled);
  return *std::move(chosen);
}

void StoreCheckpointKeeper::EndRestore(const std::string& job_uid) {
  claims_.EndRestore(job_uid);
}

absl::StatusOr<std::string> StoreCheckpointKeeper::CheckRollback(const CheckpointJob& job,
                                                                 int64_t step) {
  // First, so that retention does not delete what is found good here.
  if (!claims_.Want(job.uid, step)) {
    return absl::FailedPreconditionError(absl::StrCat("step ", step, " is being deleted"));
  }
  absl::StatusOr<std::string> path = FindGoodStep(job, step);
  if (!path.ok()) {
    claims_.Unwant(job.uid, step);
  }
  return path;
}

absl::StatusOr<std::string> StoreCheckpointKeeper::FindGoodStep(const CheckpointJob& job,
                                                                int64_t step) const {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  const ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  const std::string path = files.Locate(ckpt::StepName(step));
  const std::string report = store::JoinPath(ckpt::kBadFolder, ckpt::StepName(step));
  ASSIGN_OR_RETURN(const bool bad, store::Exists(files, report));
  if (bad) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is marked BAD"));
  }
  const StepInspection inspected = InspectStep(files, step);
  if (inspected.condition != StepCondition::kGood) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": ", inspected.reason));
  }
  return path;
}

absl::StatusOr<StepVerdict> StoreCheckpointKeeper::Condemn(const CheckpointJob& job,
                                                           int64_t step,
                                                           const std::string& reason) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  const StepInspection inspected = InspectStep(files, step, InspectionDepth::kDeep);
  if (inspected.condition == StepCondition::kGood) {
    log::Warning(absl::StrCat(
        "job ", job.spec.name, ": step ", step, " is whole here, though a trainer says: ", reason));
    return StepVerdict::kGood;
  }
  if (inspected.condition == StepCondition::kUnreadable) {
    return StepVerdict::kUnreadable;
  }
  RETURN_IF_ERROR(ravel::coordinator::MarkBad(files, step, inspected.reason));
  return StepVerdict::kDamaged;
}

absl::StatusOr<std::vector<int64_t>> StoreCheckpointKeeper::Retain(const CheckpointJob& job,
                                                                   int64_t in_use_step) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  std::set<int64_t> in_use;
  if (in_use_step >= 0) {
    in_use.insert(in_use_step);
  }
  absl::StatusOr<std::vector<int64_t>> deleted =
      ApplyRetention(files,
                     {.keep_last = job.spec.checkpoint.keep_last,
                      .every_steps = job.spec.checkpoint.keep_every_steps},
                     in_use,
                     NowSeconds(),
                     [this, &job](int64_t step) { return claims_.MayDelete(job.uid, step); });
  claims_.EndDeleting(job.uid);
  bool tidy = false;
  {
    const MutexLock lock(mutex_);
    const auto [last, first] = tidied_ms_.emplace(job.uid, clock_->MonotonicMs());
    tidy = first || clock_->MonotonicMs() - last->second >= kTidyEveryMs;
    last->second = tidy ? clock_->MonotonicMs() : last->second;
  }
  if (tidy) {
    const absl::Status unpinned = HasOwnCommit(files, job) ? UnpinStart(job) : absl::OkStatus();
    if (!unpinned.ok()) {
      log::Warning(absl::StrCat("job ", job.spec.name, ": ", std::string(unpinned.message())));
    }
    const auto removed = RemoveOldLeftovers(files, job.uid, clock_->WallMs());
    if (!removed.ok()) {
      log::Warning(absl::StrCat("leftovers: ", std::string(removed.status().message())));
    }
  }
  return deleted;
}

absl::Status StoreCheckpointKeeper::RemoveAttempt(const CheckpointJob& job, ckpt::AttemptKey key) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  key.job_tag = ckpt::JobTag(job.uid);
  return WithdrawAttempt(files, key);
}

absl::StatusOr<std::optional<SettledSave>> StoreCheckpointKeeper::Release(
    const CheckpointJob& job, const RestoreQuery& query) {
  const absl::Status unpinned = UnpinStart(job);
  EndRestore(job.uid);
  {
    const MutexLock lock(mutex_);
    tidied_ms_.erase(job.uid);
  }
  claims_.EndWant(job.uid);
  absl::StatusOr<std::optional<SettledSave>> settled =
      SettleAtEnd(job, query, Root(job.spec), clock_->WallMs());
  const bool told = settled.ok() && settled->has_value();  // whoever hears of it asks once more
  return unpinned.ok() || told ? std::move(settled) : unpinned;
}

absl::Status StoreCheckpointKeeper::Mark(const CheckpointJob& job,
                                         int64_t step,
                                         MarkChange change,
                                         const std::string& reason) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  switch (change) {
    case MarkChange::kPin:
      return PinStep(files, {.step = step}, reason);
    case MarkChange::kUnpin:
      return UnpinStep(files, step, "");
    case MarkChange::kUnmarkBad:
      return UnmarkBad(files, step);
  }
  return absl::InvalidArgumentError("unknown change of a mark");
}

absl::StatusOr<FolderView> StoreCheckpointKeeper::Look(const CheckpointJob& job,
                                                       const std::set<std::string>& known_saves) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  const ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  ASSIGN_OR_RETURN(const StepListing listing, ListSteps(files, NowSeconds()));
  ASSIGN_OR_RETURN(const std::vector<Leftover> leftovers, ListLeftovers(files, job.uid));
  FolderView view;
  view.found = FindSaves(files, job.uid, listing, known_saves);
  for (const CommittedStepInfo& info : listing.steps) {
    view.steps.push_back(info.step);
    if (info.pinned) {
      view.pinned_steps.push_back(info.step);
    }
  }
  for (const StepListing::Damaged& damaged : listing.damaged) {
    // Still there, and perhaps only unreadable now: no proof that the step is gone.
    if (!damaged.withdrawn) {
      view.steps.push_back(ckpt::ParseStepName(damaged.directory).value_or(-1));
    }
  }
  for (const Leftover& leftover : leftovers) {
    view.leftovers.push_back({files.Locate(leftover.path),
                              std::string(LeftoverKindName(leftover.kind)),
                              leftover.reason,
                              leftover.changed_ms});
  }
  return view;
}

absl::Status StoreCheckpointKeeper::RemoveAll(const CheckpointJob& job) {
  ASSIGN_OR_RETURN(const std::unique_ptr<ObjectStore> opened, store::OpenStore(Root(job.spec)));
  ObjectStore& files = *opened;
  RETURN_IF_ERROR(CheckOurs(files, job));
  const absl::Status unpinned = UnpinStart(job);
  if (!unpinned.ok()) {  // a store that is away keeps no job from being deleted
    log::Warning(absl::StrCat("job ", job.spec.name, ": ", std::string(unpinned.message())));
  }
  RETURN_IF_ERROR(RemoveAllOf(files, job.uid, NowSeconds()));
  return RemoveDeadCopies(files, clock_->WallMs()).status();
}

}  // namespace ravel::coordinator
