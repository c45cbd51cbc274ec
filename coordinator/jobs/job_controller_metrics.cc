// JobController: what it knows, in numbers, and where the time of devices goes; rank 0's steps.
// Measure runs on the strand at each scrape: it walks over jobs and nodes once and copies what a
// page needs of at most kMostMetricsJobs jobs. NoteDeviceTime is called whenever a job's devices or
// their use may have changed, and costs nothing when they have not.

#include <algorithm>
#include <array>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/model/job_spec.h"
#include "common/plan/numerics.h"
#include "common/signed_size.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/store/complaint.h"

namespace ravel::coordinator {
namespace {

// The ledger of a job that trains is written that often, beside its changes.
constexpr int64_t kGoodputEveryMs = 15'000;

constexpr std::array<const char*, 7> kNodeStates = {
    "READY", "SUSPECT", "LOST", "LEFT", "DRAINING", "DRAINED", "QUARANTINED"};

double SecondsSince(int64_t then_ms, int64_t now_ms) {
  return static_cast<double>(std::max<int64_t>(now_ms - then_ms, 0)) / 1000;
}

int64_t HeldDevices(const JobRun& run) {
  return run.phase == RunPhase::kIdle
             ? 0
             : std::count_if(run.slots.begin(), run.slots.end(), [](const TrainerSlot& slot) {
                 return !slot.exited;
               });
}

DeviceUse TrainingUse(JobState state, DeviceUse otherwise) {
  switch (state) {
    case JobState::kRunning:
      return DeviceUse::kTraining;
    case JobState::kResizing:
      return DeviceUse::kReshaping;
    case JobState::kFinishing:
      return DeviceUse::kFinishing;
    default:
      return otherwise;
  }
}

DeviceUse UseOf(const JobRecord& record, const JobRun& run) {
  if (record.state == JobState::kSucceeded) {
    return DeviceUse::kFinishing;  // its trainers leave
  }
  if (record.state == JobState::kStopping || IsTerminal(record.state)) {
    return DeviceUse::kStopping;
  }
  if (run.phase == RunPhase::kQuiescing || run.failure) {
    return DeviceUse::kDraining;
  }
  if (run.phase == RunPhase::kTraining) {
    return TrainingUse(record.state, DeviceUse::kTraining);
  }
  return run.phase == RunPhase::kAdopting ? TrainingUse(record.state, DeviceUse::kStarting)
                                          : DeviceUse::kStarting;
}

}  // namespace

void NoteStep(JobMeter& meter, const StepRecord& record, int64_t last_step) {
  const int64_t steps = std::max<int64_t>(record.step - last_step, 1);  // logEvery
  meter.steps += steps;
  meter.tokens += steps * record.tokens;
  meter.skipped_steps += record.skipped ? 1 : 0;
  meter.grad_norm = record.grad_norm;
  meter.learning_rate = record.lr;
  meter.planned_bytes = record.planned_bytes;
  meter.measured_bytes = record.measured_bytes;
  meter.devices = record.world_size;
  meter.step_seconds.Add(record.step_seconds);
}

TrainedStep TrainedStepOf(const StepRecord& record) {
  return {.step = record.step,
          .seconds = record.step_seconds,
          .skipped = record.skipped,
          .evaluated = record.has_validation_loss,
          .time_ms = record.time_ms};
}

void JobController::NoteDeviceTime(Entry& entry) {
  const int64_t devices = HeldDevices(entry.run);
  const int64_t before = entry.goodput.devices();
  if (devices == 0 && before == 0) {
    return;
  }
  entry.goodput.Observe(parts_.clock->MonotonicMs(),
                        devices,
                        devices > 0 ? UseOf(entry.record, entry.run) : DeviceUse::kNone);
  if (devices == 0 && IsTerminal(entry.record.state)) {
    WriteGoodput(entry);  // no other change of the job follows
  }
}

void JobController::LoadGoodput(Entry& entry, const GoodputRow& row) {
  entry.goodput.Load(row,
                     parts_.clock->MonotonicMs(),
                     parts_.clock->WallMs(),
                     HoldsDevices(entry.record.state)
                         ? TrainingUse(entry.record.state, DeviceUse::kStarting)
                         : DeviceUse::kNone);
}

void JobController::WriteGoodput(Entry& entry) {
  entry.goodput_saved_ms = parts_.clock->MonotonicMs();
  const auto change = std::make_shared<StoreChange>();
  change->goodput.push_back(entry.goodput.Row(entry.record.uid, parts_.clock->WallMs()));
  Persist(change, [](const absl::Status& /*status*/) {
    // What a full disk did not take is written again with the next one.
  });
}

void JobController::SaveGoodput(Entry& entry) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  NoteDeviceTime(entry);
  if (entry.goodput.devices() == 0 || now_ms - entry.goodput_saved_ms < kGoodputEveryMs) {
    return;
  }
  WriteGoodput(entry);
}

