// Translates the fleet's messages between protobuf and plain values. Everything from a daemon is
// checked here: unknown kinds and malformed parts are errors that name the field, so the controller
// handles only valid values. Zero in a field that older daemons lack stands for what they meant (a
// save attempt is 1).

#include "coordinator/api/fleet_messages_proto.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/ckpt/manifest_proto.h"
#include "common/crypto.h"
#include "common/trainer_report_proto.h"
#include "coordinator/store/log_store.h"

namespace ravel::coordinator {
namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

// Of a beat; the rest is cut.
constexpr int64_t kMaxPadding = 64 << 10;

// Trainers that do not say have one.
int64_t SaveAttempt(int64_t said) {
  return said == 0 ? 1 : said;
}

absl::StatusOr<decltype(TrainerFrame::frame)> ReadFrame(const v1::TrainerUp& message) {
  using Frame = decltype(TrainerFrame::frame);
  switch (message.kind_case()) {
    case v1::TrainerUp::kCommRecord:
      return Frame(CommRecord{message.comm_record().group(),
                              message.comm_record().rank(),
                              message.comm_record().record()});
    case v1::TrainerUp::kReady:
      return Frame(ravel::FromProto(message.ready()));
    case v1::TrainerUp::kProgress:
      return Frame(TrainerProgress{message.progress().step()});
    case v1::TrainerUp::kStep:
      return Frame(ravel::FromProto(message.step()));
    case v1::TrainerUp::kSeal: {
      ASSIGN_OR_RETURN(ckpt::Seal seal, ckpt::SealFromProto(message.seal()));
      return Frame(std::move(seal));
    }
    case v1::TrainerUp::kFailed:
      return Frame(TrainerFailed{
          message.failed().code(), message.failed().reason(), message.failed().message()});
    case v1::TrainerUp::kDone:
      return Frame(TrainerDone{message.done().step()});
    case v1::TrainerUp::kSaveStarted:
      return Frame(SaveStarted{message.save_started().step(),
                               message.save_started().sequence(),
                               SaveAttempt(message.save_started().save_attempt())});
    case v1::TrainerUp::kSaveFailed:
      return Frame(ravel::FromProto(message.save_failed()));
    case v1::TrainerUp::kLedger:
      return Frame(ravel::FromProto(message.ledger()));
    case v1::TrainerUp::KIND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("trainer.frame: expected one of the frames of TrainerUp");
}

TrainerHas ReadHas(const v1::TrainerHas& message) {
  return {message.until_step(),
          message.save_sequence(),
          message.then_stop(),
          {message.groups().begin(), message.groups().end()}};
}

absl::StatusOr<UpMessage> ReadTrainer(const v1::TrainerFrame& message) {
  TrainerFrame frame;
  frame.job_uid = message.job_uid();
  frame.epoch = message.epoch();
  frame.attempt = message.attempt();
  frame.rank = message.rank();
  ASSIGN_OR_RETURN(frame.frame, ReadFrame(message.frame()));
  return UpMessage(std::move(frame));
}

BeatMessage ReadBeat(const v1::Beat& message) {
  BeatMessage beat;
  beat.seq = message.seq();
  beat.heard_command = message.heard_command();
  beat.padding = message.padding().substr(0, kMaxPadding);
  beat.answered_bytes = message.answered_bytes();
  beat.next_bytes = message.next_bytes();
  beat.unanswered_ms = message.unanswered_ms();
  for (const v1::TrainerBeat& trainer : message.trainers()) {
    beat.trainers.push_back({trainer.job_uid(),
                             trainer.rank(),
                             trainer.epoch(),
                             trainer.progress().step(),
                             trainer.progress().phase(),
                             trainer.progress().phase_age_ms(),
                             CollectivesOf(trainer.progress()),
                             trainer.state(),
                             ReadHas(trainer.has())});
    beat.trainers.back().moved_bytes = trainer.progress().moved_bytes();
  }
  return beat;
}

TrainerExited ReadExited(const v1::TrainerExited& message) {
  TrainerExited exited;
  exited.job_uid = message.job_uid();
  exited.epoch = message.epoch();
  exited.attempt = message.attempt();
  exited.rank = message.rank();
  exited.exit_code = message.exit_code();
  exited.signal = message.signal();
  exited.reason = message.reason();
  exited.message = message.message();
  exited.tail = message.tail();
  return exited;
}

// The largest job lists so many files (job_limits_proto.h), and names paths of 4 KiB.
constexpr int kMaxTokenFiles = 2048;
constexpr std::size_t kMaxLookTextBytes = 16384;

absl::Status CheckLookText(const char* name, const std::string& text) {
  return text.size() <= kMaxLookTextBytes
             ? absl::OkStatus()
             : absl::InvalidArgumentError(
                   absl::StrCat("look.", name, ": expected at most ", kMaxLookTextBytes, " bytes"));
}

absl::StatusOr<LookResult> ReadLook(const v1::LookResult& message) {
  if (message.token_files_size() > kMaxTokenFiles ||
      message.model_config().size() > std::size_t{kMaxConfigBytes}) {
    return absl::InvalidArgumentError(absl::StrCat(
        "look: expected at most ", kMaxTokenFiles, " token files and a config of 1 MiB"));
  }
  RETURN_IF_ERROR(CheckLookText("refused", message.refused()));
  RETURN_IF_ERROR(CheckLookText("model_error", message.model_error()));
  RETURN_IF_ERROR(CheckLookText("silent_field", message.silent_field()));
  RETURN_IF_ERROR(CheckLookText("silence", message.silence()));
  RETURN_IF_ERROR(CheckLookText("refused_field", message.refused_field()));
  RETURN_IF_ERROR(CheckLookText("refusal", message.refusal()));
  LookResult result{.look_id = message.look_id(), .refused = message.refused()};
  for (const v1::TokenFileFacts& file : message.token_files()) {
    RETURN_IF_ERROR(CheckLookText("token_files.error", file.error()));
    if (file.tokens() < 0 || file.largest_id() < 0) {
      return absl::InvalidArgumentError("look.token_files: expected numbers >= 0");
    }
    if (!file.sample_digest().empty() && !IsSha256Text(file.sample_digest())) {
      return absl::InvalidArgumentError(
          "look.token_files.sample_digest: expected 64 hexadecimal digits");
    }
    result.facts.token_files.push_back(
        {file.error(), file.tokens(), file.largest_id(), file.sample_digest()});
  }
  result.facts.tokenizer = message.tokenizer();
  result.facts.model = {message.model_error(), message.model_config(), message.model_weights()};
  result.facts.silent_field = message.silent_field();
  result.facts.silence = message.silence();
  result.facts.refused_field = message.refused_field();
  result.facts.refusal = message.refusal();
  return result;
}

void WriteLook(const Look& look, v1::Look* message) {
  const auto write = [](const NamedPath& path, v1::NamedPath* out) {
    out->set_field(path.field);
    out->set_path(path.path);
  };
  message->set_look_id(look.look_id);
  message->set_token_format(static_cast<int32_t>(look.query.format));
  message->set_limit_ms(look.limit_ms);
  for (const NamedPath& file : look.query.token_files) {
    write(file, message->add_token_files());
  }
  write(look.query.tokenizer, message->mutable_tokenizer());
  write(look.query.model_directory, message->mutable_model_directory());
  const JobNeeds& needs = look.query.needs;
  if (needs.empty()) {
    return;
  }
  message->mutable_needs()->set_namespace_(needs.namespace_name);
  message->mutable_needs()->set_network(needs.network);
  for (const NeededVariable& variable : needs.environment) {
    v1::NeededVariable& added = *message->mutable_needs()->add_environment();
    added.set_name(variable.name);
    added.set_secret(variable.secret);
  }
}

void WriteStart(const Launch& launch, const StartTrainer& start, v1::StartTrainer* message) {
  message->set_job_uid(launch.job_uid);
  message->set_job_name(start.job_name);
  message->set_epoch(launch.epoch);
  message->set_attempt(launch.attempt);
  message->set_rank(start.rank);
  message->set_world_size(start.world_size);
  message->set_job(start.job);
  message->set_device(start.device);
  message->set_transport(start.transport);
  message->set_restore_path(start.restore_path);
  message->set_checkpoint_root(start.checkpoint_root);
  message->set_first_step(start.first_step);
  message->set_host_address(start.host_address);
  message->set_save_at_start(start.save_at_start);
  message->set_save_at_end(start.save_at_end);
  message->set_save_plan_hash(start.save_plan_hash);
  message->set_save_attempt(start.save_attempt);
}

void WriteLaunch(const Launch& launch, v1::Launch* message) {
  message->set_job_uid(launch.job_uid);
  message->set_epoch(launch.epoch);
  message->set_attempt(launch.attempt);
  message->set_plan_digest(launch.plan_digest);
  for (const StartTrainer& start : launch.trainers) {
    WriteStart(launch, start, message->add_trainers());
  }
}

void WriteWelcome(const Welcome& welcome, int64_t term, v1::Welcome* message) {
  message->set_term(term);
  message->set_cluster_id(welcome.cluster_id);
  message->set_beat_interval_ms(welcome.beat_interval_ms);
  message->set_protocol(welcome.protocol);
  for (const HeldTrainer& held : welcome.stop) {
    v1::HeldTrainer* order = message->add_stop();
    order->set_job_uid(held.job_uid);
    order->set_epoch(held.epoch);
    order->set_attempt(held.attempt);
    order->set_rank(held.rank);
  }
}

void WriteCommand(const TrainerCommand& command, v1::TrainerCommand* message) {
  message->set_job_uid(command.job_uid);
  message->set_epoch(command.epoch);
  message->set_rank(command.rank);
  v1::TrainerDown* frame = message->mutable_frame();
  std::visit(
      Overloaded{[&](const CommRecordSet& set) {
                   v1::CommRecordSet* records = frame->mutable_comm_records();
                   records->set_job_uid(command.job_uid);
                   records->set_epoch(command.epoch);
                   records->set_group(set.group);
                   for (const std::string& record : set.records) {
                     records->add_records(record);
                   }
                 },
                 [&](const RunTrainer& run) {
                   frame->mutable_run()->set_epoch(command.epoch);
                   frame->mutable_run()->set_until_step(run.until_step);
                   frame->mutable_run()->set_save_every_ms(run.save_every_ms);
                 },
                 [&](const SaveTrainer& save) {
                   frame->mutable_save()->set_epoch(command.epoch);
                   frame->mutable_save()->set_sequence(save.sequence);
                   frame->mutable_save()->set_then_stop(save.then_stop);
                 },
                 [&](const CommitResult& commit) {
                   frame->mutable_commit()->set_step(commit.step);
                   frame->mutable_commit()->set_committed(commit.committed);
                   frame->mutable_commit()->set_reason(commit.reason);
                 },
                 [&](const PeerLost& lost) { frame->mutable_peer_lost()->set_reason(lost.reason); },
                 [&](const AskForLedger& ask) {
                   frame->mutable_ask_ledger()->set_epoch(command.epoch);
                   frame->mutable_ask_ledger()->set_most(ask.most);
                 }},
      command.frame);
}

}  // namespace

absl::StatusOr<HelloMessage> FromProto(const v1::Hello& message) {
  HelloMessage hello;
  hello.node_id = message.node_id();
  hello.incarnation = message.incarnation();
  hello.protocol = message.protocol();
  hello.oldest_protocol = message.oldest_protocol();
  hello.path_bytes = std::clamp<int64_t>(message.path_bytes(), 0, kMaxPadding);
  hello.networks.assign(message.networks().begin(), message.networks().end());
  hello.cluster_id = message.cluster_id();
  for (const v1::Device& device : message.devices()) {
    hello.devices.push_back({device.kind(), device.model(), device.memory_bytes(), device.uuid()});
  }
  hello.data_address = message.data_address();
  hello.host_id = message.host_id();
  hello.cpu_isa = message.cpu_isa();
  for (const v1::HeldTrainer& trainer : message.trainers()) {
    HeldTrainer held{trainer.job_uid(),
                     trainer.epoch(),
                     trainer.attempt(),
                     trainer.rank(),
                     trainer.step(),
                     trainer.state(),
                     {},
                     ReadHas(trainer.has())};
    for (const v1::Seal& seal : trainer.unacknowledged_seals()) {
      ASSIGN_OR_RETURN(ckpt::Seal plain, ckpt::SealFromProto(seal));
      held.seals.push_back(std::move(plain));
    }
    hello.trainers.push_back(std::move(held));
  }
  hello.version = message.version();
  hello.device_message = message.device_message();
  hello.term = message.term();
  hello.work_lock = message.work_lock();
  hello.draining = message.draining();
  return hello;
}

absl::StatusOr<UpMessage> FromProto(const v1::Up& message) {
  switch (message.kind_case()) {
    case v1::Up::kBeat:
      return UpMessage(ReadBeat(message.beat()));
    case v1::Up::kTrainer:
      return ReadTrainer(message.trainer());
    case v1::Up::kExited:
      return UpMessage(ReadExited(message.exited()));
    case v1::Up::kLog: {
      const v1::LogBatch& log = message.log();
      if (log.first_seq() < 0 || log.first_seq() > kMaxLogSeq - log.lines_size()) {
        return absl::InvalidArgumentError(
            absl::StrCat("log.first_seq: expected 0 to ", kMaxLogSeq));
      }
      return UpMessage(LogBatch{log.job_uid(),
                                log.attempt(),
                                log.rank(),
                                log.first_seq(),
                                {log.lines().begin(), log.lines().end()},
                                log.time_ms()});
    }
    case v1::Up::kResult:
      return UpMessage(CommandResult{message.result().command_id(),
                                     message.result().ok(),
                                     message.result().message(),
                                     message.result().reason()});
    case v1::Up::kDrain:
      return UpMessage(DrainNotice{message.drain().reason()});
    case v1::Up::kLook: {
      ASSIGN_OR_RETURN(LookResult look, ReadLook(message.look()));
      return UpMessage(std::move(look));
    }
    case v1::Up::kHello:
    case v1::Up::KIND_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "up: expected beat, trainer, exited, log, result, drain or look");
}

v1::Down ToProto(const DownMessage& message) {
  v1::Down down;
  down.set_term(message.term);
  down.set_command_id(message.command_id);
  std::visit(Overloaded{[&](const Welcome& welcome) {
                          WriteWelcome(welcome, message.term, down.mutable_welcome());
                        },
                        [&](const BeatAck& ack) {
                          down.mutable_beat_ack()->set_seq(ack.seq);
                          down.mutable_beat_ack()->set_padding(ack.padding);
                        },
                        [&](const Launch& launch) { WriteLaunch(launch, down.mutable_launch()); },
                        [&](const TrainerCommand& command) {
                          WriteCommand(command, down.mutable_trainer());
                        },
                        [&](const StopTrainers& stop) {
                          down.mutable_stop()->set_job_uid(stop.job_uid);
                          down.mutable_stop()->set_epoch(stop.epoch);
                          down.mutable_stop()->set_reason(stop.reason);
                          down.mutable_stop()->set_grace_ms(stop.grace_ms);
                        },
                        [&](const Rejected& rejected) { down.set_rejected(rejected.reason); },
                        [&](const ForgetJob& gone) { down.set_forget_job_uid(gone.job_uid); },
                        [&](const Look& look) { WriteLook(look, down.mutable_look()); }},
             message.kind);
  return down;
}

}  // namespace ravel::coordinator
