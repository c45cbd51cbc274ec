// The wiring of ravel-worker: commands of the coordinator go to the supervisor, frames of trainers
// go to the fleet client, all on one event-loop thread. It keeps what must survive a lost stream:
// seals without an answer are part of the next hello, and communicator records are told again after
// each welcome. Launches are daemon_launch.cc. Without a coordinator training goes on, and saves
// that are due by time are asked for here. SIGTERM drains: trainers may save within a limit; a
// second signal stops them at once.

#include "worker/daemon/daemon.h"

#include <algorithm>
#include <csignal>
#include <functional>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>

#include "common/clock.h"
#include "common/crypto.h"
#include "common/failure_reason.h"
#include "common/file_writer.h"
#include "common/logging.h"
#include "worker/daemon/look_messages_proto.h"

namespace ravel::daemon {
namespace {

namespace asio = boost::asio;
using std::chrono::milliseconds;

constexpr size_t kMaxSeals = 4096;
constexpr milliseconds kStopGrace{2000};
constexpr milliseconds kDrainPoll{50};
constexpr milliseconds kFlushLimit{1000};
constexpr milliseconds kUnattendedLook{100};
constexpr milliseconds kSweepInterval{10 * 60 * 1000};

// Devices of CPUs come first.
int64_t FirstGpu(const NodeFacts& facts) {
  const auto found = std::find_if(facts.devices.begin(),
                                  facts.devices.end(),
                                  [](const DeviceFacts& device) { return device.kind == "gpu"; });
  return found - facts.devices.begin();
}

// Trainers also read what this node has fetched for them.
RootFolders TrainerRoots(const DaemonOptions& options) {
  RootFolders folders = options.roots.folders();
  if (options.roots.any() && options.data_cache != nullptr) {
    folders.read.push_back(options.data_cache->sets_folder());
  }
  return folders;
}

}  // namespace

struct Daemon::Loop {
  asio::io_context context{1};
  asio::executor_work_guard<asio::io_context::executor_type> work = asio::make_work_guard(context);
  asio::signal_set signals{context};
  asio::steady_timer drain{context};
  asio::steady_timer unattended{context};
  asio::steady_timer sweep{context};
};

Daemon::Daemon(DaemonOptions options)
    : options_(std::move(options)),
      incarnation_(RandomHex(16)),
      loop_(std::make_unique<Loop>()),
      logs_(options_.work_dir + "/logs", options_.logs) {
  fleet_ = std::make_unique<FleetClient>(loop_->context,
                                         options_.coordinator,
                                         options_.identity ? &options_.identity->tls : nullptr,
                                         FleetCallbacks());
  if (options_.identity) {
    renewal_ = std::make_unique<CertificateRenewal>(
        loop_->context, options_.work_dir, *options_.identity, fleet_.get());
  }
  if (options_.identity && options_.trainer_user) {
    certificates_ = std::make_unique<TrainerCertificates>(loop_->context, CertificateCallbacks());
  }
  supervisor_ =
      std::make_unique<Supervisor>(loop_->context,
                                   SupervisorOptions{.trainer_program = options_.trainer_program,
                                                     .work_dir = options_.work_dir,
                                                     .gemm_cache = options_.gemm_cache,
                                                     .roots = TrainerRoots(options_),
                                                     .first_gpu = FirstGpu(options_.facts),
                                                     .trainers_per_gpu = options_.trainers_per_gpu,
                                                     .trainer_user = options_.trainer_user},
                                   TrainerCallbacks());
  if (!options_.notice_file.empty()) {
    notice_ = std::make_unique<NoticeWatch>(
        loop_->context,
        options_.notice_file,
        options_.notice_look,
        [this](const std::string& reason) { BeginStop(absl::StrCat("notice: ", reason)); });
  }
  preflight_ = std::make_unique<Preflight>(
      loop_->context, options_.preflight_limit, LookAs(options_.trainer_user, options_.roots));
  settings_ = std::make_unique<LaunchSettingsReader>(
      loop_->context, options_.preflight_limit, options_.launch_rules);
  looks_ = std::make_unique<PathLooks>(
      loop_->context, options_.look_limit, LookBeneath(options_.roots, options_.launch_rules));
  data_ =
      std::make_unique<LaunchData>(loop_->context, options_.data_cache, options_.data_stall_limit);
}

Daemon::~Daemon() {
  http_.reset();
  // Before the loop that their handlers hold on to.
  data_.reset();
  looks_.reset();
  settings_.reset();
  preflight_.reset();
  supervisor_.reset();
  notice_.reset();
  certificates_.reset();
  renewal_.reset();
  fleet_.reset();
}

absl::Status Daemon::ServeHttp(const http::PageFlags& flags, const std::string& port_file) {
  ASSIGN_OR_RETURN(http_,
                   ServeDaemonPages(flags,
                                    {.post =
                                         [this](std::function<void()> work) {
                                           asio::post(loop_->context, std::move(work));
                                         },
                                     .measure = [this] { return Measure(); }}));
  log::Info(absl::StrCat("HTTP on port ", http_->port()));
  return port_file.empty() ? absl::OkStatus()
                           : WriteFileAtomically(port_file, absl::StrCat(http_->port(), "\n"));
}

int Daemon::Run() {
  boost::system::error_code ignored;
  loop_->signals.add(SIGTERM, ignored);
  loop_->signals.add(SIGINT, ignored);
  loop_->signals.async_wait([this](boost::system::error_code error, int signal_number) {
    if (!error) {
      loop_->signals.async_wait([this](boost::system::error_code again, int /*signal_number*/) {
        if (!again) {
          StopTrainers();  // whoever asks twice does not want to wait
        }
      });
      BeginStop(signal_number == SIGTERM ? "SIGTERM" : "SIGINT");
    }
  });
  fleet_->Start();
  if (renewal_ != nullptr) {
    renewal_->Start();
  }
  if (notice_ != nullptr) {
    notice_->Start();
  }
  SaveUnattended();
  SweepLogsLater(milliseconds(0));
  loop_->context.run();
  return exit_code_;
}

void Daemon::Stop(const std::string& reason) {
  asio::post(loop_->context, [this, reason] { BeginStop(reason); });
}

FleetClient::Callbacks Daemon::FleetCallbacks() {
  return {.hello = [this] { return MakeHello(); },
          .beat = [this] { return MakeBeat(); },
          .welcome = [this](const v1::Welcome& welcome) { OnWelcome(welcome); },
          .command = [this](const v1::Down& down) { OnCommand(down); },
          .rejected = [this](const std::string& reason) { OnRejected(reason); }};
}

TrainerCertificates::Callbacks Daemon::CertificateCallbacks() {
  return {.certify =
              [this](const std::string& job_uid,
                     const std::string& request,
                     FleetChannel::CertificateCallback done) {
                fleet_->CertifyTrainer(job_uid, request, std::move(done));
              },
          .renewed =
              [this](const JobEpoch& of, const TlsIdentity& identity) {
                v1::TrainerDown down;
                Fill(identity, *down.mutable_store_identity());
                const absl::Status sent = supervisor_->Send(of.job_uid, of.epoch, -1, down);
                if (!sent.ok()) {  // it ends, and connects to nothing any more
                  log::Warning(std::string(sent.message()));
                }
              }};
}

TrainerProcess::Callbacks Daemon::TrainerCallbacks() {
  return {.frame = [this](const TrainerIdentity& identity,
                          v1::TrainerUp frame) { OnFrame(identity, std::move(frame)); },
          .log = [this](const TrainerIdentity& identity,
                        LogLines lines) { OnLog(identity, std::move(lines)); },
          .exited = [this](const ExitReport& report) { OnExited(report); }};
}

// -- what the coordinator says

void Daemon::OnRejected(const std::string& reason) {
  if (!options_.park_when_refused) {
    log::Error(absl::StrCat("the coordinator refuses this node for good: ", reason));
    Exit(kExitDoNotRestart);
    return;
  }
  if (stopping_) {
    return;  // it ends anyway
  }
  log::Error(absl::StrCat("the coordinator refuses this node: ",
                          reason,
                          "; parked, asking again in ",
                          options_.park_time.count() / 1000,
                          " s"));
  data_->StopAll();
  supervisor_->StopAll("the coordinator refuses this node", kStopGrace);
  fleet_->ReconnectAfter(options_.park_time);
}

void Daemon::OnWelcome(const v1::Welcome& welcome) {
  supervisor_->SetSilenceLimit(5 * milliseconds(welcome.beat_interval_ms()));
  for (const v1::HeldTrainer& held : welcome.stop()) {
    const absl::Status stopped =
        supervisor_->Stop(held.job_uid(), held.epoch(), "the epoch is over", milliseconds(0));
    if (!stopped.ok()) {
      log::Info(stopped.ToString());
    }
    data_->Stop(held.job_uid(), held.epoch());
    std::erase_if(seals_, [&held](const KeptSeal& kept) {
      return kept.identity.job_uid == held.job_uid() && kept.identity.epoch <= held.epoch();
    });
  }
  RepeatRecords();
}

void Daemon::RepeatRecords() {
  for (const auto& [key, records] : records_) {
    for (const v1::Up& record : records) {
      fleet_->SendControl(record);
    }
  }
}

void Daemon::SaveUnattended() {
  if (!fleet_->connected()) {
    supervisor_->AskForDueSaves();
  }
  loop_->unattended.expires_after(kUnattendedLook);
  loop_->unattended.async_wait([this](boost::system::error_code error) {
    if (!error) {
      SaveUnattended();
    }
  });
}

void Daemon::OnCommand(const v1::Down& down) {
  absl::Status done;
  switch (down.kind_case()) {
    case v1::Down::kLaunch:
      OnLaunch(down.command_id(), down.launch());
      return;  // answers when the plan is there
    case v1::Down::kTrainer:
      done = OnTrainerCommand(down.trainer());
      break;
    case v1::Down::kStop:
      done = supervisor_->Stop(down.stop().job_uid(),
                               down.stop().epoch(),
                               down.stop().reason(),
                               milliseconds(std::max<int64_t>(0, down.stop().grace_ms())));
      data_->Stop(down.stop().job_uid(), down.stop().epoch());
      break;
    case v1::Down::kForgetJobUid:
      logs_.Forget(down.forget_job_uid(), Running());
      return;
    case v1::Down::kLook:
      OnLook(down.look());
      return;
    default:
      return;
  }
  if (!done.ok()) {
    log::Warning(absl::StrCat("refused: ", done.message()));
  }
  fleet_->SendResult(down.command_id(), done);
}

void Daemon::OnLook(const v1::Look& look) {
  // Not kept while there is no stream: the coordinator has asked another node by then.
  const auto answer = [this, id = look.look_id()](const absl::StatusOr<PathFacts>& facts) {
    v1::Up up;
    *up.mutable_look() = ToProto(id, facts);
    fleet_->SendLossy(up);
  };
  const absl::StatusOr<PathQuery> query = FromProto(look);
  if (!query.ok()) {
    answer(query.status());
    return;
  }
  looks_->Start(*query, milliseconds(look.limit_ms()), answer);
}

absl::Status Daemon::OnTrainerCommand(const v1::TrainerCommand& command) {
  if (command.frame().has_commit()) {
    DropSeals(command.job_uid(), command.frame().commit().step());
  }
  if (command.frame().has_run()) {
    std::erase_if(records_, [&command](const auto& records) {
      return std::get<0>(records.first) == command.job_uid() &&
             std::get<1>(records.first) == command.epoch();
    });
  }
  return supervisor_->Send(command.job_uid(), command.epoch(), command.rank(), command.frame());
}

// -- what the trainers say

void Daemon::OnFrame(const TrainerIdentity& identity, v1::TrainerUp frame) {
  if (frame.has_progress()) {
    return;  // rides on the next beat
  }
  if (frame.has_seal()) {
    KeepSeal(identity, frame.seal());
  }
  v1::Up up;
  FillIdentity(identity, *up.mutable_trainer());
  *up.mutable_trainer()->mutable_frame() = std::move(frame);
  if (up.trainer().frame().has_comm_record()) {
    records_[{identity.job_uid, identity.epoch, identity.rank}].push_back(up);
  }
  fleet_->SendControl(std::move(up));
}

void Daemon::OnExited(const ExitReport& report) {
  records_.erase({report.identity.job_uid, report.identity.epoch, report.identity.rank});
  v1::Up up;
  v1::TrainerExited& exited = *up.mutable_exited();
  FillIdentity(report.identity, exited);
  exited.set_exit_code(report.status.exit_code);
  exited.set_signal(report.status.signal);
  exited.set_reason(report.reason);
  exited.set_message(report.message);
  exited.set_tail(report.tail);
  fleet_->SendControl(std::move(up));
  ++exits_[std::string(FindFailureReason(report.reason).name)];
  KeepUsed();
  if (stopping_) {
    FinishStop();
  }
}

void Daemon::OnLog(const TrainerIdentity& identity, LogLines lines) {
  v1::Up up;
  v1::LogBatch& batch = *up.mutable_log();
  batch.set_job_uid(identity.job_uid);
  batch.set_attempt(identity.attempt);
  batch.set_rank(identity.rank);
  batch.set_first_seq(lines.first_seq);
  batch.set_time_ms(SystemClock::Get().WallMs());
  for (std::string& line : lines.lines) {
    batch.add_lines(std::move(line));
  }
  fleet_->SendLossy(up);
}

void Daemon::KeepSeal(const TrainerIdentity& identity, const v1::Seal& seal) {
  if (seals_.size() >= kMaxSeals) {
    seals_.erase(seals_.begin());
  }
  seals_.push_back({identity, seal});
}

// Committed or refused: either way the seal has been heard.
void Daemon::DropSeals(const std::string& job_uid, int64_t up_to_step) {
  std::erase_if(seals_, [&](const KeptSeal& kept) {
    return kept.identity.job_uid == job_uid && kept.seal.step() <= up_to_step;
  });
}

// -- the end

void Daemon::BeginStop(const std::string& reason) {
  if (stopping_) {
    return;
  }
  stopping_ = true;
  log::Info(absl::StrCat("stopping: ", reason));
  v1::Up up;
  up.mutable_drain()->set_reason(reason);
  up.mutable_drain()->set_deadline_ms(SystemClock::Get().WallMs() + options_.drain_limit.count());
  fleet_->SendControl(std::move(up));
  AwaitDrain(std::chrono::steady_clock::now() + options_.drain_limit);
  FinishStop();
}

// The coordinator lets the trainers save and stop. Without one they are asked here: the coordinator
// that comes back finds the save whole in its store, and commits it.
void Daemon::AwaitDrain(std::chrono::steady_clock::time_point deadline) {
  const bool late = std::chrono::steady_clock::now() >= deadline;
  if (late || (!fleet_->connected() && !supervisor_->AskToSaveAndStop())) {
    if (late && !fleet_->connected() && !supervisor_->trainers().empty()) {
      log::Warning(
          "trainers have not saved and stopped within --drain-limit, without a coordinator: steps "
          "since their last save are lost");
    }
    StopTrainers();
    return;
  }
  loop_->drain.expires_after(kDrainPoll);
  loop_->drain.async_wait([this, deadline](boost::system::error_code error) {
    if (!error && !supervisor_->trainers().empty()) {
      AwaitDrain(deadline);
    }
  });
}

AttemptSet Daemon::Running() const {
  AttemptSet running;
  for (const TrainerProcess* trainer : supervisor_->trainers()) {
    running.insert({trainer->identity().job_uid, trainer->identity().attempt});
  }
  return running;
}

void Daemon::SweepLogsLater(milliseconds delay) {
  loop_->sweep.expires_after(delay);
  loop_->sweep.async_wait([this](boost::system::error_code error) {
    if (!error) {
      logs_.Sweep(Running());
      SweepLogsLater(kSweepInterval);
    }
  });
}

void Daemon::StopTrainers() {
  supervisor_->StopAll("this node is going away", kStopGrace);
}

void Daemon::FinishStop() {
  if (flushing_ || !supervisor_->trainers().empty()) {
    return;
  }
  flushing_ = true;
  fleet_->Flush(kFlushLimit, [this] { Exit(kExitClean); });
}

void Daemon::Exit(int code) {
  exit_code_ = code;
  loop_->context.stop();
}

}  // namespace ravel::daemon