void JobController::NoteTrained(Entry& entry, const StepRecord& record) {
  NoteDeviceTime(entry);
  entry.goodput.Report(TrainedStepOf(record));
  if (entry.meter.scale.epoch == record.epoch) {
    return;
  }
  std::vector<std::string> models;
  for (const TrainerSlot& slot : entry.run.slots) {
    const NodeRecord* node = membership_.Find(slot.place.node_id);
    const size_t device = Size(slot.place.device);
    models.push_back(node != nullptr && device < node->facts.devices.size()
                         ? node->facts.devices[device].model
                         : "");
  }
  entry.meter.scale = SpeedScaleOf(entry.record.spec, record.epoch, models);
}

void JobController::CountEvent(const JobEventRecord& event) {
  if (event.type == "EpochChanged") {
    // A word of a newer trainer counts as what it is taken for.
    counts_.restarts.Add(std::string(FindFailureReason(event.reason).name));
  } else if (event.type == "CheckpointFailed") {
    counts_.save_failures.Add(event.reason);
  } else if (event.type == "CheckpointCommitted") {
    ++counts_.commits;
  }
}

JobMetrics JobController::MeasureJob(const Entry& entry) const {
  const JobRecord& record = entry.record;
  const JobProgress& progress = entry.progress;
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const int64_t wall_ms = parts_.clock->WallMs();
  JobMetrics job = {.namespace_name = record.namespace_name,
                    .name = record.name,
                    .state = record.state,
                    .numerics = plan::NumericsOf(record.spec),
                    .quantized = record.spec.recipe.recipe != plan::Recipe::kNone,
                    .epoch = record.epoch,
                    .attempt = record.attempt,
                    .wanted_devices = record.spec.device_count,
                    .devices = HeldDevices(entry.run),
                    .step = progress.step,
                    .target_steps = record.spec.steps,
                    .restarts = record.restarts,
                    .any_step = progress.any,
                    .loss = progress.loss,
                    .tokens_per_second = progress.tokens_per_second,
                    .eta_seconds = GlimpseOf(entry).eta_seconds,
                    .meter = entry.meter,
                    .committed_step = record.committed_step,
                    .failed_saves = entry.save_counts.failed,
                    .skipped_saves = entry.saves.skipped(),
                    .goodput_ratio = entry.goodput.Ratio()};
  if (job.devices > 0 && entry.run.phase != RunPhase::kQuiescing) {
    job.progress_age_seconds = SecondsSince(entry.run.progress_ms, now_ms);
  }
  if (record.state == JobState::kQueued) {
    job.queue_wait_seconds = SecondsSince(record.created_ms, wall_ms);
  }
  const int64_t since_ms = std::max(entry.save_counts.committed_ms, entry.run.trained_since_ms);
  if (entry.run.phase == RunPhase::kTraining && since_ms > 0) {
    job.checkpoint_age_seconds = SecondsSince(since_ms, wall_ms);
  }
  for (const JobCondition& condition : entry.conditions) {
    if (condition.type == "CheckpointFresh") {
      job.checkpoint_fresh = condition.status;
    }
  }
  job.accounted_device_seconds = static_cast<double>(entry.goodput.accounted_us()) / 1e6;
  for (size_t i = 0; i < kDeviceTimes; ++i) {
    job.device_seconds.emplace_back(DeviceTimeName(static_cast<DeviceTime>(i)),
                                    static_cast<double>(entry.goodput.times()[i]) / 1e6);
  }
  return job;
}

