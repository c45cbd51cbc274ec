#pragma once

// The invariants of the control plane, looked at with every transaction, every launch, every
// commit, and at the end. What is broken is kept as text; the first one ends the simulation.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/store/memory_job_store.h"

namespace ravel::coordinator::simulation {

class Daemon;
class World;
struct Trainer;

class Checks {
 public:
  explicit Checks(World& world) : world_(world) {}

  void Fail(const std::string& what);
  void Expect(bool holds, std::string_view what) {
    if (!holds) {
      Fail(std::string(what));
    }
  }
  const std::string& broken() const { return broken_; }

  // Around each transaction.
  void BeforeApply(const MemoryJobStore::Disk& disk, const StoreChange& change);
  void AfterApply(const StoreChange& change);
  // What the coordinator sends, and what a daemon does.
  void OnLaunchSent(const MemoryJobStore::Disk& disk, const Launch& launch);
  // `over`: the newest epoch of the job that the daemon was told is over.
  void OnDaemonLaunches(Daemon& daemon, const Launch& launch, int64_t over);
  void OnRecords(const Trainer& trainer, const CommRecordSet& set);
  void OnPlan(const Launch& launch, const std::string& bytes);
  void OnRejected(const std::string& node, const std::string& reason);
  void OnStaleTermRefused() { ++stale_terms_; }
  // The checkpoint store commits these shards.
  void OnStoreCommit(const std::string& job,
                     const SaveRequest& request,
                     const std::map<int64_t, uint64_t>& shards,
                     bool settles);
  // The checkpoint store has moved the steps above this one aside.
  void OnMovedAside(const std::string& job, int64_t step);
  // Answers that clients were given.
  void OnSubmitted(const std::string& request, const std::string& uid);
  void OnCancelled(const std::string& uid);
  void OnRetryAsked(const std::string& uid);
  void OnDeleted(const std::string& uid);
  void OnOperation(const std::string& request, const OperationRecord& operation);
  void AfterRestart(const MemoryJobStore::Disk& disk);
  // Everything healed and the time is up, or all jobs are over.
  void AtTheEnd(const MemoryJobStore::Disk& disk);

  int64_t stale_terms() const { return stale_terms_; }
  int64_t looked() const { return looked_; }

 private:
  void CheckJob(const MemoryJobStore::Disk& disk, const JobRecord& next, const StoreChange& change);
  void CheckSave(const MemoryJobStore::Disk& disk, const SaveRecord& next);
  void CheckHistory(const JobRecord& job);
  bool IsToldMissing(const std::string& uid, int64_t step) const;

  World& world_;
  std::string broken_;
  std::map<std::string, std::string> submitted_;       // uid by request
  std::map<std::string, OperationRecord> operations_;  // by request
  std::set<std::string> cancelled_;                    // uids
  std::set<std::string> deleted_;                      // uids
  // Which epoch trained each step of a job's committed lineage.
  std::map<std::string, std::map<int64_t, int64_t>> commits_;      // by job name: epoch by step
  std::map<std::string, std::map<int64_t, int64_t>> first_steps_;  // by uid: by epoch
  int64_t newest_event_ = 0;
  int64_t newest_version_ = 0;
  int64_t stale_terms_ = 0;
  int64_t looked_ = 0;
};

}  // namespace ravel::coordinator::simulation
