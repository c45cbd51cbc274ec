#pragma once

// A whole Ravel on loopback: one coordinator and any number of worker daemons, as the real
// programs, in a scratch folder. Tests start it, submit jobs through ravelctl, kill what they like,
// and read the surviving history.

#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "common/json.h"
#include "common/status.h"
#include "tests/testing/process.h"
#include "tests/testing/tiny_job.h"

namespace ravel::testing {

// One object of `ravelctl metrics -o jsonl`.
struct StepRow {
  int64_t step = 0;
  std::string loss_bits;  // fp32 bits of the loss, 8 hex digits
  double loss = 0;
  double grad_norm = 0;
  double tokens_per_second = 0;
  double step_seconds = 0;
  int64_t time_ms = 0;  // when it was done
  int64_t world_size = 0;
  int64_t epoch = 0;
  int64_t attempt = 0;
};

struct JobView {
  std::string state;  // SUCCEEDED, RUNNING, ...
  std::string reason;
  std::string message;
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t world_size = 0;
  int64_t committed_step = -1;
  int64_t restarts = 0;
  std::string committed_path;
  bool Terminal() const;
};

// One object of `ravelctl events -o jsonl`.
struct EventRow {
  std::string type;
  std::string reason;
  std::string message;
  int64_t step = 0;
  int64_t epoch = 0;
  int64_t time_ms = 0;
};

// The folder with ravelctl and its siblings: RAVEL_BIN_DIR, else bin/ above the test's own program.
std::string BinaryFolder();
std::string BinaryPath(std::string_view name);

// T for tests of what must not restart: a process that does not run for a second is not lost.
inline constexpr char kPatientDetection[] = "5s";

// Used only from the test's main thread.
class MiniCluster {
 public:
  // Coordinator up and answering; no workers yet. `detection` is its T, and that of jobs that ask
  // for none of their own.
  static absl::StatusOr<std::unique_ptr<MiniCluster>> Start(
      std::map<std::string, std::string> environment = {}, const std::string& detection = "1s");
  // A cluster of its own on a copy of another one's state, whose coordinator is dead or stopped
  // meanwhile: a backup that was restored.
  static absl::StatusOr<std::unique_ptr<MiniCluster>> StartCopyOf(const MiniCluster& other);
  ~MiniCluster();

  const std::string& folder() const { return scratch_.path(); }
  const std::string& address() const { return address_; }

  // Starts daemons named w0, w1, ... until there are `count` that run, and waits until all are
  // READY.
  absl::Status StartWorkers(int count, const std::map<std::string, std::string>& environment = {});
  absl::Status StartWorker(const std::string& name,
                           const std::map<std::string, std::string>& environment = {},
                           const std::string& coordinator = {});  // ours when empty
  // Waits until `count` nodes are READY, and each daemon that runs is among them.
  absl::Status WaitForReadyNodes(int count);
  // More arguments of workers, and of coordinators that are started anew, from now on.
  void SetWorkerFlags(std::vector<std::string> flags) { worker_flags_ = std::move(flags); }
  void SetCoordinatorFlags(std::vector<std::string> flags) {
    coordinator_flags_ = std::move(flags);
  }
  // A file that says, by being there, that the daemon's host goes away.
  std::string NoticeFile(const std::string& worker) const;
  // SIGKILL; its trainers die with it.
  void KillWorker(const std::string& name);
  std::vector<std::string> worker_names() const;
  // Trainer processes of a daemon, or of all.
  std::vector<pid_t> Trainers(const std::string& worker) const;
  std::vector<pid_t> AllTrainers() const;

  // For workers whose trainers are to be held (`faults`: more of them). Each trainer waits before
  // the N-th step that its process makes, from HoldTrainersAt(N) until LetTrainersGoAt(N) or
  // LetTrainersGo.
  std::map<std::string, std::string> HoldFaults(const std::string& faults = "") const;
  void HoldTrainersAt(int64_t step) const;
  void LetTrainersGoAt(int64_t step) const;
  void LetTrainersGo() const;

