#include "tests/coordinator/simulation/stores.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "tests/coordinator/simulation/checks.h"
#include "tests/coordinator/simulation/gang.h"

namespace ravel::coordinator::simulation {

absl::Status SimulatedJobStore::Weather() {
  if (random_.Chance(weather_.crash_before_rate)) {
    throw CoordinatorCrash();
  }
  if (weather_.full) {
    return absl::ResourceExhaustedError("the disk is full");
  }
  if (random_.Chance(weather_.error_rate)) {
    return absl::UnavailableError("I/O error");
  }
  return absl::OkStatus();
}

absl::Status SimulatedJobStore::Apply(const StoreChange& change) {
  RETURN_IF_ERROR(Weather());
  if (group_) {
    group_->push_back(change);
    return absl::OkStatus();
  }
  return Commit({change});
}

absl::Status SimulatedJobStore::BeginGroup() {
  group_.emplace();
  return absl::OkStatus();
}

absl::Status SimulatedJobStore::CommitGroup() {
  const std::vector<StoreChange> changes = *std::exchange(group_, std::nullopt);
  RETURN_IF_ERROR(Weather());
  return Commit(changes);
}

absl::Status SimulatedJobStore::Commit(const std::vector<StoreChange>& changes) {
  if (bug_ == Bug::kAnswerBeforeDurable && random_.Chance(0.5)) {
    before_ = disk_;
  } else {
    before_.reset();
  }
  for (const StoreChange& change : changes) {
    checks_.BeforeApply(disk_, change);
    RETURN_IF_ERROR(inner_.Apply(change));
    checks_.AfterApply(change);
  }
  if (random_.Chance(weather_.crash_after_rate)) {
    throw CoordinatorCrash();
  }
  return absl::OkStatus();
}

void SimulatedStoreWriter::Add(StoreWrite write) {
  queue_.push_back(std::move(write));
  Next();
}

void SimulatedStoreWriter::Next() {
  if (busy_ || queue_.empty()) {
    return;
  }
  busy_ = true;
  const int64_t most_us = random_.Chance(0.05) ? 10 * weather_.write_us : weather_.write_us;
  events_.At(random_.Between(200, most_us), [this, alive = alive_] {
    if (!*alive) {
      return;
    }
    const std::vector<StoreWrite> group(std::make_move_iterator(queue_.begin()),
                                        std::make_move_iterator(queue_.end()));
    queue_.clear();
    const Run on_thread = on_thread_;  // this writer may end in it
    on_thread([&] {
      const std::vector<absl::Status> results = WriteGroup(*store_, group);
      for (size_t i = 0; i < group.size(); ++i) {
        const bool lies = bug_ == Bug::kForgottenGroup;
        post_([done = group[i].done, status = lies ? absl::OkStatus() : results[i]] {
          done(status);
        });
      }
    });
    if (*alive) {  // the process has not died of it
      busy_ = false;
      Next();
    }
  });
}

// -- checkpoints

absl::Status SimulatedCheckpoints::Reachable() const {
  return weather.down ? absl::UnavailableError("the store does not answer") : absl::OkStatus();
}

absl::Status SimulatedCheckpoints::RemoveAll(const CheckpointJob& job) {
  RETURN_IF_ERROR(Reachable());
  MaybeCrash();
  folders_.erase(Root(job.spec));
  return absl::OkStatus();
}

void SimulatedCheckpoints::MaybeCrash() {
  if (random_.Chance(weather.crash_rate)) {
    throw CoordinatorCrash();
  }
}

absl::StatusOr<uint64_t> SimulatedCheckpoints::Read(const std::string& path,
                                                    int64_t first_step) const {
  RETURN_IF_ERROR(Reachable());
  if (path.empty()) {
    checks_.Expect(first_step == 0, "initial weights are step 0");
    return InitialWeights();
  }
  const size_t slash = path.rfind('/');
  int64_t step = -1;
  CHECK(absl::SimpleAtoi(path.substr(slash + 6), &step));  // step-N
  checks_.Expect(step == first_step, absl::StrCat(path, " is told to be step ", first_step));
  const auto folder = folders_.find(path.substr(0, slash));
  if (folder == folders_.end() || !folder->second.steps.contains(step)) {
    return absl::NotFoundError(absl::StrCat(path, " is missing"));
  }
  const Step& found = folder->second.steps.at(step);
  if (found.corrupt) {
    return absl::DataLossError(absl::StrCat(path, ": a checksum does not match"));
  }
  return found.weights;
}

absl::Status SimulatedCheckpoints::WriteShard(const std::string& root,
                                              int64_t step,
                                              int64_t epoch,
                                              int64_t attempt,
                                              int64_t rank,
                                              int64_t world_size,
                                              uint64_t weights) {
  RETURN_IF_ERROR(Reachable());
  Attempt& folder = folders_[root].attempts[{step, epoch, attempt}];
  folder.world_size = world_size;
  folder.shards[rank] = weights;
  return absl::OkStatus();
}

absl::StatusOr<CommittedSave> SimulatedCheckpoints::Commit(const CheckpointJob& job,
                                                           const SaveRequest& request) {
  const plan::JobSpec& spec = job.spec;
  RETURN_IF_ERROR(Reachable());
  MaybeCrash();
  checks_.Expect(static_cast<int64_t>(request.seals.size()) == request.world->plan.ranks,
                 absl::StrCat("commit of ",
                              spec.name,
                              " step ",
                              request.step,
                              " with ",
                              request.seals.size(),
                              " seals of ",
                              request.world->plan.ranks));
  for (const ckpt::Seal& seal : request.seals) {
    checks_.Expect(seal.epoch == request.epoch && seal.step == request.step,
                   absl::StrCat("commit of ", spec.name, " mixes epochs or steps"));
  }
  return CommitComplete(spec, request);
}

absl::StatusOr<CommittedSave> SimulatedCheckpoints::CommitComplete(const plan::JobSpec& spec,
                                                                   const SaveRequest& request,
                                                                   bool settles) {
  const std::string root = Root(spec);
  Folder& folder = folders_[root];
  const CommittedSave save{request.step, absl::StrCat(root, "/step-", request.step), 100, 3, "id"};
  const auto known = folder.steps.find(request.step);
  if (known != folder.steps.end() && !known->second.bad) {
    return known->second.epoch == request.epoch && known->second.attempt == request.attempt
               ? absl::StatusOr<CommittedSave>(save)
               : absl::AlreadyExistsError(absl::StrCat("step ", request.step, " is committed"));
  }
  const AttemptKey key{request.step, request.epoch, request.attempt};
  const auto attempt = folder.attempts.find(key);
  const int64_t shards =
      attempt == folder.attempts.end() ? 0 : static_cast<int64_t>(attempt->second.shards.size());
  if (shards != request.world->plan.ranks) {
    return absl::FailedPreconditionError(absl::StrCat("only ", shards, " shards are there"));
  }
  if (bug_ == Bug::kLostShard && shards > 1) {
    attempt->second.shards.erase(attempt->second.shards.begin());
  }
  checks_.OnStoreCommit(spec.name, request, attempt->second.shards, settles);
  folder.steps[request.step] = {
      request.epoch, request.attempt, attempt->second.shards.begin()->second, false, false};
  folder.attempts.erase(attempt);
  MaybeCrash();
  return save;
}

absl::StatusOr<std::optional<CommittedSave>> SimulatedCheckpoints::Settle(
    const CheckpointJob& job, const SaveRequest& request) {
  RETURN_IF_ERROR(Reachable());
  MaybeCrash();
  absl::StatusOr<CommittedSave> done = CommitComplete(job.spec, request);
  return done.ok() ? std::optional<CommittedSave>(*done) : std::nullopt;
}

absl::StatusOr<std::optional<SettledSave>> SimulatedCheckpoints::Release(
    const CheckpointJob& job, const RestoreQuery& query) {
  RETURN_IF_ERROR(Reachable());
  MaybeCrash();
  Folder& folder = folders_[Root(job.spec)];
  std::optional<SettledSave> settled;
  const bool settles = query.plan && query.rollback_step < 0;
  for (auto at = folder.attempts.rbegin(); at != folder.attempts.rend() && settles; ++at) {
    const auto [step, epoch, attempt] = at->first;
    const int64_t ranks = at->second.world_size;
    if (step > query.committed_step && static_cast<int64_t>(at->second.shards.size()) == ranks) {
      ASSIGN_OR_RETURN(const std::shared_ptr<const PlannedWorld> world, query.plan(ranks));
      const SaveRequest request{job.uid, step, epoch, attempt, 0, world, {}};
      const absl::StatusOr<CommittedSave> save = CommitComplete(job.spec, request, true);
      if (save.ok()) {
        settled = SettledSave{*save, epoch, attempt, ranks};
        break;
      }
    }
  }
  folder.attempts.clear();
  return settled;
}

absl::StatusOr<RestorePoint> SimulatedCheckpoints::PrepareRestore(const CheckpointJob& job,
                                                                  const RestoreQuery& query) {
  RestorePoint point;
  if (query.rollback_step >= 0) {
    RETURN_IF_ERROR(Reachable());
    std::map<int64_t, Step>& steps = folders_[Root(job.spec)].steps;
    steps.erase(steps.upper_bound(query.rollback_step), steps.end());
    checks_.OnMovedAside(job.spec.name, query.rollback_step);
    wanted_.erase(job.uid);
    MaybeCrash();
  }
  ASSIGN_OR_RETURN(point.settled, Release(job, query));
  const int64_t step = NewestGood(Root(job.spec));
  if (step < 0 && query.has_commit) {
    return absl::DataLossError(absl::StrCat(Root(job.spec), " holds no good step"));
  }
  if (step >= 0 && (query.has_commit || job.spec.checkpoint.resume_from == "auto")) {
    point.step = step;
    point.path = absl::StrCat(Root(job.spec), "/step-", step);
    point.fallback_reason = step < query.committed_step ? "a checksum does not match" : "";
  }
  return point;
}

absl::StatusOr<std::string> SimulatedCheckpoints::CheckRollback(const CheckpointJob& job,
                                                                int64_t step) {
  RETURN_IF_ERROR(Reachable());
  const Folder& folder = folders_[Root(job.spec)];
  const auto found = folder.steps.find(step);
  if (found == folder.steps.end() || found->second.bad || found->second.corrupt) {
    return absl::FailedPreconditionError(absl::StrCat("no good step ", step));
  }
  wanted_[job.uid].insert(step);
  return absl::StrCat(Root(job.spec), "/step-", step);
}

absl::StatusOr<StepVerdict> SimulatedCheckpoints::Condemn(const CheckpointJob& job,
                                                          int64_t step,
                                                          const std::string& /*reason*/) {
  RETURN_IF_ERROR(Reachable());
  Folder& folder = folders_[Root(job.spec)];
  const auto found = folder.steps.find(step);
  if (found == folder.steps.end()) {
    return StepVerdict::kUnreadable;
  }
  found->second.bad = found->second.bad || found->second.corrupt;
  return found->second.bad ? StepVerdict::kDamaged : StepVerdict::kGood;
}

absl::StatusOr<FolderView> SimulatedCheckpoints::Look(
    const CheckpointJob& job, const std::set<std::string>& /*known_saves*/) {
  RETURN_IF_ERROR(Reachable());
  FolderView view;
  for (const auto& [number, step] : folders_[Root(job.spec)].steps) {
    view.steps.push_back(number);
  }
  return view;
}

absl::StatusOr<std::vector<int64_t>> SimulatedCheckpoints::Retain(const CheckpointJob& job,
                                                                  int64_t in_use_step) {
  RETURN_IF_ERROR(Reachable());
  MaybeCrash();
  std::map<int64_t, Step>& steps = folders_[Root(job.spec)].steps;
  std::vector<int64_t> good;
  for (const auto& [number, step] : steps) {
    if (!step.bad) {
      good.push_back(number);
    }
  }
  std::vector<int64_t> deleted;
  const int64_t keep = bug_ == Bug::kRetentionTooEager ? 0 : job.spec.checkpoint.keep_last;
  for (size_t i = 0; i + static_cast<size_t>(keep) < good.size(); ++i) {
    const auto wanted = wanted_.find(job.uid);
    if (good[i] != in_use_step && (wanted == wanted_.end() || !wanted->second.contains(good[i]))) {
      steps.erase(good[i]);
      deleted.push_back(good[i]);
    }
  }
  return deleted;
}

absl::Status SimulatedCheckpoints::RemoveAttempt(const CheckpointJob& job, ckpt::AttemptKey key) {
  RETURN_IF_ERROR(Reachable());
  folders_[Root(job.spec)].attempts.erase({key.step, key.epoch, key.attempt});
  return absl::OkStatus();
}

int64_t SimulatedCheckpoints::NewestGood(const std::string& root) const {
  const auto folder = folders_.find(root);
  int64_t newest = -1;
  if (folder != folders_.end()) {
    for (const auto& [number, step] : folder->second.steps) {
      newest = step.bad ? newest : number;
    }
  }
  return newest;
}

std::vector<int64_t> SimulatedCheckpoints::GoodBelow(const std::string& root, int64_t step) const {
  std::vector<int64_t> good;
  const auto folder = folders_.find(root);
  if (folder != folders_.end()) {
    for (const auto& [number, kept] : folder->second.steps) {
      if (number < step && !kept.bad && !kept.corrupt) {
        good.push_back(number);
      }
    }
  }
  return good;
}

int64_t SimulatedCheckpoints::Attempts(const std::string& root) const {
  const auto folder = folders_.find(root);
  return folder == folders_.end() ? 0 : static_cast<int64_t>(folder->second.attempts.size());
}

void SimulatedCheckpoints::CorruptNewest(const std::string& root) {
  const int64_t newest = NewestGood(root);
  if (newest < 0) {
    return;
  }
  std::map<int64_t, Step>& steps = folders_[root].steps;
  const bool another = std::any_of(steps.begin(), steps.end(), [newest](const auto& step) {
    return step.first != newest && !step.second.bad && !step.second.corrupt;
  });
  if (another) {
    steps[newest].corrupt = true;
    damaged_.insert(root);
  }
}

// -- plans

absl::StatusOr<std::shared_ptr<const PlannedWorld>> SimulatedPlanner::Plan(
    const plan::JobSpec& spec, int64_t ranks, bool shared_memory) {
  auto world = std::make_shared<PlannedWorld>();
  world->digest =
      absl::StrCat("plan of ", spec.name, " on ", ranks, shared_memory ? " shared" : "");
  world->bytes = world->digest;
  world->plan.ranks = ranks;
  if (bug_ == Bug::kPlanOfAnotherSize && ranks > 1) {
    world->bytes = absl::StrCat("plan of ", spec.name, " on ", ranks - 1);
  }
  plans_[world->digest] = world;
  return std::shared_ptr<const PlannedWorld>(std::move(world));
}

std::shared_ptr<const PlannedWorld> SimulatedPlanner::Find(const std::string& digest) {
  const auto found = plans_.find(digest);
  return found == plans_.end() ? nullptr : found->second;
}

std::string SimulatedPlanner::EncodeSpec(const plan::JobSpec& spec) {
  specs_.push_back(spec);
  return absl::StrCat(specs_.size() - 1);
}

absl::StatusOr<plan::JobSpec> SimulatedPlanner::DecodeSpec(const std::string& planned) {
  size_t index = 0;
  CHECK(absl::SimpleAtoi(planned, &index) && index < specs_.size());
  return specs_[index];
}

}  // namespace ravel::coordinator::simulation
