// Runs all ranks of a job as threads of one process, for tests of whole training runs.
// Communicators are shared memory, one CUDA device, or TCP over loopback with a rendezvous in
// memory. If one rank fails, the board and its communicator are closed, so all others end; the
// error reported is the first that is not merely "aborted by a peer".

#include "worker/trainer/local_ranks.h"

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/mutex.h"
#include "common/signed_size.h"
#include "worker/comm/communicator_factory.h"
#include "worker/comm/device_local_communicator.h"
#include "worker/comm/local_communicator.h"

namespace ravel::trainer {
namespace {

constexpr std::chrono::milliseconds kTcpTimeout = std::chrono::seconds(30);

// Rendezvous of threads: everybody's record, once all are there.
class RecordBoard {
 public:
  explicit RecordBoard(int ranks) : ranks_(Size(ranks)) {}

  comm::Rendezvous ForRank(int rank) {
    return [this, rank](std::string_view group,
                        std::string record) -> absl::StatusOr<std::vector<std::string>> {
      MutexLock lock(mutex_);
      std::map<int, std::string>& records = records_[std::string(group)];
      records[rank] = std::move(record);
      changed_.NotifyAll();
      while (records.size() < ranks_ && !closed_) {
        changed_.Wait(mutex_);
      }
      if (records.size() < ranks_) {
        return absl::AbortedError("another rank has failed");
      }
      std::vector<std::string> all;
      for (const auto& [of_rank, text] : records) {
        all.push_back(text);
      }
      return all;
    };
  }

  // Ends all waits.
  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

 private:
  const size_t ranks_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::map<int, std::string>> records_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class LocalGroup {
 public:
  LocalGroup(const LocalRun& run, const plan::JobSpec& spec, const plan::ShardingPlan& plan)
      : run_(run), spec_(spec), plan_(plan), board_(run.ranks) {}

  absl::Status Run() {
    if (run_.gpu != nullptr) {
      CHECK_MSG(run_.shared_memory, "ranks on one device share its memory");
      ASSIGN_OR_RETURN(communicators_, comm::CreateDeviceLocalGroup(*run_.gpu, run_.ranks));
    } else if (run_.shared_memory) {
      ASSIGN_OR_RETURN(communicators_, comm::CreateLocalGroup(run_.ranks));
    }
    std::vector<absl::Status> results(Size(run_.ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < run_.ranks; ++rank) {
      threads.emplace_back([&, rank] { At(results, rank) = RunRank(rank); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    for (const absl::Status& result : results) {
      // The others only report that they were released.
      if (!result.ok() && !absl::IsAborted(result)) {
        return result;
      }
    }
    for (const absl::Status& result : results) {
      RETURN_IF_ERROR(result);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status RunRank(int rank) {
    auto communicator = MakeCommunicator(rank);
    absl::Status status = communicator.status();
    if (status.ok()) {
      status = RunBody(**communicator);
    }
    if (!status.ok()) {
      board_.Close();
      if (communicator.ok()) {
        (*communicator)->Abort(std::string(status.message()));
      }
    }
    return status;
  }

  absl::StatusOr<std::unique_ptr<comm::Communicator>> MakeCommunicator(int rank) {
    if (run_.shared_memory) {
      return std::move(At(communicators_, rank));
    }
    return comm::CreateCommunicator({.transport = "gloo",
                                     .rank = rank,
                                     .size = run_.ranks,
                                     .rendezvous = board_.ForRank(rank),
                                     .host_address = "127.0.0.1",
                                     .timeout = kTcpTimeout});
  }

  absl::Status RunBody(comm::Communicator& communicator) {
    ASSIGN_OR_RETURN(const std::unique_ptr<RankEngine> engine,
                     RankEngine::Create({.plan = plan_,
                                         .settings = SettingsOf(spec_),
                                         .communicator = communicator,
                                         .control = nullptr,
                                         .options = run_.options,
                                         .gpu = run_.gpu,
                                         .gemms = run_.gemms}));
    return run_.body(*engine, communicator.rank());
  }

  const LocalRun& run_;
  const plan::JobSpec& spec_;
  const plan::ShardingPlan& plan_;
  RecordBoard board_;
  std::vector<std::unique_ptr<comm::Communicator>> communicators_;
};

}  // namespace

absl::StatusOr<plan::ShardingPlan> PlanLocalRanks(const LocalRun& run) {
  ASSIGN_OR_RETURN(const plan::JobSpec spec, plan::ResolveBatch(run.spec));
  ASSIGN_OR_RETURN(plan::ShardingPlan plan,
                   plan::BuildShardingPlan(
                       {.spec = spec, .ranks = run.ranks, .shared_memory = run.shared_memory}));
  if (run.adjust != nullptr) {
    RETURN_IF_ERROR(run.adjust(plan));
  }
  return plan;
}

absl::Status RunLocalRanks(const LocalRun& run) {
  ASSIGN_OR_RETURN(const plan::JobSpec spec, plan::ResolveBatch(run.spec));
  ASSIGN_OR_RETURN(const plan::ShardingPlan plan, PlanLocalRanks(run));
  return LocalGroup(run, spec, plan).Run();
}

}  // namespace ravel::trainer
