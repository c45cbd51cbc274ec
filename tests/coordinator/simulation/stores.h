#pragma once

// The durable things of a simulation: the coordinator's database, the checkpoint store, plans. They
// outlive every coordinator; what was not durable at a crash is gone.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "coordinator/jobs/planner.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/store/memory_job_store.h"
#include "coordinator/store/store_writer.h"
#include "tests/coordinator/simulation/settings.h"

namespace ravel::coordinator::simulation {

class Checks;

// Thrown through the controller where its process dies: nothing after that point happens.
struct CoordinatorCrash {};

// What the disks do now; faults change it.
struct DiskWeather {
  bool full = false;
  double error_rate = 0;
  double crash_before_rate = 0;
  double crash_after_rate = 0;
  int64_t write_us = 20'000;  // a commit takes at most so long, one in twenty ten times that
};

// One coordinator's way to the database.
class SimulatedJobStore : public JobStore {
 public:
  SimulatedJobStore(
      MemoryJobStore::Disk* disk, DiskWeather& weather, Random& random, Checks& checks, Bug bug)
      : inner_(disk),
        disk_(*disk),
        weather_(weather),
        random_(random),
        checks_(checks),
        bug_(bug) {}
  absl::StatusOr<LoadedState> Open() override { return inner_.Open(); }
  absl::Status Apply(const StoreChange& change) override;
  absl::Status BeginGroup() override;
  absl::Status CommitGroup() override;
  absl::StatusOr<std::optional<RequestRecord>> FindRequest(const std::string& id) override {
    return inner_.FindRequest(id);
  }
  absl::StatusOr<int64_t> SweepJob(const std::string& job_uid,
                                   const RowRetention& policy) override {
    return inner_.SweepJob(job_uid, policy);
  }
  absl::StatusOr<int64_t> SweepRequests(const RowRetention& policy) override {
    return inner_.SweepRequests(policy);
  }
  absl::StatusOr<std::vector<JobEventRecord>> Events(const std::string& job_uid,
                                                     int64_t after,
                                                     int64_t limit) override {
    return inner_.Events(job_uid, after, limit);
  }
  // Bug::kAnswerBeforeDurable: what a crash takes away.
  const std::optional<MemoryJobStore::Disk>& not_durable() const { return before_; }

 private:
  // The error of this write or commit, if it fails now.
  absl::Status Weather();
  absl::Status Commit(const std::vector<StoreChange>& changes);

  MemoryJobStore inner_;
  MemoryJobStore::Disk& disk_;
  DiskWeather& weather_;
  Random& random_;
  Checks& checks_;
  const Bug bug_;
  std::optional<MemoryJobStore::Disk> before_;
  std::optional<std::vector<StoreChange>> group_;  // not committed yet
};

// The writer's thread on virtual time: what is queued when a commit ends is the next group, which
// takes its time, and fails or is lost in a crash as a whole.
class SimulatedStoreWriter : public StoreWriter {
 public:
  // `on_thread` runs work of the coordinator's process, `post` posts to its strand.
  using Run = std::function<void(std::function<void()>)>;
  SimulatedStoreWriter(Events& events,
                       Random& random,
                       JobStore* store,
                       const DiskWeather& weather,
                       Bug bug,
                       Run on_thread,
                       Run post)
      : events_(events),
        random_(random),
        store_(store),
        weather_(weather),
        bug_(bug),
        on_thread_(std::move(on_thread)),
        post_(std::move(post)) {}
  ~SimulatedStoreWriter() override { *alive_ = false; }
  void Add(StoreWrite write) override;

 private:
  void Next();

  Events& events_;
  Random& random_;
  JobStore* store_;
  const DiskWeather& weather_;
  const Bug bug_;
  const Run on_thread_;
  const Run post_;
  std::deque<StoreWrite> queue_;
  bool busy_ = false;
  // Events of this writer end with it.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

struct StoreWeather {
  bool down = false;           // every call fails
  double crash_rate = 0;       // of the coordinator, before or after the deed
  int64_t write_us = 100'000;  // a shard takes at most so long
};

// The store of all jobs: attempts with their shards, committed steps.
class SimulatedCheckpoints : public CheckpointKeeper {
 public:
  SimulatedCheckpoints(Random& random, Checks& checks, Bug bug)
      : random_(random), checks_(checks), bug_(bug) {}

