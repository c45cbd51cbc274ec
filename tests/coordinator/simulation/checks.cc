#include "tests/coordinator/simulation/checks.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {
namespace {

constexpr bool kResentSealsOpenSaves = false;

}  // namespace

void Checks::Fail(const std::string& what) {
  if (broken_.empty()) {
    broken_ = absl::StrCat("at ", world_.events().now_us() / 1000, " ms: ", what);
    world_.Trace("CHECK", what);
  }
}

// -- transactions

void Checks::BeforeApply(const MemoryJobStore::Disk& disk, const StoreChange& change) {
  ++looked_;
  for (const JobRecord& job : change.jobs) {
    CheckJob(disk, job, change);
  }
  for (const SaveRecord& save : change.saves) {
    CheckSave(disk, save);
  }
  for (const EpochRecord& epoch : change.epochs) {
    const bool again =
        std::any_of(disk.epochs.begin(), disk.epochs.end(), [&epoch](const EpochRecord& known) {
          return known.job_uid == epoch.job_uid && known.epoch == epoch.epoch;
        });
    Expect(!again, absl::StrCat("epoch ", epoch.epoch, " is launched twice"));
  }
  for (const OperationRecord& operation : change.operations) {
    const auto known = disk.operations.find(operation.id);
    const bool over =
        known != disk.operations.end() && (known->second.state == OperationState::kCommitted ||
                                           known->second.state == OperationState::kFailed);
    Expect(!over || known->second.state == operation.state,
           absl::StrCat("operation ", operation.id, " changes after its end"));
  }
}

void Checks::CheckJob(const MemoryJobStore::Disk& disk,
                      const JobRecord& next,
                      const StoreChange& change) {
  const auto found = disk.jobs.find(next.uid);
  if (found == disk.jobs.end()) {
    const bool named = std::any_of(disk.jobs.begin(), disk.jobs.end(), [&next](const auto& job) {
      return job.second.name == next.name && job.second.namespace_name == next.namespace_name;
    });
    Expect(!named, absl::StrCat("two jobs are named ", next.name));
    return;
  }
  const JobRecord& job = found->second;
  const std::string where = absl::StrCat("job ", job.name, ": ");
  const auto tells = [&change](std::string_view type) {
    return std::any_of(change.events.begin(),
                       change.events.end(),
                       [type](const JobEventRecord& event) { return event.type == type; });
  };
  Expect(!IsTerminal(job.state) || next.state == job.state || tells("Retried"),
         absl::StrCat(where,
                      std::string(StateName(job.state)),
                      " becomes ",
                      std::string(StateName(next.state))));
  Expect(next.epoch >= job.epoch && next.launched_epoch >= job.launched_epoch &&
             next.launched_epoch <= next.epoch && next.attempt >= job.attempt,
         absl::StrCat(where, "an epoch or attempt falls"));
  Expect(next.highest_commit >= job.highest_commit, absl::StrCat(where, "highest commit falls"));
  Expect(next.committed_step >= job.committed_step || tells("RolledBack"),
         absl::StrCat(where,
                      "its commit falls from ",
                      job.committed_step,
                      " to ",
                      next.committed_step,
                      " without a word"));
  const bool progress = next.highest_commit > job.highest_commit ||
                        next.budget.furthest_step > job.budget.furthest_step || tells("Retried");
  Expect(next.budget.used >= job.budget.used || progress,
         absl::StrCat(where, "the budget refills without progress"));
  Expect(next.resource_version > job.resource_version,
         absl::StrCat(where, "the resource version does not rise"));
}

