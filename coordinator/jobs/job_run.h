#pragma once

// The present state of a job's trainers. In memory only: a restarted coordinator begins anew.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/fleet/collective_watch.h"
#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/fleet/rendezvous_board.h"
#include "coordinator/fleet/step_times.h"
#include "coordinator/jobs/admission.h"
#include "coordinator/jobs/goodput.h"
#include "coordinator/jobs/planner.h"
#include "coordinator/jobs/restart_budget.h"

namespace ravel::coordinator {

// One rank of the launched epoch.
struct TrainerSlot {
  RankPlace place;
  bool ready = false;
  bool done = false;          // said Done: its exit code 0 is a success
  bool exited = false;        // or lost with its node
  bool seen = false;          // its node has said that it holds it
  bool remarked = false;      // its TrainerReady was heard
  bool stopped = false;       // exit code 10: as told
  std::string failed_reason;  // of its TrainerFailed frame
  std::string failed_message;
  int64_t step = 0;
  std::string phase;
  int64_t phase_age_ms = 0;
  std::string state;    // newest that its node said: launching, starting, ready, running, ...
  TrainerHas has;       // what it was told, as its node says
  int64_t told_ms = 0;  // monotonic: newest command; what is missing is sent again some time later
  int64_t ordered = 0;  // id of the newest order to launch or to stop it
  int64_t moved_bytes = 0;  // of the phase's: data that is fetched, state that is restored
};

enum class RunPhase {
  kIdle,           // no trainers; may be placed
  kAdopting,       // of the coordinator before: its nodes have not all returned
  kPreparing,      // finding the restore point and planning, off the strand
  kBootstrapping,  // launched, not all READY
  kTraining,       // Run sent
  kQuiescing       // stopping: waits for exits
};

// Used only from the controller's strand.
struct JobRun {
  RunPhase phase = RunPhase::kIdle;
  bool launch_waits = false;  // for its record to be durable: no node was told to launch
  int64_t epoch = 0;          // of the trainers, which may be older than the record's
  std::vector<TrainerSlot> slots;
  std::string transport;
  // Shared with the plan cache and with commits that outlive the run.
  std::shared_ptr<const PlannedWorld> world;
  int64_t restore_step = -1;
  std::string restore_path;
  double restore_seconds = 0;    // of the rank that took longest to read its state
  int64_t until_step = -1;       // horizon: ranks may go so far without hearing more
  int64_t until_granted_at = 0;  // the step at which it was granted
  bool then_stop = false;        // the newest save that was asked for is the last thing to do
  int64_t reported_step = -1;    // newest step in the job's history that this epoch reported
  RendezvousBoard board;
  std::vector<JobEventRecord> remarks;  // of ranks that are ready; recorded when all are
  CollectiveWatch collectives;
  StepTimes step_times;

  std::optional<FailureCause> failure;  // the most telling so far
  // Nodes of this run that have said they go away: what their leaving causes costs nothing.
  std::set<std::string> draining;
  bool last_step_done = false;
  int64_t phase_since_ms = 0;    // monotonic
  int64_t progress_ms = 0;       // monotonic: newest sign that the run moves
  int64_t quiesce_since_ms = 0;  // monotonic: when the trainers were told to stop
  bool killed = false;           // told once more, without grace

  int64_t sequence = 0;                  // of the newest SaveTrainer
  int64_t save_ms = 0;                   // monotonic: newest save that was asked for or committed
  int64_t trained_since_ms = 0;          // wall time of Run
  int committing = 0;                    // commits on the pool; outlives the epoch
  std::optional<int64_t> grow_since_ms;  // monotonic: since when a larger size would fit

  bool AllExited() const {
    for (const TrainerSlot& slot : slots) {
      if (!slot.exited) {
        return false;
      }
    }
    return true;
  }
  bool HasTrainersOn(const std::string& node_id) const {
    for (const TrainerSlot& slot : slots) {
      if (!slot.exited && slot.place.node_id == node_id) {
        return true;
      }
    }
    return false;
  }
  bool AllReady() const {
    for (const TrainerSlot& slot : slots) {
      if (!slot.ready) {
        return false;
      }
    }
    return !slots.empty();
  }
  void Blame(FailureCause cause) {
    cause.starting = phase == RunPhase::kPreparing || phase == RunPhase::kBootstrapping;
    const bool echo = CauseWeight(cause.reason) < CauseWeight("NodeLost") && !draining.empty();
    if (echo || (cause.reason == "NodeLost" && draining.contains(cause.node))) {
      cause.reason = "NodeDrain";
    }
    if (!failure || CauseWeight(cause.reason) > CauseWeight(failure->reason)) {
      failure = std::move(cause);
    }
  }
};

// An order to launch a rank that was sent to its node.
struct SentLaunch {
  std::string job_uid;
  int64_t epoch = 0;
  std::string node_id;
};

// Progress that people see beside the record.
struct JobProgress {
  int64_t step = 0;
  double loss = 0;
  double first_loss = 0;
  double tokens_per_second = 0;
  double step_seconds = 0;  // smoothed
  bool any = false;
};

struct JobView {
  JobRecord record;
  JobProgress progress;
  double eta_seconds = -1;
  int64_t failed_saves = 0;
  int64_t skipped_saves = 0;  // since the coordinator started
  std::vector<JobCondition> conditions = {};
  Goodput goodput = {};
  std::string start = {};  // WhatStarts, for whoever asks once: it changes with every beat
};

}  // namespace ravel::coordinator
