#pragma once

// A coordinator, its fleet, its disks and its users on virtual time: everything that happens
// follows from the seed. The controller is the real one; see README.md for what stands around it.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <absl/strings/str_cat.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/simulation/checks.h"
#include "tests/coordinator/simulation/daemon.h"
#include "tests/coordinator/simulation/events.h"
#include "tests/coordinator/simulation/gang.h"
#include "tests/coordinator/simulation/network.h"
#include "tests/coordinator/simulation/settings.h"
#include "tests/coordinator/simulation/stores.h"

namespace ravel::coordinator::simulation {

// Work of one coordinator process, in order, each after some time.
class SimulatedExecutor : public Executor {
 public:
  using Run = std::function<void(std::function<void()>)>;
  SimulatedExecutor(Events& events, std::function<int64_t()> takes_us, Run run)
      : events_(events), takes_us_(std::move(takes_us)), run_(std::move(run)) {}
  void Post(std::function<void()> work) override;
  void Clear() {
    queue_.clear();
    ++generation_;
    busy_ = 0;
  }
  void set_threads(int threads) { threads_ = threads; }

 private:
  void Next();

  Events& events_;
  const std::function<int64_t()> takes_us_;
  const Run run_;
  std::deque<std::function<void()>> queue_;
  uint64_t generation_ = 0;
  int busy_ = 0;
  int threads_ = 1;
};

class World : public FleetLink {
 public:
  explicit World(Settings settings);
  ~World() override;

  // Until all is over or something is broken; what is broken, or nothing.
  std::string Run();
  // The newest lines of what happened, when settings.trace.
  const std::deque<std::string>& trace() const { return trace_; }
  int64_t faults_done() const { return faults_done_; }
  int64_t succeeded() const;
  // Steps that were trained again by a later epoch.
  int64_t repeated_steps() const { return repeated_steps_; }

  // What the parts use.
  Events& events() { return events_; }
  Random& random() { return random_; }
  Network& network() { return network_; }
  Checks& checks() { return checks_; }
  SimulatedCheckpoints& checkpoints() { return checkpoints_; }
  const MemoryJobStore::Disk& disk() const { return disk_; }
  Bug bug() const { return settings_.bug; }
  template <typename... Parts>
  void Trace(const Parts&... parts) {
    if (settings_.trace) {
      AddTrace(absl::StrCat(parts...));
    }
  }
  StreamId OpenStream(Daemon& daemon);
  void FetchPlan(const Launch& launch, std::function<void(bool here, bool found)> done);
  plan::JobSpec SpecOf(const std::string& planned) { return *planner_.DecodeSpec(planned); }
  Gang& GangOf(const Trainer& trainer) { return gangs_[{trainer.job_uid, trainer.epoch}]; }
  int64_t StepUs(const Trainer& trainer);
  void OnTrainerStarted(Daemon& daemon, const Trainer& trainer);
  // Its peers may see that their connections broke.
  void OnTrainerGone(const Trainer& trainer, bool abnormal);
  void OnStepDone(const Trainer& trainer);  // of rank 0
  std::string JobName(const std::string& uid) const;
  bool CancelWasAsked(const std::string& uid) const;
  bool DeleteWasAsked(const std::string& uid) const;
  int64_t StepsOf(const std::string& uid);
  std::vector<StepRecord> History(const std::string& uid);
  bool reports_may_be_lost() const { return reports_may_be_lost_; }
  void CheckFleetAtTheEnd();

  // FleetLink.
  void Send(StreamId stream, DownMessage message) override;
  void Close(StreamId stream) override;

 private:
  struct Client {  // of one job
    plan::JobSpec spec;
    std::string uid;  // once acknowledged
    int64_t submit_at_us = 0;
    int64_t cancel_at_us = -1;
    int64_t save_at_us = -1;
    int64_t delete_at_us = -1;
    bool delete_by_force = false;
    bool delete_checkpoints = false;
    int64_t rollback_at_us = -1;
    int64_t rollback_step = -1;  // what is asked for, until that is answered
    bool retries = false;        // once it is cancelled
    bool cancel_asked = false;
    bool cancelled = false;  // acknowledged, and not tried again
    bool delete_asked = false;
  };