void Checks::CheckSave(const MemoryJobStore::Disk& disk, const SaveRecord& next) {
  const auto known = disk.saves.find({next.job_uid, next.step, next.epoch, next.attempt});
  const bool committed = known != disk.saves.end() && known->second.state == SaveState::kCommitted;
  const bool deleted = known != disk.saves.end() && known->second.state == SaveState::kDeleted;
  // Known: a seal that is sent again after its commit opens a new save.
  const bool sent_again = kResentSealsOpenSaves &&
                          (next.state == SaveState::kIntended || next.state == SaveState::kFailed);
  Expect(!committed || sent_again || next.state == SaveState::kCommitted ||
             next.state == SaveState::kBad || next.state == SaveState::kDeleted ||
             next.state == SaveState::kRolledBack,
         absl::StrCat("the committed save of step ",
                      next.step,
                      " becomes state ",
                      static_cast<int>(next.state)));
  Expect(
      !deleted || sent_again || next.state == SaveState::kDeleted,
      absl::StrCat(
          "the deleted save of step ", next.step, " becomes state ", static_cast<int>(next.state)));
}

void Checks::AfterApply(const StoreChange& change) {
  for (const JobEventRecord& event : change.events) {
    Expect(event.seq > newest_event_, "the number of an event does not rise");
    newest_event_ = std::max(newest_event_, event.seq);
    world_.Trace("EVENT",
                 world_.JobName(event.job_uid),
                 " ",
                 event.type,
                 " ",
                 event.reason,
                 " epoch ",
                 event.epoch,
                 " step ",
                 event.step,
                 ": ",
                 event.message);
  }
  for (const JobRecord& job : change.jobs) {
    Expect(job.resource_version > newest_version_, "a resource version was used before");
    newest_version_ = std::max(newest_version_, job.resource_version);
  }
}

// -- launches

void Checks::OnLaunchSent(const MemoryJobStore::Disk& disk, const Launch& launch) {
  const auto job = disk.jobs.find(launch.job_uid);
  if (job == disk.jobs.end()) {
    Fail("a launch of a job that is not on disk");
    return;
  }
  const std::string where = absl::StrCat("job ", job->second.name, " epoch ", launch.epoch, ": ");
  Expect(job->second.launched_epoch == launch.epoch && job->second.epoch == launch.epoch,
         absl::StrCat(where, "launched though epoch ", job->second.epoch, " is on disk"));
  Expect(!IsTerminal(job->second.state), absl::StrCat(where, "launched though the job is over"));
  // What was committed once is there for good, unless it was damaged.
  const std::string root = absl::StrCat("/ckpt/", job->second.name);
  const std::map<int64_t, int64_t>& commits = commits_[job->second.name];
  const int64_t newest =
      std::max<int64_t>(0,
                        world_.checkpoints().WasCorrupted(root) || commits.empty()
                            ? world_.checkpoints().NewestGood(root)
                            : commits.rbegin()->first);
  const int64_t first = launch.trainers.front().first_step;
  Expect(first >= newest,
         absl::StrCat(where, "begins at step ", first, ", step ", newest, " is committed"));
  const auto [known, fresh] = first_steps_[launch.job_uid].emplace(launch.epoch, first);
  Expect(fresh || known->second == first, absl::StrCat(where, "ranks begin at different steps"));
}

void Checks::OnDaemonLaunches(Daemon& daemon, const Launch& launch, int64_t over) {
  const std::string where = absl::StrCat("node ", daemon.id(), ", epoch ", launch.epoch, ": ");
  Expect(launch.epoch > over, absl::StrCat(where, "started though epoch ", over, " is over"));
  std::set<int64_t> wanted;
  for (const StartTrainer& start : launch.trainers) {
    Expect(
        start.device >= 0 && start.device < daemon.devices() && wanted.insert(start.device).second,
        absl::StrCat(where, "device ", start.device, " is wrong or named twice"));
  }
  for (const auto& [key, trainer] : daemon.trainers()) {
    Expect(!wanted.contains(trainer.start.device),
           absl::StrCat(where,
                        "device ",
                        trainer.start.device,
                        " is held by ",
                        trainer.start.job_name,
                        " epoch ",
                        trainer.epoch));
    Expect(trainer.job_uid != launch.job_uid || trainer.epoch <= launch.epoch,
           absl::StrCat(where, "a newer epoch ", trainer.epoch, " of the job runs here"));
  }
}

