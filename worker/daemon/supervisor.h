#pragma once

// The trainers of this node: launch, commands, stop, silence. Refuses what belongs to an epoch that
// is over.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/path_roots.h"
#include "common/status.h"
#include "worker/daemon/trainer_process.h"

namespace ravel::daemon {

// The ranks of one job epoch that this node runs.
struct LaunchOrder {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  std::vector<v1::StartTrainer> trainers;  // complete, with the plan
  // "NAME=text" of what the job itself sets, secrets included: never logged. What this node sets
  // under the same name holds.
  std::vector<std::string> variables = {};
};

struct SupervisorOptions {
  std::string trainer_program;
  std::string work_dir;
  std::string gemm_cache = {};  // folder of what trainers measure of gemms; empty: none
  RootFolders roots = {};       // beneath which trainers may open paths of jobs
  // Ordinal of the node's first GPU: a trainer is told which of the GPUs is its own.
  int64_t first_gpu = 0;
  int64_t trainers_per_gpu = 1;                  // more than 1: functional tests (shared_gpu.h)
  std::optional<TrainerUser> trainer_user = {};  // none: the daemon's own
};

// Used only from the thread of its io_context; that thread must live as long as the daemon.
class Supervisor {
 public:
  Supervisor(boost::asio::io_context& context,
             SupervisorOptions options,
             TrainerProcess::Callbacks callbacks);
  ~Supervisor();

  // A trainer that says nothing for this long is killed. A machine may be busier than the knob
  // allows for, so the limit is never under 2 s, nor under 30 s before the first frame.
  void SetSilenceLimit(std::chrono::milliseconds limit);

  // Starts all ranks or none. FailedPrecondition for an epoch that is over here. A rank that was
  // started in this epoch before, whether it runs or has ended, is left as it is: an order may come
  // twice. Trainers of the job's older epochs are killed first.
  absl::Status Launch(const LaunchOrder& order);
  // True if Launch refuses that epoch.
  bool IsOver(const std::string& job_uid, int64_t epoch) const;
  // To one rank, or with -1 to all ranks of the job's epoch. NotFound when there is none;
  // FailedPrecondition when the epoch is not the job's present one here.
  absl::Status Send(const std::string& job_uid,
                    int64_t epoch,
                    int64_t rank,
                    const v1::TrainerDown& frame);
  // Ends the trainers of the job's epochs up to `epoch`, and refuses launches of these from now on.
  // FailedPrecondition when a newer epoch runs here, which is left alone.
  absl::Status Stop(const std::string& job_uid,
                    int64_t epoch,
                    const std::string& reason,
                    std::chrono::milliseconds grace);
  void StopAll(const std::string& reason, std::chrono::milliseconds grace);

  // Without a coordinator. Saves by time that are due: rank 0 is asked, its peers agree.
  void AskForDueSaves();
  // Asks all trainers that train to save and stop, each once; their peers on other nodes agree.
  // False: none of them runs any more.
  bool AskToSaveAndStop();

  // Those whose process has not been reported as ended, ordered by job, epoch and rank.
  std::vector<const TrainerProcess*> trainers() const;

 private:
  using Key = std::tuple<std::string, int64_t, int64_t>;  // job, epoch, rank
  struct JobEpochs {
    int64_t newest = 0;              // highest epoch seen
    int64_t over = -1;               // launches up to this epoch are refused
    std::set<int64_t> started = {};  // ranks of the newest epoch
  };

  absl::Status CheckLaunch(const LaunchOrder& order) const;
  void KillOlder(const std::string& job_uid, int64_t epoch);
  // For one more save than the trainer has heard of; `stop`: which is its last.
  void AskForSave(TrainerProcess& trainer, bool stop);
  absl::Status StartOne(const LaunchOrder& order, const v1::StartTrainer& start);
  void OnExited(ExitReport report);
  void WatchSilence();
  void JudgeSilence();

  boost::asio::io_context& context_;
  const SupervisorOptions options_;
  TrainerProcess::Callbacks callbacks_;
  std::map<Key, std::unique_ptr<TrainerProcess>> trainers_;
  std::map<std::string, JobEpochs> jobs_;
  std::set<Key> leaving_;  // have been asked to save and stop
  std::chrono::milliseconds silence_limit_{5000};
  struct Timer;
  std::unique_ptr<Timer> timer_;
};

}  // namespace ravel::daemon
