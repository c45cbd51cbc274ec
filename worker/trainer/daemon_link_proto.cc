// Translates the daemon's frames to the plain values of supervision.h and back. This is the only
// file of the trainer that knows those messages. An assignment is validated here completely (job,
// plan, rank within the plan); a frame of an unknown kind is skipped, because a newer daemon may
// send it.

#include "worker/trainer/daemon_link_proto.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/ckpt/manifest_proto.h"
#include "common/plan/plan_proto.h"
#include "common/trainer_report_proto.h"
#include "proto/trainer.pb.h"

namespace ravel::trainer {
namespace {

store::StoreIdentity IdentityFrom(const v1::StoreIdentity& identity) {
  return {.authority = identity.authority(),
          .certificate = identity.certificate(),
          .key = identity.key()};
}

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
                           .data_ports = {static_cast<int>(start.first_data_port()),
                                          static_cast<int>(start.last_data_port())},
                           .save_at_start = start.save_at_start(),
                           .save_at_end = start.save_at_end(),
                           .save_plan_hash = start.save_plan_hash(),
                           .release = start.release(),
                           .save_attempt = std::max<int64_t>(1, start.save_attempt()),
                           .store_token = start.store_token()};
  if (start.has_store_identity()) {
    assignment.store_identity = IdentityFrom(start.store_identity());
  }
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
    case v1::TrainerDown::kStoreIdentity:
      return Command(UseStoreIdentity{IdentityFrom(frame.store_identity())});
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

absl::Status DaemonLinkReporter::Ready(const TrainerReady& report) {
  v1::TrainerUp frame;
  *frame.mutable_ready() = ravel::ToProto(report);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Step(const StepReport& record) {
  v1::TrainerUp frame;
  *frame.mutable_step() = ravel::ToProto(record);
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
  AddCollectives(report.collectives, message);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::Ledger(const LedgerReport& report) {
  v1::TrainerUp frame;
  *frame.mutable_ledger() = ravel::ToProto(report);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::SaveStarted(int64_t step, int64_t sequence, int64_t attempt) {
  v1::TrainerUp frame;
  frame.mutable_save_started()->set_step(step);
  frame.mutable_save_started()->set_sequence(sequence);
  frame.mutable_save_started()->set_save_attempt(attempt);
  return link_->Send(frame);
}

absl::Status DaemonLinkReporter::SaveFailed(const ravel::SaveFailed& failure) {
  v1::TrainerUp frame;
  *frame.mutable_save_failed() = ravel::ToProto(failure);
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
