// One trainer from fork to report. Its end has three parts that come in any order: the process
// exits (pidfd), the link closes, the pipes close. The exit is reported once, when all three are
// over, but at most 60 ms after the process ended, since a grandchild may hold the pipes open.
// Handlers share ownership of Child, so the owner may destroy the process from within its own
// callbacks.

#include "worker/daemon/trainer_process.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <sys/wait.h>

#include "common/fault_point.h"
#include "common/logging.h"
#include "worker/daemon/child_process.h"

namespace ravel::daemon {
namespace {

namespace asio = boost::asio;
using std::chrono::steady_clock;

// After its end, how long a trainer's last frames and lines are waited for: a grandchild may hold
// the pipes.
constexpr std::chrono::milliseconds kLastWords{60};
// After SIGKILL: a process that is still there cannot be killed.
constexpr std::chrono::milliseconds kKillTime{1000};

}  // namespace

std::string IdentityText(const TrainerIdentity& identity) {
  return absl::StrCat(
      "job ", identity.job_uid, ", epoch ", identity.epoch, ", rank ", identity.rank);
}

class TrainerProcess::Child : public std::enable_shared_from_this<Child> {
 public:
  Child(asio::io_context& context,
        TrainerIdentity identity,
        ChildProcess process,
        Callbacks callbacks)
      : context_(context),
        identity_(std::move(identity)),
        process_(process),
        pidfd_(context, process.pidfd),
        stop_timer_(context),
        last_words_timer_(context),
        callbacks_(std::move(callbacks)) {}

  absl::Status Start(const std::string& log_path, const v1::StartTrainer& start) {
    // Callbacks of members that end before this object: they may hold it by pointer.
    logs_ = std::make_unique<LogRelay>(
        context_,
        process_.out,
        process_.err,
        log_path,
        LogRelay::Callbacks{.batch = [this](LogLines lines) { OnLog(std::move(lines)); },
                            .closed =
                                [this] {
                                  logs_closed_ = true;
                                  FinishIfOver();
                                }});
    WatchExit();
    ASSIGN_OR_RETURN(
        link_,
        DaemonLink::Open(context_,
                         process_.socket,
                         {.frame = [this](v1::TrainerUp frame) { OnFrame(std::move(frame)); },
                          .closed = [this](absl::Status status) { OnLinkClosed(status); }}));
    v1::TrainerDown first;
    *first.mutable_start() = start;
    return link_->Send(first);
  }

  void Abandon() {
    callbacks_ = {};
    link_.reset();
    logs_.reset();
    stop_timer_.cancel();
    last_words_timer_.cancel();
    if (!ended_) {
      KillChild(process_);
      waitpid(process_.pid, nullptr, 0);
      ended_ = ExitStatus{};
    }
    boost::system::error_code ignored;
    pidfd_.close(ignored);
  }

  absl::Status Send(const v1::TrainerDown& frame) {
    if (ended_ || link_ == nullptr) {
      return absl::UnavailableError(
          absl::StrCat(IdentityText(identity_), ": the trainer has ended"));
    }
    RETURN_IF_ERROR(Annotate(link_->Send(frame), IdentityText(identity_)));
    NoteTold(frame);
    return absl::OkStatus();
  }

  void Stop(const std::string& reason, std::chrono::milliseconds grace) {
    if (!stopping_) {
      stopping_ = true;
      progress_.state = "stopping";
      v1::TrainerDown stop;
      stop.mutable_stop()->set_reason(reason);
      Send(stop).IgnoreError();  // a trainer that cannot hear it is killed below
    }
    const auto deadline = steady_clock::now() + grace;
    if (stop_deadline_ && *stop_deadline_ <= deadline) {
      return;
    }
    stop_deadline_ = deadline;
    stop_timer_.expires_at(deadline);
    stop_timer_.async_wait([self = shared_from_this(), grace](boost::system::error_code error) {
      if (!error && !self->ended_) {
        self->Kill("Stopped",
                   absl::StrCat("killed: still there ", grace.count(), " ms after stop"));
      }
    });
  }

  void Kill(const std::string& reason, const std::string& message) {
    if (!ended_ && !forced_) {
      forced_ = {reason, message};
      killed_ = steady_clock::now();
      if (FaultPoint("daemon.kill").ok()) {  // or as a hung mount and a wedged driver have it
        KillChild(process_);
      }
    }
  }