  // world.cc
  void AddTrace(std::string line);
  void StartCoordinator();
  void KillCoordinator(const std::string& why);
  void CoordinatorDo(const std::function<void()>& work);  // a crash in it ends the process
  void Ticks(uint64_t process);
  void OnUp(StreamId stream, const Network::Up& message);
  Daemon* DaemonOf(StreamId stream);
  bool AllOver();
  bool IsOver(const Client& client) const;

  // clients.cc
  // A request under way. Unanswered when its process dies, it is asked again.
  struct Question {
    uint64_t process = 0;
    bool answered = false;
  };
  using Asked = std::shared_ptr<Question>;
  using Verb = void (World::*)(size_t, const Asked&);
  void PlanJobs();
  plan::JobSpec MakeSpec(int64_t number);
  SubmitDraft DraftOf(const Client& client, const std::string& request);
  void Submit(size_t client, const Asked& asked);
  void OnSubmitted(size_t client, const absl::StatusOr<JobView>& view);
  void Cancel(size_t client, const Asked& asked);
  void OnCancelled(size_t client, const absl::StatusOr<JobView>& view);
  void Retry(size_t client, const Asked& asked);
  void OnRetried(size_t client, const absl::Status& status);
  void Delete(size_t client, const Asked& asked);
  void OnDeleted(size_t client, const absl::Status& status);
  void Rollback(size_t client, const Asked& asked);
  void AskController(size_t client, const std::string& path, const Asked& asked);
  void OnRolledBack(size_t client, const absl::Status& status);
  void SaveNow(size_t client, const Asked& asked);
  void OnSaveNow(size_t client, const absl::StatusOr<OperationRecord>& operation);
  void Ask(size_t client, int64_t at_us, Verb verb);
  void AskAgainAfterCrash(size_t client, Verb verb, const Asked& asked);

  // faults.cc
  void FaultLater();
  void Inject(Fault fault);
  void InjectStream(Fault fault);
  void InjectNode(Fault fault);
  void InjectTrainer(Fault fault);
  void InjectCoordinator(Fault fault);
  void InjectStore(Fault fault);
  void RestartLater(Daemon& daemon);
  void ReleaseNodes();
  void Heal();
  Daemon& AnyDaemon();

  const Settings settings_;
  Events events_;
  Random random_;
  Checks checks_;
  Network network_;
  std::map<std::string, std::unique_ptr<Daemon>> daemons_;
  std::map<StreamId, Daemon*> daemon_of_;
  std::map<std::pair<std::string, int64_t>, Gang> gangs_;
  std::map<std::pair<std::string, int64_t>, std::map<int64_t, Daemon*>> members_;

  MemoryJobStore::Disk disk_;
  DiskWeather disk_weather_;
  SimulatedPlanner planner_;
  SimulatedCheckpoints checkpoints_;
  std::string folder_;

  SimulatedExecutor strand_;
  SimulatedExecutor pool_;
  std::unique_ptr<SimulatedJobStore> store_;
  std::unique_ptr<SimulatedStoreWriter> writer_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<LogStore> logs_;
  std::unique_ptr<JobController> controller_;
  uint64_t process_ = 0;  // number of the coordinator's process
  int64_t frozen_until_us_ = 0;
  int64_t ids_ = 0;

  std::vector<Client> clients_;
  std::map<std::string, std::map<int64_t, int64_t>> trained_;  // by uid: epoch by step
  int64_t repeated_steps_ = 0;
  bool healed_ = false;
  int64_t faults_done_ = 0;
  bool reports_may_be_lost_ = false;
  std::deque<std::string> trace_;
};

}  // namespace ravel::coordinator::simulation
