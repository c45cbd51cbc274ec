#include "tests/testing/fake_supervisor.h"

#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/plan/save/save_plan.h"
#include "common/store/file_store.h"
#include "coordinator/saves/saves.h"
#include "worker/trainer/position.h"
#include "worker/trainer/trainer.h"

namespace ravel::trainer {
namespace {

class Supervisor {
 public:
  Supervisor(const EpochArgs& args, const plan::ShardingPlan& plan)
      : args_(args),
        save_plan_(*plan::BuildSavePlan(plan)),
        boxes_(static_cast<size_t>(args.ranks)) {}

  CommandBox& box(int rank) { return boxes_[static_cast<size_t>(rank)]; }
  EpochOutcome Take() {
    MutexLock lock(mutex_);
    return std::move(outcome_);
  }

  void OnRecord(int rank, const std::string& group, const std::string& record) {
    MutexLock lock(mutex_);
    std::map<int, std::string>& records = records_[group];
    records[rank] = record;
    if (static_cast<int>(records.size()) < args_.ranks) {
      return;
    }
    std::vector<std::string> all;
    for (const auto& [of_rank, text] : records) {
      all.push_back(text);
    }
    for (CommandBox& each : boxes_) {
      each.DeliverRecords(group, all);
    }
  }

  void OnReady(const TrainerReady& report) {
    MutexLock lock(mutex_);
    outcome_.ready.push_back(report);
    if (static_cast<int>(outcome_.ready.size()) == args_.ranks) {
      for (CommandBox& each : boxes_) {
        each.AllowSteps(args_.spec.steps);
      }
    }
  }

  void OnStep(const StepReport& record) {
    MutexLock lock(mutex_);
    outcome_.steps.push_back(record);
    if (record.step == args_.stop_after_step) {
      boxes_.back().RequestSave(1, true);  // one rank hears of it; all must agree
    }
  }

  void OnSeal(const ckpt::Seal& seal) {
    MutexLock lock(mutex_);
    std::vector<ckpt::Seal>& seals = seals_[seal.step];
    seals.push_back(seal);
    if (static_cast<int>(seals.size()) < args_.ranks) {
      return;
    }
    store::FileStore store(args_.checkpoint_root);
    const auto committed = coordinator::CommitSave(store,
                                                   save_plan_,
                                                   {.job = "uid",
                                                    .key = {.step = seal.step,
                                                            .epoch = args_.epoch,
                                                            .attempt = seal.attempt,
                                                            .job_tag = ckpt::JobTag("uid")},
                                                    .created_ns = 0,
                                                    .build = "test",
                                                    .numerics = "cpu",
                                                    .virtual_ranks = args_.spec.virtual_ranks,
                                                    .mesh = {{"shard", args_.ranks}},
                                                    .ranks = args_.ranks},
                                                   seals);
    if (committed.ok()) {
      outcome_.committed[seal.step] = args_.checkpoint_root + "/" + committed->directory;
    } else {
      outcome_.commit_errors.push_back(committed.status());
    }
  }

  void OnSaveStarted(int rank, int64_t step) {
    MutexLock lock(mutex_);
    if (rank == 0) {
      outcome_.saves_started.push_back(step);
    }
  }

  void OnSaveFailed(const ravel::SaveFailed& failure) {
    MutexLock lock(mutex_);
    outcome_.save_failures.push_back(failure);
  }

  void OnDone() {
    MutexLock lock(mutex_);
    ++outcome_.done;
  }

  void OnEnd(int rank, const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      outcome_.results.resize(static_cast<size_t>(args_.ranks));
      outcome_.results[static_cast<size_t>(rank)] = status;
    }
    if (!status.ok() && CodeOf(status) != ExitCode::kStopped) {
      for (CommandBox& each : boxes_) {
        each.Close(absl::AbortedError("a peer is lost"));
      }
    }
  }

 private:
  const EpochArgs& args_;
  const plan::SavePlan save_plan_;
  std::vector<CommandBox> boxes_;
  Mutex mutex_;
  EpochOutcome outcome_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::map<int, std::string>> records_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<ckpt::Seal>> seals_ ABSL_GUARDED_BY(mutex_);
};

class RankReporter final : public Reporter {
 public:
  RankReporter(Supervisor& supervisor, int rank) : supervisor_(supervisor), rank_(rank) {}

  absl::Status Publish(const std::string& group, const std::string& record) override {
    supervisor_.OnRecord(rank_, group, record);
    return absl::OkStatus();
  }
  absl::Status Ready(const TrainerReady& report) override {
    supervisor_.OnReady(report);
    return absl::OkStatus();
  }
  absl::Status Step(const StepReport& record) override {
    supervisor_.OnStep(record);
    return absl::OkStatus();
  }
  absl::Status Progress(const ProgressReport&) override { return absl::OkStatus(); }
  absl::Status Ledger(const LedgerReport&) override { return absl::OkStatus(); }
  absl::Status SaveFailed(const ravel::SaveFailed& failure) override {
    supervisor_.OnSaveFailed(failure);
    return absl::OkStatus();
  }
  absl::Status SaveStarted(int64_t step, int64_t, int64_t) override {
    supervisor_.OnSaveStarted(rank_, step);
    return absl::OkStatus();
  }
  absl::Status Sealed(const ckpt::Seal& seal) override {
    supervisor_.OnSeal(seal);
    return absl::OkStatus();
  }
  absl::Status Failed(const absl::Status&) override { return absl::OkStatus(); }
  absl::Status Done(int64_t) override {
    supervisor_.OnDone();
    return absl::OkStatus();
  }

 private:
  Supervisor& supervisor_;
  const int rank_;
};

}  // namespace

EpochOutcome RunEpoch(const EpochArgs& args) {
  plan::JobSpec spec = *plan::ResolveBatch(args.spec);
  spec.checkpoint.wait_when_busy = args.wait_for_saves;
  const plan::ShardingPlan plan = *plan::BuildShardingPlan(
      {.spec = spec, .ranks = args.ranks, .shared_memory = args.transport == "shm"});
  if (!args.checkpoint_root.empty()) {
    store::FileStore root(args.checkpoint_root);
    EXPECT_TRUE(root.MakeRoot().ok());
    root.Put(ckpt::kOwnerFile, "uid").IgnoreError();  // from an epoch before
  }
  Supervisor supervisor(args, plan);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < args.ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const Assignment assignment = {.job_uid = "uid",
                                     .epoch = args.epoch,
                                     .rank = rank,
                                     .world_size = args.ranks,
                                     .spec = spec,
                                     .plan = plan,
                                     .transport = args.ranks == 1 ? "local" : args.transport,
                                     .gpu = args.gpu,
                                     .restore_path = args.restore_path,
                                     .checkpoint_root = args.checkpoint_root,
                                     .first_step = args.first_step,
                                     .host_address = "127.0.0.1",
                                     .save_at_start = args.save_at_start,
                                     .save_at_end = true,
                                     .save_plan_hash = args.save_plan_hash,
                                     .release = args.release};
      RankReporter reporter(supervisor, rank);
      Position position(SystemClock::Get());
      Trainer trainer({.assignment = assignment,
                       .reporter = reporter,
                       .box = supervisor.box(rank),
                       .position = position,
                       .clock = SystemClock::Get(),
                       .communicator_changed = [](comm::Communicator*) {},
                       .beat = [] {}});
      supervisor.OnEnd(rank, trainer.Run());
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return supervisor.Take();
}

}  // namespace ravel::trainer