  void TellIfUnkillable() {
    if (!forced_ || ended_ || told_unkillable_ || steady_clock::now() - killed_ < kKillTime) {
      return;
    }
    told_unkillable_ = true;
    log::Warning(absl::StrCat(IdentityText(identity_), ": SIGKILL does not end it"));
    v1::TrainerUp frame;
    frame.mutable_failed()->set_reason(forced_->reason);
    frame.mutable_failed()->set_message(
        absl::StrCat(forced_->message, "; it is not gone although it was sent SIGKILL"));
    if (const auto deliver = callbacks_.frame) {
      deliver(identity_, std::move(frame));
    }
  }

  TrainerIdentity& identity() { return identity_; }
  TrainerProgressState& progress() { return progress_; }
  steady_clock::time_point& heard() { return heard_; }
  bool has_spoken() const { return has_spoken_; }
  bool stopping() const { return stopping_; }
  pid_t pid() const { return process_.pid; }

 private:
  // The socketpair keeps what was sent, so what was sent is what the trainer has.
  void NoteTold(const v1::TrainerDown& frame) {
    v1::TrainerHas& has = progress_.has;
    if (frame.has_run()) {
      if (has.until_step() < 0) {
        progress_.saved = steady_clock::now();
        progress_.state = stopping_ ? progress_.state : "running";
      }
      has.set_until_step(std::max(has.until_step(), frame.run().until_step()));
      progress_.save_every_ms = frame.run().save_every_ms();
    } else if (frame.has_save()) {
      has.set_save_sequence(std::max(has.save_sequence(), frame.save().sequence()));
      has.set_then_stop(has.then_stop() || frame.save().then_stop());
      progress_.saved = steady_clock::now();
    } else if (frame.has_comm_records()) {
      const std::string& group = frame.comm_records().group();
      if (std::find(has.groups().begin(), has.groups().end(), group) == has.groups().end()) {
        has.add_groups(group);
      }
    }
  }

  struct Forced {
    std::string reason;
    std::string message;
  };

  void WatchExit() {
    pidfd_.async_wait(asio::posix::stream_descriptor::wait_read,
                      [self = shared_from_this()](boost::system::error_code error) {
                        if (!error) {
                          self->OnExit();
                        }
                      });
  }

  void OnExit() {
    const absl::StatusOr<ExitStatus> status = ReapChild(process_);
    if (absl::IsFailedPrecondition(status.status())) {
      WatchExit();
      return;
    }
    ended_ = status.ok() ? *status : ExitStatus{.exit_code = -1, .signal = SIGKILL};
    stop_timer_.cancel();
    last_words_timer_.expires_after(kLastWords);
    last_words_timer_.async_wait([self = shared_from_this()](boost::system::error_code error) {
      if (!error) {
        self->link_closed_ = self->logs_closed_ = true;
        self->FinishIfOver();
      }
    });
    FinishIfOver();
  }

  void OnFrame(v1::TrainerUp frame) {
    heard_ = steady_clock::now();
    has_spoken_ = true;
    switch (frame.kind_case()) {
      case v1::TrainerUp::kProgress:
        progress_.progress = frame.progress();
        progress_.step = frame.progress().step();
        break;
      case v1::TrainerUp::kReady:
        progress_.state = stopping_ ? progress_.state : "ready";
        progress_.step = frame.ready().step();
        break;
      case v1::TrainerUp::kStep:
        progress_.step = frame.step().step();
        break;
      case v1::TrainerUp::kSaveStarted:
        progress_.saved = steady_clock::now();
        break;
      case v1::TrainerUp::kDone:
        progress_.state = stopping_ ? progress_.state : "done";
        break;
      case v1::TrainerUp::kFailed:
        failed_ = frame.failed();
        break;
      default:
        break;
    }
    if (const auto deliver = callbacks_.frame) {
      deliver(identity_, std::move(frame));
    }
  }

  void OnLog(LogLines lines) {
    if (const auto deliver = callbacks_.log) {
      deliver(identity_, std::move(lines));
    }
  }

  void OnLinkClosed(const absl::Status& status) {
    link_closed_ = true;
    if (!status.ok() && !absl::IsUnavailable(status)) {  // it sent what is no frame
      Kill("ProcessCrash", absl::StrCat("bad frame from the trainer: ", status.message()));
    }
    FinishIfOver();
  }

