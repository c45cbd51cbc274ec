#pragma once

// What the controller knows, in numbers, at one moment: plain values, which pages render off the
// strand.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/step_record.h"
#include "coordinator/jobs/goodput.h"
#include "coordinator/jobs/step_speed.h"
#include "coordinator/store/job_record.h"

namespace ravel::coordinator {

// Counts by a word of others, of which it keeps the first kMost: whatever comes then is `other`.
class BoundedCounts {
 public:
  static constexpr size_t kMost = 64;
  void Add(const std::string& word, int64_t count = 1) {
    const bool room = counts_.contains(word) || counts_.size() < kMost;
    counts_[room ? word : "other"] += count;
  }
  const std::map<std::string, int64_t>& counts() const { return counts_; }

 private:
  std::map<std::string, int64_t> counts_;
};

// Since this coordinator started.
struct ControllerCounts {
  BoundedCounts restarts;       // ended epochs, by reason
  BoundedCounts save_failures;  // by reason
  int64_t commits = 0;
  int64_t nodes_lost = 0;
};

// Of one job's steps, since this coordinator started; the values are the newest.
struct JobMeter {
  int64_t steps = 0;
  int64_t tokens = 0;
  int64_t skipped_steps = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  int64_t planned_bytes = 0;  // of rank 0
  int64_t measured_bytes = 0;
  int64_t devices = 0;  // that made the newest step
  StepSeconds step_seconds = {};
  SpeedScale scale = {};  // of the newest step's epoch
};

// `last_step`: that was reported before, or restored.
void NoteStep(JobMeter& meter, const StepRecord& record, int64_t last_step);

TrainedStep TrainedStepOf(const StepRecord& record);

// One job that is not over, or ended less than kMetricsLingerMs ago.
struct JobMetrics {
  std::string namespace_name;
  std::string name;
  JobState state = JobState::kQueued;
  std::string numerics;  // common/plan/numerics.h
  bool quantized = false;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t wanted_devices = 0;
  int64_t devices = 0;  // held
  int64_t step = 0;
  int64_t target_steps = 0;
  int64_t restarts = 0;
  bool any_step = false;  // what follows is known
  double loss = 0;
  double tokens_per_second = 0;
  double eta_seconds = -1;
  JobMeter meter;
  double progress_age_seconds = -1;  // of what trains or starts: since something moved
  double queue_wait_seconds = -1;    // of what waits for devices
  int64_t committed_step = -1;
  double checkpoint_age_seconds = -1;  // of the newest commit, or of training without one
  bool checkpoint_fresh = true;        // the condition CheckpointFresh
  int64_t failed_saves = 0;
  int64_t skipped_saves = 0;
  double goodput_ratio = -1;
  double accounted_device_seconds = 0;
  std::vector<std::pair<std::string, double>> device_seconds = {};  // by DeviceTimeName
};
inline constexpr int64_t kMetricsLingerMs = 600'000;
// Jobs beyond that have no series of their own.
inline constexpr size_t kMostMetricsJobs = 500;

struct ControllerMetrics {
  std::string cluster_id;
  int64_t term = 0;
  std::map<std::string, int64_t> jobs;   // by state, all states
  std::map<std::string, int64_t> nodes;  // by state, all states
  // By kind and use: held, free, or away (on nodes that take no work now).
  std::map<std::pair<std::string, std::string>, int64_t> devices;
  double beat_age_seconds = 0;    // of the connected node that was silent for longest
  double queue_wait_seconds = 0;  // of the job that waits for longest
  int64_t stale_refused = 0;
  int64_t open_operations = 0;
  ControllerCounts counts;
  std::vector<JobMetrics> by_job;
  int64_t jobs_without_series = 0;
};

}  // namespace ravel::coordinator
