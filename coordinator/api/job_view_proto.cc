// Translates the controller's views to the messages of the public API. Enumerations have equal
// numbers on both sides, asserted at compile time. In lists only the head of the stored job is
// parsed for its labels (JobHead), not the whole spec, since a list may hold thousands of jobs.

#include "coordinator/api/job_view_proto.h"

#include "common/model/gemm_paths.h"

namespace ravel::coordinator {
namespace {

// The numbers are the same on purpose; this is where that is held to.
static_assert(static_cast<int>(JobState::kQueued) == v1::QUEUED);
static_assert(static_cast<int>(JobState::kStarting) == v1::STARTING);
static_assert(static_cast<int>(JobState::kRunning) == v1::RUNNING);
static_assert(static_cast<int>(JobState::kResizing) == v1::RESIZING);
static_assert(static_cast<int>(JobState::kRecovering) == v1::RECOVERING);
static_assert(static_cast<int>(JobState::kFinishing) == v1::FINISHING);
static_assert(static_cast<int>(JobState::kStopping) == v1::STOPPING);
static_assert(static_cast<int>(JobState::kSucceeded) == v1::SUCCEEDED);
static_assert(static_cast<int>(JobState::kFailed) == v1::FAILED);
static_assert(static_cast<int>(JobState::kCancelled) == v1::CANCELLED);
static_assert(static_cast<int>(OperationState::kAccepted) == v1::Operation::ACCEPTED);
static_assert(static_cast<int>(OperationState::kWriting) == v1::Operation::WRITING);
static_assert(static_cast<int>(OperationState::kSealed) == v1::Operation::SEALED);
static_assert(static_cast<int>(OperationState::kCommitted) == v1::Operation::COMMITTED);
static_assert(static_cast<int>(OperationState::kFailed) == v1::Operation::OPERATION_FAILED);

const char* SaveStateName(SaveState state) {
  switch (state) {
    case SaveState::kIntended:
      return "OPEN";
    case SaveState::kCommitted:
      return "COMMITTED";
    case SaveState::kFailed:
      return "FAILED";
    case SaveState::kBad:
      return "BAD";
    case SaveState::kDeleted:
      return "DELETED";
    case SaveState::kRolledBack:
      return "ROLLED_BACK";
  }
  return "UNKNOWN";
}

// The path follows from the job, as in its plans.
void AddGemmPaths(const plan::JobSpec& spec, v1::Job& job) {
  const absl::StatusOr<plan::GemmPath> path = plan::ChooseGemmPath(spec.recipe, spec.cpu_devices);
  if (!path.ok() || *path == plan::GemmPath::kNone) {
    return;
  }
  for (const char* gemms : plan::kGemmClasses) {
    v1::GemmPath& message = *job.add_gemm_paths();
    message.set_gemms(gemms);
    message.set_path(plan::GemmPathName(*path));
  }
}

void AddGoodput(const Goodput& goodput, v1::Goodput& message) {
  message.set_held_device_seconds(static_cast<double>(goodput.accounted_us()) / 1e6);
  message.set_ratio(goodput.Ratio());
  for (size_t i = 0; i < kDeviceTimes; ++i) {
    if (goodput.times()[i] != 0) {
      v1::DeviceTime& time = *message.add_times();
      time.set_cause(std::string(DeviceTimeName(static_cast<DeviceTime>(i))));
      time.set_device_seconds(static_cast<double>(goodput.times()[i]) / 1e6);
    }
  }
}

}  // namespace

v1::Job ToProto(const JobView& view) {
  return ToProto(JobGlimpse{.record = view.record,
                            .progress = view.progress,
                            .conditions = view.conditions,
                            .eta_seconds = view.eta_seconds,
                            .failed_saves = view.failed_saves,
                            .skipped_saves = view.skipped_saves,
                            .goodput = &view.goodput},
                 true);
}

v1::Job ToProto(const JobGlimpse& view, bool with_spec) {
  const JobRecord& record = view.record;
  v1::Job job;
  if (v1::TrainingJob canonical; with_spec && canonical.ParseFromString(record.canonical)) {
    job.mutable_metadata()->Swap(canonical.mutable_metadata());
    job.mutable_spec()->Swap(canonical.mutable_spec());
  } else if (v1::JobHead head; !with_spec && head.ParseFromString(record.canonical)) {
    job.mutable_metadata()->mutable_labels()->swap(*head.mutable_metadata()->mutable_labels());
  }
  job.mutable_metadata()->set_name(record.name);
  job.mutable_metadata()->set_namespace_(record.namespace_name);
  job.set_uid(record.uid);
  job.set_state(static_cast<v1::JobState>(record.state));
  job.set_reason(record.reason);
  job.set_message(record.message);
  job.set_generation(record.generation);
  job.set_epoch(record.epoch);
  job.set_attempt(record.attempt);
  job.set_world_size(record.world_size);
  job.set_step(view.progress.step);
  job.set_total_steps(record.spec.steps);
  job.set_loss(view.progress.loss);
  job.set_first_loss(view.progress.first_loss);
  job.set_tokens_per_second(view.progress.tokens_per_second);
  job.set_committed_step(record.committed_step);
  job.set_committed_path(record.committed_path);
  job.set_restarts(record.restarts);
  job.set_created_ms(record.created_ms);
  job.set_started_ms(record.started_ms);
  job.set_finished_ms(record.finished_ms);
  job.set_eta_seconds(view.eta_seconds);
  job.set_failure_class(record.failure_class);
  job.set_resource_version(record.resource_version);
  job.set_failed_saves(view.failed_saves);
  job.set_skipped_saves(view.skipped_saves);
  if (with_spec) {
    AddGemmPaths(record.spec, job);
  }
  for (const JobCondition& condition : view.conditions) {
    v1::JobCondition& message = *job.add_conditions();
    message.set_type(condition.type);
    message.set_status(condition.status);
    message.set_reason(condition.reason);
    message.set_message(condition.message);
    message.set_time_ms(condition.time_ms);
  }
  if (view.goodput != nullptr && view.goodput->accounted_us() > 0) {
    AddGoodput(*view.goodput, *job.mutable_goodput());
  }
  return job;
}

v1::JobEvent ToProto(const JobEventRecord& event, const std::string& job_name) {
  v1::JobEvent message;
  message.set_seq(event.seq);
  message.set_time_ms(event.time_ms);
  message.set_job(job_name);
  message.set_epoch(event.epoch);
  message.set_attempt(event.attempt);
  message.set_step(event.step);
  message.set_type(event.type);
  message.set_reason(event.reason);
  message.set_node(event.node);
  message.set_rank(event.rank);
  message.set_message(event.message);
  return message;
}

v1::StepRecord ToProto(const StepRecord& record) {
  v1::StepRecord message;
  message.set_step(record.step);
  message.set_loss(record.loss);
  message.set_grad_norm(record.grad_norm);
  message.set_lr(record.lr);
  message.set_tokens(record.tokens);
  message.set_tokens_per_second(record.tokens_per_second);
  message.set_step_seconds(record.step_seconds);
  message.set_world_size(record.world_size);
  message.set_epoch(record.epoch);
  message.set_attempt(record.attempt);
  message.set_skipped(record.skipped);
  message.set_loss_scale(record.loss_scale);
  if (record.has_validation_loss) {
    message.set_validation_loss(record.validation_loss);
  }
  message.set_time_ms(record.time_ms);
  message.set_planned_bytes(record.planned_bytes);
  message.set_measured_bytes(record.measured_bytes);
  return message;
}

v1::LogLine ToProto(const LogLine& line) {
  v1::LogLine message;
  message.set_seq(line.seq);
  message.set_time_ms(line.time_ms);
  message.set_attempt(line.attempt);
  message.set_rank(line.rank);
  message.set_node(line.node);
  message.set_text(line.text);
  return message;
}

v1::Operation ToProto(const OperationRecord& operation) {
  v1::Operation message;
  message.set_id(operation.id);
  message.set_state(static_cast<v1::Operation::State>(operation.state));
  message.set_reason(operation.reason);
  message.set_step(operation.step);
  message.set_save_id(operation.save_id);
  return message;
}

v1::Checkpoint ToProto(const SaveRecord& save) {
  v1::Checkpoint message;
  message.set_step(save.step);
  message.set_path(save.path);
  message.set_state(SaveStateName(save.state));
  message.set_bytes(save.bytes);
  message.set_files(save.files);
  message.set_epoch(save.epoch);
  message.set_world_size(save.world_size);
  message.set_created_ms(save.created_ms);
  message.set_save_id(save.save_id);
  // Rows of an earlier release, and saves under way, do not have it.
  message.set_mesh(save.mesh.empty() ? absl::StrCat(save.world_size, " ranks") : save.mesh);
  return message;
}

v1::Node ToProto(const NodeView& view) {
  const NodeRecord& record = view.record;
  v1::Node node;
  node.set_id(record.facts.node_id);
  node.set_incarnation(record.facts.incarnation);
  node.set_state(view.state);
  node.set_devices(view.devices);
  node.set_devices_free(view.devices_free);
  if (!record.facts.devices.empty()) {
    node.set_device_kind(record.facts.devices.front().kind);
    node.set_device_model(record.facts.devices.front().model);
  }
  node.set_address(record.facts.data_address);
  node.set_last_beat_ms(record.heard_wall_ms);
  node.set_message(view.message);
  node.set_penalties(view.penalties);
  for (const std::string& network : view.record.facts.networks) {
    node.add_networks(network);
  }
  node.set_version(record.facts.version);
  return node;
}

}  // namespace ravel::coordinator