ControllerMetrics JobController::Measure() const {
  ControllerMetrics metrics;
  metrics.cluster_id = cluster_id_;
  metrics.term = term_;
  metrics.stale_refused = stale_refused_;
  metrics.open_operations = static_cast<int64_t>(open_operations_.size());
  metrics.counts = counts_;
  for (const JobState state : kAllJobStates) {
    metrics.jobs[std::string(StateName(state))] = 0;
  }
  const int64_t wall_ms = parts_.clock->WallMs();
  std::vector<const Entry*> others;
  for (const JobCursor& cursor : by_age_) {
    const Entry& entry = entries_.at(cursor.uid);
    const JobRecord& record = entry.record;
    ++metrics.jobs[std::string(StateName(record.state))];
    if (record.state == JobState::kQueued) {
      metrics.queue_wait_seconds =
          std::max(metrics.queue_wait_seconds, SecondsSince(record.created_ms, wall_ms));
    }
    const bool over = IsTerminal(record.state);
    if (over && wall_ms - record.finished_ms > kMetricsLingerMs) {
      continue;
    }
    if (HoldsDevices(record.state) && metrics.by_job.size() < kMostMetricsJobs) {
      metrics.by_job.push_back(MeasureJob(entry));
    } else {
      others.push_back(&entry);
    }
  }
  for (const Entry* entry : others) {
    if (metrics.by_job.size() < kMostMetricsJobs) {
      metrics.by_job.push_back(MeasureJob(*entry));
    } else {
      ++metrics.jobs_without_series;
    }
  }
  MeasureNodes(metrics);
  return metrics;
}

void JobController::MeasureNodes(ControllerMetrics& metrics) const {
  for (const char* state : kNodeStates) {
    metrics.nodes[state] = 0;
  }
  for (const char* kind : {"cpu", "gpu"}) {
    for (const char* use : {"held", "free", "away"}) {
      metrics.devices[{kind, use}] = 0;
    }
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  for (const auto& [id, node] : membership_.nodes()) {
    ++metrics.nodes[NodeStateOf(node)];
    if (node.stream) {
      metrics.beat_age_seconds =
          std::max(metrics.beat_age_seconds, SecondsSince(node.heard_ms, now_ms));
    }
    const NodeUse use = scheduler_.UseOf(id);
    for (const bool cpu : {false, true}) {
      const char* kind = cpu ? "cpu" : "gpu";
      const auto all = std::count_if(
          node.facts.devices.begin(), node.facts.devices.end(), [cpu](const DeviceFacts& device) {
            return (device.kind == "cpu") == cpu;
          });
      metrics.devices[{kind, "held"}] += use.held[cpu];
      metrics.devices[{kind, "free"}] += use.free[cpu];
      metrics.devices[{kind, "away"}] += all - use.held[cpu] - use.free[cpu];
    }
  }
}

void JobController::OnStepReport(Entry& entry,
                                 const TrainerFrame& frame,
                                 const StepReport& report) {
  if (frame.rank != 0 || report.step <= entry.run.reported_step) {
    return;  // the second: told again after a broken stream
  }
  entry.run.reported_step = report.step;
  StepRecord record{report};
  record.tokens_per_second =
      report.step_seconds > 0 ? static_cast<double>(report.tokens) / report.step_seconds : 0;
  record.world_size = static_cast<int64_t>(entry.run.slots.size());
  record.epoch = frame.epoch;
  record.attempt = entry.record.attempt;
  record.time_ms = report.time_ms != 0 ? report.time_ms : parts_.clock->WallMs();
  const bool taken = WriteFiles(
      [metrics = parts_.metrics, growth = parts_.growth, uid = entry.record.uid, record] {
        const absl::Status stored = metrics->Append(uid, record);
        if (!stored.ok()) {
          static ComplainNowAndThen lost;
          lost.Say(absl::StrCat(
              "metrics of step ", record.step, " are lost: ", std::string(stored.message())));
        } else if (growth != nullptr) {
          growth->Ring(uid);
        }
      });
  if (!taken) {
    static ComplainNowAndThen full;
    full.Say("metrics are lost: the state directory's disk does not keep up");
  }
  JobProgress& progress = entry.progress;
  if (!progress.any) {
    progress.first_loss = report.loss;
    progress.any = true;
  }
  NoteStep(entry.meter, record, progress.step);
  progress.step = report.step;
  progress.loss = report.loss;
  progress.tokens_per_second = record.tokens_per_second;
  progress.step_seconds = progress.step_seconds > 0
                              ? 0.9 * progress.step_seconds + 0.1 * report.step_seconds
                              : report.step_seconds;
  entry.run.step_times.Add(report.step_seconds);
  NoteTrained(entry, record);
  entry.run.progress_ms = parts_.clock->MonotonicMs();
  entry.run.last_step_done = entry.run.last_step_done || report.step >= entry.record.spec.steps;
  Publish(entry);
  if (entry.run.phase == RunPhase::kTraining) {
    RenewHorizon(entry);
  }
}

}  // namespace ravel::coordinator