  void KillCoordinator();
  pid_t coordinator_pid() const { return coordinator_ == nullptr ? 0 : coordinator_->pid(); }
  // SIGTERM; its exit code, or nothing when it still runs at the deadline.
  std::optional<int> StopCoordinator(std::chrono::milliseconds deadline) {
    coordinator_->Signal(SIGTERM);
    return coordinator_->Wait(deadline);
  }
  ChildProcess& coordinator() { return *coordinator_; }
  // A daemon that runs; SIGSTOP and the like.
  ChildProcess& Worker(const std::string& name) { return *workers_.at(name); }
  // The same state folder and port.
  absl::Status RestartCoordinator();
  // Kills it and starts it again, as on a host of its own: it finds `folder` empty. Needs root.
  absl::Status RestartCoordinatorWithout(const std::string& folder);
  // As above, with another environment from now on.
  absl::Status RestartCoordinator(std::map<std::string, std::string> environment);

  // ravelctl --coordinator ADDRESS ARGUMENTS...
  RunResult Ctl(std::vector<std::string> arguments,
                std::chrono::milliseconds deadline = std::chrono::seconds(60)) const;
  // Writes the job file and submits it.
  absl::Status Submit(const TinyJob& job);
  absl::StatusOr<JobView> Get(const std::string& job) const;
  // Waits until the job's surviving history has reached `step`, or the job ended (then an error,
  // unless it has). The deadline of this and of the next two is for each step: a machine that is
  // slow trains slowly.
  absl::Status WaitForStep(const std::string& job,
                           int64_t step,
                           std::chrono::milliseconds deadline);
  absl::StatusOr<JobView> WaitForEnd(const std::string& job, std::chrono::milliseconds deadline);
  // As WaitForEnd, and an error with the job's events and the last log lines unless it succeeded.
  absl::Status WaitForSuccess(const std::string& job, std::chrono::milliseconds deadline);
  // The surviving history, in order of steps; `replaced`: also steps that a restart trained again.
  absl::StatusOr<std::vector<StepRow>> Metrics(const std::string& job, bool replaced = false) const;
  // What happened to a job, oldest first.
  absl::StatusOr<std::vector<EventRow>> Events(const std::string& job) const;
  // Committed checkpoints: step -> directory.
  absl::StatusOr<std::map<int64_t, std::string>> Checkpoints(const std::string& job) const;
  // State digest of a committed step directory, as `checkpoints show -o json` prints it.
  absl::StatusOr<std::string> StateDigest(const std::string& step_directory) const;
  // What there is to know about a job that went wrong: events, logs, the programs' own output.
  std::string Report(const std::string& job) const;

 private:
  MiniCluster() = default;
  absl::Status StartCoordinator(const std::string& listen);
  std::string HoldPath() const;
  // Looks at the job until that holds, or no step was made for that long; the newest look.
  JobView Watch(const std::string& job,
                std::chrono::milliseconds deadline,
                const std::function<bool(const JobView&)>& until) const;
  absl::StatusOr<json::Value> CtlJson(std::vector<std::string> arguments) const;

  ScratchFolder scratch_;
  std::map<std::string, std::string> environment_;
  std::string detection_;
  std::vector<std::string> worker_flags_;
  std::vector<std::string> coordinator_flags_;
  std::string hidden_;  // from the coordinator; empty: nothing
  std::string address_;
  std::unique_ptr<ChildProcess> coordinator_;
  std::map<std::string, std::unique_ptr<ChildProcess>> workers_;
  int next_worker_ = 0;
};

// "step 7: 3f9a0c11 here, 3f9a0c12 there" for the first difference of loss bits; empty when the
// histories are equal.
std::string FirstDifference(const std::vector<StepRow>& a, const std::vector<StepRow>& b);

// A number of a test's environment, such as RAVEL_SEEDS.
int64_t EnvironmentNumber(const char* name, int64_t otherwise);

}  // namespace ravel::testing
