// Keeps the set of trainers of this node, by (job, epoch, rank). Epochs only grow: launching epoch
// e kills the job's older trainers, and orders for older epochs are refused, so a late message
// cannot revive what is over. A repeated order starts no rank twice. A trainer that is silent for
// too long is killed; time in which this thread itself could not run is forgiven first, or a busy
// machine would kill healthy trainers.

#include "worker/daemon/supervisor.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "common/logging.h"
#include "worker/daemon/shared_gpu.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLook{100};
constexpr milliseconds kLeastSilence{2000};
constexpr milliseconds kLeastStartUp{30000};
constexpr size_t kMaxJobs = 10000;

}  // namespace

struct Supervisor::Timer {
  explicit Timer(boost::asio::io_context& context) : timer(context) {}
  boost::asio::steady_timer timer;
  steady_clock::time_point due = steady_clock::now();
};

Supervisor::Supervisor(boost::asio::io_context& context,
                       SupervisorOptions options,
                       TrainerProcess::Callbacks callbacks)
    : context_(context),
      options_(std::move(options)),
      callbacks_(std::move(callbacks)),
      timer_(std::make_unique<Timer>(context)) {
  WatchSilence();
}

Supervisor::~Supervisor() = default;

void Supervisor::SetSilenceLimit(milliseconds limit) {
  silence_limit_ = std::max(limit, kLeastSilence);
}

bool Supervisor::IsOver(const std::string& job_uid, int64_t epoch) const {
  const auto job = jobs_.find(job_uid);
  return job != jobs_.end() && (epoch <= job->second.over || epoch < job->second.newest);
}

absl::Status Supervisor::CheckLaunch(const LaunchOrder& order) const {
  const auto job = jobs_.find(order.job_uid);
  if (IsOver(order.job_uid, order.epoch)) {
    return absl::FailedPreconditionError(absl::StrCat("launch of job ",
                                                      order.job_uid,
                                                      ": epoch ",
                                                      order.epoch,
                                                      " is over here, the newest is ",
                                                      job->second.newest));
  }
  for (const v1::StartTrainer& start : order.trainers) {
    if (start.job_uid() != order.job_uid || start.epoch() != order.epoch) {
      return absl::InvalidArgumentError(absl::StrCat(
          "launch of job ", order.job_uid, ": rank ", start.rank(), " is of another job or epoch"));
    }
  }
  return absl::OkStatus();
}

void Supervisor::KillOlder(const std::string& job_uid, int64_t epoch) {
  for (auto& [key, trainer] : trainers_) {
    if (std::get<0>(key) == job_uid && std::get<1>(key) < epoch) {
      trainer->Kill("Stopped", absl::StrCat("killed: epoch ", epoch, " begins"));
    }
  }
}

absl::Status Supervisor::Launch(const LaunchOrder& order) {
  RETURN_IF_ERROR(CheckLaunch(order));
  if (jobs_.size() >= kMaxJobs && jobs_.count(order.job_uid) == 0) {
    jobs_.erase(jobs_.begin());
  }
  JobEpochs& job = jobs_[order.job_uid];
  if (job.newest != order.epoch) {
    job.newest = order.epoch;
    job.started.clear();
  }
  KillOlder(order.job_uid, order.epoch);
  std::vector<int64_t> started;
  for (const v1::StartTrainer& start : order.trainers) {
    if (!job.started.insert(start.rank()).second) {
      continue;
    }
    started.push_back(start.rank());
    const absl::Status status = StartOne(order, start);
    if (!status.ok()) {
      for (const int64_t rank : started) {  // destroyed, not stopped: nobody knows of them yet
        trainers_.erase({order.job_uid, order.epoch, rank});
        job.started.erase(rank);
      }
      return Annotate(status, absl::StrCat("starting rank ", start.rank()));
    }
  }
  return absl::OkStatus();
}

absl::Status Supervisor::StartOne(const LaunchOrder& order, const v1::StartTrainer& start) {
  const std::string log_path = absl::StrCat(options_.work_dir,
                                            "/logs/",
                                            start.job_uid(),
                                            "/attempt-",
                                            start.attempt(),
                                            "/rank-",
                                            start.rank(),
                                            ".log");
  TrainerProcess::Callbacks callbacks = callbacks_;
  callbacks.exited = [this](ExitReport report) { OnExited(std::move(report)); };
  v1::StartTrainer own = start;
  own.set_device(std::max<int64_t>(0, start.device() - options_.first_gpu) /
                 options_.trainers_per_gpu);
  std::vector<std::string> variables;
  if (options_.trainers_per_gpu > 1) {
    variables =
        SharedGpuEnvironment(absl::StrCat(start.job_uid(), "-", start.epoch(), "-", start.rank()));
  }
  if (!options_.gemm_cache.empty()) {
    variables.push_back(absl::StrCat("RAVEL_GEMM_CACHE=", options_.gemm_cache));
  }
  for (std::string& variable : RootVariables(options_.roots)) {
    variables.push_back(std::move(variable));
  }
  variables.insert(variables.end(), order.variables.begin(), order.variables.end());
  const TrainerProcess::Program program = {
      .path = options_.trainer_program,
      .log_path = log_path,
      .variables = std::move(variables),
      .user = options_.trainer_user ? &*options_.trainer_user : nullptr};
  ASSIGN_OR_RETURN(auto trainer,
                   TrainerProcess::Start(context_, program, own, std::move(callbacks)));
  log::Info(
      absl::StrCat("started trainer ", trainer->pid(), ": ", IdentityText(trainer->identity())));
  trainers_[{start.job_uid(), start.epoch(), start.rank()}] = std::move(trainer);
  return absl::OkStatus();
}

