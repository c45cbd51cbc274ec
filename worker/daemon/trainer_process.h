#pragma once

// One trainer: child process, link, output. Used only from the thread of its io_context, which must
// live as long as the daemon (child_process.h).

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "worker/child_link.h"
#include "worker/daemon/exit_reason.h"
#include "worker/daemon/log_relay.h"
#include "worker/daemon/trainer_user.h"

namespace ravel::daemon {

struct TrainerIdentity {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
};
// "job 3f2a, epoch 2, rank 1"
std::string IdentityText(const TrainerIdentity& identity);
// Into a message that names a trainer.
void FillIdentity(const TrainerIdentity& identity, auto& message) {
  message.set_job_uid(identity.job_uid);
  message.set_epoch(identity.epoch);
  message.set_attempt(identity.attempt);
  message.set_rank(identity.rank);
}

struct ExitReport {
  TrainerIdentity identity;
  ExitStatus status;
  std::string reason;   // ExitReason, or the trainer's own, or Stall
  std::string message;  // what the trainer said, else how it ended
  std::string tail;     // last lines of its stderr
};

struct TrainerProgressState {
  TrainerProgressState() { has.set_until_step(-1); }
  int64_t step = 0;
  std::string state = "starting";  // starting, ready, running, done, stopping, exited
  v1::TrainerProgress progress;
  v1::TrainerHas has;         // what it has been told: the coordinator sends what is missing
  int64_t save_every_ms = 0;  // of the newest RunTrainer
  // When it was told to train, was asked to save or began its newest save.
  std::chrono::steady_clock::time_point saved;
};

class TrainerProcess {
 public:
  struct Callbacks {
    std::function<void(const TrainerIdentity&, v1::TrainerUp)> frame;
    std::function<void(const TrainerIdentity&, LogLines)> log;
    // Once, after the last frame and the last log line, and within 100 ms of the end of the
    // process. The object may be destroyed in it.
    std::function<void(ExitReport)> exited;
  };

  struct Program {
    std::string path;
    std::string log_path;
    std::vector<std::string> variables = {};  // of its environment (child_process.h)
    const TrainerUser* user = nullptr;        // null: the daemon's own
  };
  // Starts `program --socket-fd=3` and sends it `start`.
  static absl::StatusOr<std::unique_ptr<TrainerProcess>> Start(boost::asio::io_context& context,
                                                               const Program& program,
                                                               const v1::StartTrainer& start,
                                                               Callbacks callbacks);
  // Kills and reaps a child that still runs; no callback follows.
  ~TrainerProcess();

  const TrainerIdentity& identity() const;
  const TrainerProgressState& progress() const;
  // When the trainer was last heard, or started.
  std::chrono::steady_clock::time_point heard() const;
  // True once a frame has come.
  bool has_spoken() const;
  bool stopping() const;
  pid_t pid() const;

  absl::Status Send(const v1::TrainerDown& frame);
  // Sends a stop frame, waits `grace`, then SIGKILL. A later call may only shorten the grace.
  void Stop(const std::string& reason, std::chrono::milliseconds grace);
  // SIGKILL now; the exit is reported with this reason and message.
  void Kill(const std::string& reason, const std::string& message);
  // Once, when SIGKILL did not end it within a second: the others should not wait for its exit.
  void TellIfUnkillable();
  // Time that passed while nobody could hear is not held against the trainer.
  void Forgive(std::chrono::nanoseconds time);

 private:
  class Child;
  explicit TrainerProcess(std::shared_ptr<Child> child);
  // Shared with the handlers in flight.
  std::shared_ptr<Child> child_;
};

}  // namespace ravel::daemon