  void FinishIfOver() {
    if (!ended_ || !link_closed_ || !logs_closed_ || finished_) {
      return;
    }
    finished_ = true;
    last_words_timer_.cancel();
    logs_->Flush();
    progress_.state = "exited";
    ExitReport report{.identity = identity_,
                      .status = *ended_,
                      .reason = ExitReason(*ended_),
                      .message = ExitText(*ended_),
                      .tail = logs_->Tail()};
    if (failed_ && ended_->signal == 0) {
      report.reason = failed_->reason().empty() ? report.reason : failed_->reason();
      report.message = failed_->message();
    }
    if (forced_ && ended_->signal == SIGKILL) {
      report.reason = forced_->reason;
      report.message = forced_->message;
    }
    // Out of the handlers of link and logs: the owner may destroy both in its callback.
    asio::post(context_, [self = shared_from_this(), report = std::move(report)]() mutable {
      if (const auto deliver = self->callbacks_.exited) {
        deliver(std::move(report));
      }
    });
  }

  asio::io_context& context_;
  TrainerIdentity identity_;
  ChildProcess process_;
  asio::posix::stream_descriptor pidfd_;
  asio::steady_timer stop_timer_;
  asio::steady_timer last_words_timer_;
  Callbacks callbacks_;
  std::unique_ptr<LogRelay> logs_;
  std::unique_ptr<DaemonLink> link_;
  TrainerProgressState progress_;
  steady_clock::time_point heard_ = steady_clock::now();
  bool has_spoken_ = false;
  bool stopping_ = false;
  std::optional<steady_clock::time_point> stop_deadline_;
  std::optional<Forced> forced_;
  steady_clock::time_point killed_;
  bool told_unkillable_ = false;
  std::optional<v1::TrainerFailed> failed_;
  std::optional<ExitStatus> ended_;
  bool link_closed_ = false;
  bool logs_closed_ = false;
  bool finished_ = false;
};

absl::StatusOr<std::unique_ptr<TrainerProcess>> TrainerProcess::Start(asio::io_context& context,
                                                                      const Program& program,
                                                                      const v1::StartTrainer& start,
                                                                      Callbacks callbacks) {
  TrainerIdentity identity{.job_uid = start.job_uid(),
                           .epoch = start.epoch(),
                           .attempt = start.attempt(),
                           .rank = start.rank()};
  const std::string socket = absl::StrCat("--socket-fd=", kTrainerSocketFd);
  ASSIGN_OR_RETURN(const ChildProcess process,
                   StartChild({program.path, socket}, program.variables, program.user));
  auto child = std::make_shared<Child>(context, std::move(identity), process, std::move(callbacks));
  std::unique_ptr<TrainerProcess> trainer(new TrainerProcess(child));
  RETURN_IF_ERROR(child->Start(program.log_path, start));
  return trainer;
}

TrainerProcess::TrainerProcess(std::shared_ptr<Child> child) : child_(std::move(child)) {}
TrainerProcess::~TrainerProcess() {
  child_->Abandon();
}

const TrainerIdentity& TrainerProcess::identity() const {
  return child_->identity();
}
const TrainerProgressState& TrainerProcess::progress() const {
  return child_->progress();
}
steady_clock::time_point TrainerProcess::heard() const {
  return child_->heard();
}
bool TrainerProcess::has_spoken() const {
  return child_->has_spoken();
}
bool TrainerProcess::stopping() const {
  return child_->stopping();
}
pid_t TrainerProcess::pid() const {
  return child_->pid();
}
absl::Status TrainerProcess::Send(const v1::TrainerDown& frame) {
  return child_->Send(frame);
}
void TrainerProcess::Stop(const std::string& reason, std::chrono::milliseconds grace) {
  child_->Stop(reason, grace);
}
void TrainerProcess::TellIfUnkillable() {
  child_->TellIfUnkillable();
}
void TrainerProcess::Kill(const std::string& reason, const std::string& message) {
  child_->Kill(reason, message);
}
void TrainerProcess::Forgive(std::chrono::nanoseconds time) {
  child_->heard() += std::chrono::duration_cast<steady_clock::duration>(time);
}

}  // namespace ravel::daemon
