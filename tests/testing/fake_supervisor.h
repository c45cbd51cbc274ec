#pragma once

// Plays daemon and coordinator for trainers that run as threads: passes on rendezvous records, lets
// them run when all are ready, commits when all have sealed.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/ckpt/manifest.h"
#include "common/model/job_spec.h"
#include "common/mutex.h"
#include "common/store/object_store.h"
#include "worker/trainer/command_box.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// One epoch of a job.
struct EpochArgs {
  plan::JobSpec spec;
  int ranks = 1;
  std::string transport = "shm";  // or gloo, nccl; local for one rank
  int64_t epoch = 1;
  std::string checkpoint_root;
  std::string restore_path;
  int64_t first_step = 0;
  int64_t gpu = 0;  // of every rank
  bool save_at_start = false;
  // Steps are so short that a save would find the one before unfinished, and be skipped.
  bool wait_for_saves = true;
  // Asks for a save that stops the run when this many steps are reported; -1: never.
  int64_t stop_after_step = -1;
  std::string save_plan_hash = {};  // as the coordinator would say it
  std::string release = {};         // of the daemon
};

struct EpochOutcome {
  std::vector<absl::Status> results;  // by rank
  std::vector<StepReport> steps;      // as reported by rank 0
  std::vector<TrainerReady> ready;
  std::map<int64_t, std::string> committed;  // step -> directory
  std::vector<absl::Status> commit_errors;
  std::vector<int64_t> saves_started;  // steps, as told by rank 0
  std::vector<SaveFailed> save_failures;
  int done = 0;
};

EpochOutcome RunEpoch(const EpochArgs& args);

}  // namespace ravel::trainer