void Supervisor::OnExited(ExitReport report) {
  const TrainerIdentity& identity = report.identity;
  log::Info(absl::StrCat(
      "trainer ended: ", IdentityText(identity), ": ", report.reason, ": ", report.message));
  trainers_.erase({identity.job_uid, identity.epoch, identity.rank});
  callbacks_.exited(std::move(report));
}

void Supervisor::AskForSave(TrainerProcess& trainer, bool stop) {
  v1::TrainerDown down;
  down.mutable_save()->set_epoch(trainer.identity().epoch);
  down.mutable_save()->set_sequence(trainer.progress().has.save_sequence() + 1);
  down.mutable_save()->set_then_stop(stop);
  const absl::Status asked = trainer.Send(down);
  log::Info(absl::StrCat(IdentityText(trainer.identity()),
                         stop ? ": asked to save and stop" : ": asked to save",
                         ", without a coordinator",
                         asked.ok() ? "" : ": ",
                         asked.message()));
}

void Supervisor::AskForDueSaves() {
  const auto now = steady_clock::now();
  for (auto& [key, trainer] : trainers_) {
    const TrainerProgressState& progress = trainer->progress();
    const bool due = progress.save_every_ms > 0 && progress.state == "running" &&
                     now - progress.saved >= milliseconds(progress.save_every_ms);
    if (trainer->identity().rank == 0 && due) {
      AskForSave(*trainer, false);
    }
  }
}

bool Supervisor::AskToSaveAndStop() {
  bool some = false;
  for (auto& [key, trainer] : trainers_) {
    if (trainer->progress().state != "running" && !leaving_.contains(key)) {
      continue;  // nothing is trained yet, or it ends already
    }
    some = true;
    if (leaving_.insert(key).second) {
      AskForSave(*trainer, true);
    }
  }
  return some;
}

absl::Status Supervisor::Send(const std::string& job_uid,
                              int64_t epoch,
                              int64_t rank,
                              const v1::TrainerDown& frame) {
  const auto job = jobs_.find(job_uid);
  if (job != jobs_.end() && epoch < job->second.newest) {
    return absl::FailedPreconditionError(absl::StrCat("command for job ",
                                                      job_uid,
                                                      ": epoch ",
                                                      epoch,
                                                      " is over here, the newest is ",
                                                      job->second.newest));
  }
  absl::Status first_error;
  int found = 0;
  for (auto& [key, trainer] : trainers_) {
    const auto& [key_job, key_epoch, key_rank] = key;
    if (key_job == job_uid && key_epoch == epoch && (rank < 0 || key_rank == rank)) {
      ++found;
      const absl::Status sent = trainer->Send(frame);
      first_error = first_error.ok() ? sent : first_error;
    }
  }
  if (found == 0) {
    return absl::NotFoundError(absl::StrCat(
        "job ", job_uid, ", epoch ", epoch, ", rank ", rank, ": no such trainer here"));
  }
  return first_error;
}

absl::Status Supervisor::Stop(const std::string& job_uid,
                              int64_t epoch,
                              const std::string& reason,
                              milliseconds grace) {
  JobEpochs& job = jobs_[job_uid];
  for (auto& [key, trainer] : trainers_) {
    if (std::get<0>(key) == job_uid && std::get<1>(key) <= epoch) {
      trainer->Stop(reason, grace);
    }
  }
  if (epoch < job.newest) {
    return absl::FailedPreconditionError(absl::StrCat(
        "stop of job ", job_uid, ": epoch ", epoch, " is over here, the newest is ", job.newest));
  }
  if (job.newest != epoch) {
    job.newest = epoch;
    job.started.clear();
  }
  job.over = std::max(job.over, epoch);
  return absl::OkStatus();
}

void Supervisor::StopAll(const std::string& reason, milliseconds grace) {
  for (auto& [key, trainer] : trainers_) {
    JobEpochs& job = jobs_[std::get<0>(key)];
    job.over = std::max(job.over, job.newest);
    trainer->Stop(reason, grace);
  }
}

std::vector<const TrainerProcess*> Supervisor::trainers() const {
  std::vector<const TrainerProcess*> all;
  for (const auto& [key, trainer] : trainers_) {
    all.push_back(trainer.get());
  }
  return all;
}

void Supervisor::WatchSilence() {
  timer_->due = steady_clock::now() + kLook;
  timer_->timer.expires_at(timer_->due);
  timer_->timer.async_wait([this](boost::system::error_code error) {
    if (!error) {
      JudgeSilence();
      WatchSilence();
    }
  });
}

void Supervisor::JudgeSilence() {
  const steady_clock::time_point now = steady_clock::now();
  // The judge must have been awake: frames that came while this thread could not run are still to
  // be read.
  const steady_clock::duration late = now - timer_->due;
  for (auto& [key, trainer] : trainers_) {
    if (late > kLook) {
      trainer->Forgive(late);
    }
    trainer->TellIfUnkillable();
    const milliseconds limit =
        trainer->has_spoken() ? silence_limit_ : std::max(silence_limit_, kLeastStartUp);
    const auto silent = std::chrono::duration_cast<milliseconds>(now - trainer->heard());
    if (silent > limit && !trainer->stopping()) {
      trainer->Kill(
          "Stall",
          absl::StrCat("killed: silent for ", silent.count(), " ms, limit ", limit.count(), " ms"));
    }
  }
}

}  // namespace ravel::daemon
