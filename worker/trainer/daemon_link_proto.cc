#include "worker/trainer/daemon_link_proto.h"

#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/ckpt/manifest_proto.h"
#include "common/plan/plan_proto.h"
#include "proto/trainer.pb.h"

namespace ravel::trainer {
namespace {

absl::StatusOr<Assignment> AssignmentFrom(const v1::StartTrainer& start) {
  Assignment assignment = {.job_uid = start.job_uid(),
                           .epoch = start.epoch(),
                           .rank = start.rank(),
                           .world_size = start.world_size(),
                           .spec = {},
                           .plan = {},
                           .transport = start.transport(),
                           .gpu = start.device(),
                           .restore_path = start.restore_path(),
                           .checkpoint_root = start.checkpoint_root(),
                           .first_step = start.first_step(),
                           .host_address = start.host_address(),
                           .save_at_start = start.save_at_start(),
                           .save_at_end = start.save_at_end(),
                           .save_plan_hash = start.save_plan_hash(),
                           .release = start.release()};
  auto spec = plan::ParseJob(start.job());
  if (!spec.ok()) {
    return Annotate(spec.status(), "StartTrainer.job");
  }
  assignment.spec = *std::move(spec);
  if (!assignment.spec.model.has_value()) {
    return absl::InvalidArgumentError("StartTrainer.job: expected a model");
  }
  auto plan = plan::ParsePlan(start.plan());
  if (!plan.ok()) {
    return Annotate(plan.status(), "StartTrainer.plan");
  }
  assignment.plan = *std::move(plan);
  if (assignment.world_size != assignment.plan.ranks || assignment.rank < 0 ||
      assignment.rank >= assignment.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("StartTrainer: rank ",
                                                   assignment.rank,
                                                   " of ",
                                                   assignment.world_size,
                                                   ", the plan has ",
                                                   assignment.plan.ranks,
                                                   " ranks"));
  }
  return assignment;
}

absl::StatusOr<std::optional<Command>> CommandFrom(const v1::TrainerDown& frame) {
  switch (frame.kind_case()) {
    case v1::TrainerDown::kStart: {
      ASSIGN_OR_RETURN(Assignment assignment, AssignmentFrom(frame.start()));
      return Command(std::move(assignment));
    }
    case v1::TrainerDown::kCommRecords:
      return Command(RecordsOfGroup{.epoch = frame.comm_records().epoch(),
                                    .group = frame.comm_records().group(),
                                    .records = {frame.comm_records().records().begin(),
                                                frame.comm_records().records().end()}});
    case v1::TrainerDown::kRun:
      return Command(
          AllowSteps{.epoch = frame.run().epoch(), .until_step = frame.run().until_step()});
    case v1::TrainerDown::kSave:
      return Command(AskForSave{.epoch = frame.save().epoch(),
                                .sequence = frame.save().sequence(),
                                .then_stop = frame.save().then_stop()});
    case v1::TrainerDown::kStop:
      return Command(Stop{.code = ExitCode::kStopped, .reason = frame.stop().reason()});
    case v1::TrainerDown::kPeerLost:
      return Command(Stop{.code = ExitCode::kCommunicator, .reason = frame.peer_lost().reason()});
    case v1::TrainerDown::kCommit:
      return Command(Commit{.step = frame.commit().step(),
                            .committed = frame.commit().committed(),
                            .reason = frame.commit().reason()});
    case v1::TrainerDown::kAskLedger:
      return Command(
          AskForLedger{.epoch = frame.ask_ledger().epoch(), .most = frame.ask_ledger().most()});
    case v1::TrainerDown::KIND_NOT_SET:
      break;  // of a newer daemon
  }
  return std::optional<Command>();
}

}  // namespace

absl::StatusOr<Command> DaemonLinkReporter::Receive() {
  for (;;) {
    ASSIGN_OR_RETURN(const v1::TrainerDown frame, link_->Receive());
    auto command = CommandFrom(frame);
    if (!command.ok()) {
      return WithCode(command.status(), ExitCode::kPlanMismatch);
    }
    if (!command->has_value()) {
      continue;
    }
    if (const auto* assignment = std::get_if<Assignment>(&**command)) {
      job_uid_ = assignment->job_uid;
      epoch_ = assignment->epoch;
      rank_ = assignment->rank;
    }
    return **std::move(command);
  }
}