void Checks::OnRecords(const Trainer& trainer, const CommRecordSet& set) {
  const std::string where =
      absl::StrCat("job ", trainer.start.job_name, " epoch ", trainer.epoch, ": ");
  Expect(static_cast<int64_t>(set.records.size()) == trainer.start.world_size,
         absl::StrCat(
             where, set.records.size(), " communicator records of ", trainer.start.world_size));
  for (size_t rank = 0; rank < set.records.size(); ++rank) {
    Expect(set.records[rank] == absl::StrCat(trainer.job_uid, "/", trainer.epoch, "/", rank),
           absl::StrCat(where, "a communicator record of another epoch or rank"));
  }
}

void Checks::OnPlan(const Launch& launch, const std::string& bytes) {
  const StartTrainer& start = launch.trainers.front();
  const std::string wanted = absl::StrCat("plan of ", start.job_name, " on ", start.world_size);
  Expect(bytes == wanted || bytes == wanted + " shared",
         absl::StrCat("job ", start.job_name, ": ", start.world_size, " ranks get the ", bytes));
}

void Checks::OnRejected(const std::string& node, const std::string& reason) {
  // Only a daemon that another one of its name has replaced is told to go.
  Expect(reason.find("another daemon") != std::string::npos,
         absl::StrCat("node ", node, " is rejected: ", reason));
}

void Checks::OnStoreCommit(const std::string& job,
                           const SaveRequest& request,
                           const std::map<int64_t, uint64_t>& shards,
                           bool settles) {
  const std::string where = absl::StrCat("job ", job, " step ", request.step, ": ");
  Expect(static_cast<int64_t>(shards.size()) == request.world->plan.ranks,
         absl::StrCat(
             where, "committed with ", shards.size(), " shards of ", request.world->plan.ranks));
  const uint64_t expected = WeightsOf(request.step);
  for (const auto& [rank, weights] : shards) {
    Expect(weights == expected,
           absl::StrCat(where, "rank ", rank, " did not train each step exactly once"));
  }
  const MemoryJobStore::Disk& disk = world_.disk();
  const auto record = disk.jobs.find(request.job_uid);
  Expect(record != disk.jobs.end() && (settles || record->second.launched_epoch == request.epoch),
         absl::StrCat(where, "committed by epoch ", request.epoch, ", which is over"));
  commits_[job][request.step] = request.epoch;
}

void Checks::OnMovedAside(const std::string& job, int64_t step) {
  std::map<int64_t, int64_t>& commits = commits_[job];
  commits.erase(commits.upper_bound(step), commits.end());
}

// -- clients

void Checks::OnSubmitted(const std::string& request, const std::string& uid) {
  const auto [known, fresh] = submitted_.emplace(request, uid);
  Expect(fresh || known->second == uid, absl::StrCat(request, " is answered with two jobs"));
}

void Checks::OnCancelled(const std::string& uid) {
  cancelled_.insert(uid);
}

void Checks::OnRetryAsked(const std::string& uid) {
  cancelled_.erase(uid);
}

void Checks::OnDeleted(const std::string& uid) {
  deleted_.insert(uid);
}

void Checks::OnOperation(const std::string& request, const OperationRecord& operation) {
  const auto [known, fresh] = operations_.emplace(request, operation);
  Expect(fresh || known->second.id == operation.id,
         absl::StrCat(request, " is answered with two operations"));
}