  // For trainers.
  absl::StatusOr<uint64_t> Read(const std::string& path, int64_t first_step) const;
  absl::Status WriteShard(const std::string& root,
                          int64_t step,
                          int64_t epoch,
                          int64_t attempt,
                          int64_t rank,
                          int64_t world_size,
                          uint64_t weights);
  int64_t WriteUs() { return random_.Between(1000, weather.write_us); }

  std::string Root(const plan::JobSpec& spec) const override { return "/ckpt/" + spec.name; }
  absl::Status Check(const CheckpointJob& /*job*/) override { return Reachable(); }
  absl::Status PinStart(const CheckpointJob& /*job*/, int64_t /*for_seconds*/) override {
    return Reachable();
  }
  absl::StatusOr<CommittedSave> Commit(const CheckpointJob& job,
                                       const SaveRequest& request) override;
  absl::StatusOr<std::optional<CommittedSave>> Settle(const CheckpointJob& job,
                                                      const SaveRequest& request) override;
  absl::StatusOr<RestorePoint> PrepareRestore(const CheckpointJob& job,
                                              const RestoreQuery& query) override;
  void EndRestore(const std::string& /*job_uid*/) override {}
  absl::StatusOr<std::string> CheckRollback(const CheckpointJob& job, int64_t step) override;
  absl::StatusOr<StepVerdict> Condemn(const CheckpointJob& job,
                                      int64_t step,
                                      const std::string& reason) override;
  absl::StatusOr<std::vector<int64_t>> Retain(const CheckpointJob& job,
                                              int64_t in_use_step) override;
  absl::StatusOr<std::optional<SettledSave>> Release(const CheckpointJob& job,
                                                     const RestoreQuery& query) override;
  absl::Status Mark(const CheckpointJob& /*job*/,
                    int64_t /*step*/,
                    MarkChange /*change*/,
                    const std::string& /*reason*/) override {
    return Reachable();
  }
  absl::StatusOr<FolderView> Look(const CheckpointJob& job,
                                  const std::set<std::string>& known_saves) override;
  absl::Status RemoveAll(const CheckpointJob& job) override;

  absl::Status RemoveAttempt(const CheckpointJob& job, ckpt::AttemptKey key) override;

  // The newest step that can be restored; -1: none.
  int64_t NewestGood(const std::string& root) const;
  // The coordinator's process ends, and with it what it knew.
  void ForgetWanted() { wanted_.clear(); }
  std::vector<int64_t> GoodBelow(const std::string& root, int64_t step) const;
  int64_t Attempts(const std::string& root) const;
  void CorruptNewest(const std::string& root);
  bool WasCorrupted(const std::string& root) const { return damaged_.contains(root); }

  StoreWeather weather;

 private:
  using AttemptKey = std::tuple<int64_t, int64_t, int64_t>;  // step, epoch, save attempt
  struct Step {
    int64_t epoch = 0;
    int64_t attempt = 0;
    uint64_t weights = 0;
    bool corrupt = false;
    bool bad = false;
  };
  struct Attempt {
    int64_t world_size = 0;
    std::map<int64_t, uint64_t> shards;  // weights by rank
  };
  struct Folder {
    std::map<AttemptKey, Attempt> attempts;
    std::map<int64_t, Step> steps;
  };

  absl::Status Reachable() const;
  void MaybeCrash();
  absl::StatusOr<CommittedSave> CommitComplete(const plan::JobSpec& spec,
                                               const SaveRequest& request,
                                               bool settles = false);

  Random& random_;
  Checks& checks_;
  const Bug bug_;
  std::map<std::string, Folder> folders_;
  std::set<std::string> damaged_;
  std::map<std::string, std::set<int64_t>> wanted_;  // by rollbacks, by uid
};

// Specs are numbered; a plan is its size, under a digest of its own.
class SimulatedPlanner : public Planner {
 public:
  explicit SimulatedPlanner(Bug bug) : bug_(bug) {}
  absl::StatusOr<std::shared_ptr<const PlannedWorld>> Plan(const plan::JobSpec& spec,
                                                           int64_t ranks,
                                                           bool shared_memory) override;
  std::shared_ptr<const PlannedWorld> Find(const std::string& digest) override;
  std::string EncodeSpec(const plan::JobSpec& spec) override;
  absl::StatusOr<plan::JobSpec> DecodeSpec(const std::string& planned) override;
  // The plan cache of a coordinator goes with it.
  void Forget() { plans_.clear(); }

 private:
  const Bug bug_;
  std::vector<plan::JobSpec> specs_;
  std::map<std::string, std::shared_ptr<const PlannedWorld>> plans_;  // by digest
};

}  // namespace ravel::coordinator::simulation