absl::Status DaemonLinkReporter::Publish(const std::string& group, const std::string& record) {
  v1::TrainerUp frame;
  v1::CommRecord& message = *frame.mutable_comm_record();
  message.set_job_uid(job_uid_);
  message.set_epoch(epoch_);
  message.set_group(group);
  message.set_rank(rank_);
  message.set_record(record);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Ready(const ReadyReport& report) {
  v1::TrainerUp frame;
  v1::TrainerReady& message = *frame.mutable_ready();
  message.set_step(report.step);
  message.set_planned_bytes(report.planned_bytes);
  message.set_measured_bytes(report.measured_bytes);
  message.set_restore_seconds(report.restore_seconds);
  for (const StartRemark& remark : report.remarks) {
    v1::StartRemark& added = *message.add_remarks();
    added.set_reason(remark.reason);
    added.set_message(remark.message);
  }
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Step(const StepRecord& record) {
  v1::TrainerUp frame;
  v1::StepReport& message = *frame.mutable_step();
  message.set_step(record.step);
  message.set_loss(record.loss);
  message.set_grad_norm(record.grad_norm);
  message.set_lr(record.learning_rate);
  message.set_tokens(record.tokens);
  message.set_step_seconds(record.seconds);
  message.set_skipped(record.skipped);
  message.set_has_validation_loss(record.has_validation_loss);
  message.set_validation_loss(record.validation_loss);
  message.set_time_ms(record.time_ms);
  message.set_planned_bytes(record.planned_bytes);
  message.set_measured_bytes(record.measured_bytes);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Progress(const ProgressReport& report) {
  v1::TrainerUp frame;
  v1::TrainerProgress& message = *frame.mutable_progress();
  message.set_step(report.step);
  message.set_phase(report.phase);
  message.set_phase_age_ms(report.phase_age_ms);
  message.set_collective_sequence(report.collective_sequence);
  message.set_collective_hash(report.collective_hash);
  message.set_moved_bytes(report.moved_bytes);
  for (const CollectiveState& state : report.collectives) {
    v1::CollectiveState& group = *message.add_collectives();
    group.set_group(state.group);
    group.set_first_member(state.first_member);
    group.set_sequence(state.sequence);
    group.set_hash(state.hash);
    group.set_completed(state.completed);
    group.set_waiting_ms(state.waiting_ms);
    group.set_mark_sequence(state.mark_sequence);
    group.set_mark_hash(state.mark_hash);
    group.set_waiting_in(state.waiting_in);
  }
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Ledger(const LedgerReport& report) {
  v1::TrainerUp frame;
  v1::LedgerReport& message = *frame.mutable_ledger();
  message.set_epoch(report.epoch);
  for (const LedgerOfGroup& of_group : report.groups) {
    v1::LedgerOfGroup& group = *message.add_groups();
    group.set_group(of_group.group);
    group.mutable_members()->Add(of_group.members.begin(), of_group.members.end());
    group.set_completed(of_group.completed);
    for (const LedgerEntry& entry : of_group.entries) {
      v1::LedgerEntry& issued = *group.add_entries();
      issued.set_sequence(entry.sequence);
      issued.set_hash(entry.hash);
      issued.set_order(entry.order);
      issued.set_kind(entry.kind);
      issued.set_op(entry.op);
      issued.set_unit(entry.unit);
      issued.set_group(entry.group);
      issued.set_call(entry.call);
      issued.set_phase(entry.phase);
      issued.set_generation(entry.generation);
      issued.set_elements(entry.elements);
      issued.set_element_bytes(entry.element_bytes);
      issued.set_age_ms(entry.age_ms);
    }
  }
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::SaveStarted(int64_t step, int64_t sequence, int64_t attempt) {
  v1::TrainerUp frame;
  frame.mutable_save_started()->set_step(step);
  frame.mutable_save_started()->set_sequence(sequence);
  frame.mutable_save_started()->set_save_attempt(attempt);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::SaveFailed(const SaveFailure& failure) {
  v1::TrainerUp frame;
  v1::SaveFailed& message = *frame.mutable_save_failed();
  message.set_step(failure.step);
  message.set_sequence(failure.sequence);
  message.set_save_attempt(failure.attempt);
  message.set_reason(failure.reason);
  message.set_message(failure.message);
  message.set_skipped(failure.skipped);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Sealed(const ckpt::Seal& seal) {
  v1::TrainerUp frame;
  *frame.mutable_seal() = ckpt::SealToProto(seal);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Failed(const absl::Status& failure) {
  v1::TrainerUp frame;
  v1::TrainerFailed& message = *frame.mutable_failed();
  message.set_code(static_cast<int32_t>(CodeOf(failure)));
  message.set_reason(std::string(ReasonOf(failure)));
  message.set_message(std::string(failure.message()));
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Done(int64_t step) {
  v1::TrainerUp frame;
  frame.mutable_done()->set_step(step);
  return link_->Send(frame);
}

}  // namespace ravel::trainer