void Checks::AfterRestart(const MemoryJobStore::Disk& disk) {
  for (const auto& [request, uid] : submitted_) {
    Expect(disk.jobs.contains(uid) || world_.DeleteWasAsked(uid),
           absl::StrCat(request, " was acknowledged and is gone"));
  }
  for (const auto& [request, operation] : operations_) {
    Expect(disk.operations.contains(operation.id) || world_.DeleteWasAsked(operation.job_uid),
           absl::StrCat(request, " was acknowledged and is gone"));
  }
  for (const std::string& uid : deleted_) {
    const auto job = disk.jobs.find(uid);
    Expect(job == disk.jobs.end() || job->second.delete_wish != DeleteWish::kNone,
           absl::StrCat("the deletion of ", uid, " was acknowledged and is gone"));
  }
  for (const std::string& uid : cancelled_) {
    const auto job = disk.jobs.find(uid);
    if (job == disk.jobs.end() && world_.DeleteWasAsked(uid)) {
      continue;
    }
    Expect(job != disk.jobs.end() &&
               (IsTerminal(job->second.state) || job->second.state == JobState::kStopping),
           absl::StrCat("the cancel of ", uid, " was acknowledged and is gone"));
  }
}

// -- the end

void Checks::AtTheEnd(const MemoryJobStore::Disk& disk) {
  AfterRestart(disk);
  for (const std::string& uid : deleted_) {
    Expect(!disk.jobs.contains(uid), absl::StrCat("job ", uid, " was deleted and is still there"));
  }
  for (const auto& [key, save] : disk.saves) {
    Expect(disk.jobs.contains(save.job_uid),
           absl::StrCat("the save of step ", save.step, " of a deleted job is still there"));
  }
  for (const auto& [uid, job] : disk.jobs) {
    const std::string where = absl::StrCat("job ", job.name, ": ");
    Expect(IsTerminal(job.state),
           absl::StrCat(where,
                        "still ",
                        std::string(StateName(job.state)),
                        " (",
                        job.reason,
                        ") long after the ",
                        "last fault: ",
                        job.message));
    // The one good step may have been deleted in the moment in which the newest was damaged.
    const bool damaged = job.reason == "NoGoodCheckpoint" &&
                         world_.checkpoints().WasCorrupted(absl::StrCat("/ckpt/", job.name));
    Expect(job.state != JobState::kFailed || damaged,
           absl::StrCat(where, "failed: ", job.reason, ": ", job.message));
    Expect(
        job.state != JobState::kCancelled || cancelled_.contains(uid) || world_.CancelWasAsked(uid),
        absl::StrCat(where, "cancelled, though nobody asked"));
    if (job.state == JobState::kSucceeded) {
      CheckHistory(job);
    }
  }
  for (const auto& [id, operation] : disk.operations) {
    Expect(
        operation.state == OperationState::kCommitted || operation.state == OperationState::kFailed,
        absl::StrCat("operation ", id, " has no end"));
  }
  world_.CheckFleetAtTheEnd();
}

bool Checks::IsToldMissing(const std::string& uid, int64_t step) const {
  const std::vector<JobEventRecord>& events = world_.disk().events;
  return std::any_of(events.begin(), events.end(), [&](const JobEventRecord& event) {
    return event.job_uid == uid && event.type == "StepReportsMissing" && event.step == step;
  });
}

// Each step once; where the commit lineage names its epoch, it is that one's.
void Checks::CheckHistory(const JobRecord& job) {
  const std::string where = absl::StrCat("job ", job.name, ": ");
  Expect(job.committed_step == job.spec.steps || job.committed_step == world_.StepsOf(job.uid),
         absl::StrCat(where, "succeeded with step ", job.committed_step));
  const std::vector<StepRecord> history = world_.History(job.uid);
  int64_t before = 0;
  for (const StepRecord& record : history) {
    Expect(record.step > before, absl::StrCat(where, "step ", record.step, " comes twice"));
    // Reports may go with the node of rank 0 after all ranks have sealed a save: that is told.
    const bool gap = record.step != before + 1;
    Expect(!gap || world_.reports_may_be_lost() || IsToldMissing(job.uid, record.step - 1),
           absl::StrCat(where, "no record of step ", before + 1, ", and nobody was told"));
    before = record.step;
  }
}

}  // namespace ravel::coordinator::simulation
