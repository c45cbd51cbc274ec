#pragma once

// A controller with everything around it in one thread: fake daemons and trainers that follow the
// protocol, a clock that stands still, a checkpoint store and a planner without bytes. Nothing
// happens but what the test lets happen.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "coordinator/jobs/job_controller.h"
#include "coordinator/store/memory_job_store.h"
#include "tests/coordinator/jobs/fake_keeper.h"
#include "tests/testing/fake_clock.h"

namespace ravel::coordinator {

class ManualExecutor : public Executor {
 public:
  void Post(std::function<void()> work) override { queue_.push_back(std::move(work)); }
  bool RunOne() {
    if (queue_.empty() || held) {
      return false;
    }
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    work();
    return true;
  }
  // As if other threads were slower.
  void RunNewest() {
    std::function<void()> work = std::move(queue_.back());
    queue_.pop_back();
    work();
  }
  void Clear() { queue_.clear(); }

  bool held = false;  // what is posted waits

 private:
  std::deque<std::function<void()>> queue_;
};

// Writes at once, until a test holds it: then a group is written when the test says so.
class HeldStoreWriter : public StoreWriter {
 public:
  explicit HeldStoreWriter(JobStore* store) : store_(store) {}
  void Add(StoreWrite write) override;
  // Writes what is queued, in one commit.
  void WriteQueued();
  size_t queued() const { return queue_.size(); }

  bool held = false;

 private:
  JobStore* store_;
  std::vector<StoreWrite> queue_;
};

// Specs stay in memory; a plan is its size.
class FakePlanner : public Planner {
 public:
  absl::StatusOr<std::shared_ptr<const PlannedWorld>> Plan(const plan::JobSpec& spec,
                                                           int64_t ranks,
                                                           bool shared_memory) override;
  std::shared_ptr<const PlannedWorld> Find(const std::string& /*digest*/) override {
    return nullptr;
  }
  std::string EncodeSpec(const plan::JobSpec& spec) override;
  absl::StatusOr<plan::JobSpec> DecodeSpec(const std::string& planned) override;

  absl::Status failure;
  std::string build;  // part of every digest

 private:
  std::vector<plan::JobSpec> specs_;
};

class FakeWorld;

// What a daemon knows of one of its trainers.
struct FakeTrainer {
  std::string job_uid;
  std::string job_name;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  int64_t world_size = 0;
  int64_t step = 0;
  int64_t sequence = 0;         // newest save that was asked for
  int64_t served_sequence = 0;  // newest save that was done
  bool then_stop = false;
  bool save_at_start = false;
  bool running = false;
  int64_t until_step = -1;  // horizon
  bool ready = false;
  bool stopping = false;
  std::vector<std::string> groups;       // whose records were delivered
  std::vector<CommRecord> records = {};  // of its own, until it is told to train
};

// One daemon with its trainers. Dies with Kill.
struct FakeNode {
  std::string id;
  std::string incarnation;
  std::string host_id = "host";
  int64_t devices = 1;                       // of kind cpu
  std::vector<std::string> gpu_models = {};  // of as many GPUs, before them
  std::string device_message;                // why it has no GPU
  StreamId stream = 0;                       // 0: not connected
  bool alive = true;
  bool frozen = false;  // neither reads nor beats
  std::string work_lock;
  bool draining = false;   // its daemon is stopping
  int32_t exits_with = 0;  // its trainers end with this code before they are ready; 0: they do not
  std::string refuses_with;  // its answer to a launch (CommandResult.reason); empty: it launches
  bool plans_wait = false;   // launches wait for their plan, until GiveUpLaunches
  std::set<std::tuple<std::string, int64_t, int64_t>> launching;  // these: job, epoch, rank
  int64_t heard_command = 0;                                      // on this stream
  bool stops_trainers = true;      // false: StopTrainers is not obeyed in time
  std::string phase = "training";  // of its trainers, as beats say it
  int64_t moved_bytes = 0;         // read of what they restore
  std::deque<DownMessage> inbox;
  std::map<std::tuple<std::string, int64_t, int64_t>, FakeTrainer> trainers;
  std::string rejected;
  int64_t term = 0;  // highest that it has heard
  // Said while nobody listened: told again on the next stream.
  std::vector<UpMessage> unheard;
};

class FakeWorld : public FleetLink {
 public:
  FakeWorld();
  ~FakeWorld() override;

  // A coordinator process over `store` (default: the memory disk). The one before is gone, as by
  // SIGKILL.
  void StartCoordinator(std::unique_ptr<JobStore> store = nullptr);
  void KillCoordinator();
  bool running() const { return controller_ != nullptr; }

  FakeNode& AddNode(const std::string& id, int64_t devices = 1);
  FakeNode& AddGpuNode(const std::string& id, std::vector<std::string> models);
  void Connect(FakeNode& node);
  void Disconnect(FakeNode& node);
  void Kill(FakeNode& node);     // host gone, stream reset
  void Restart(FakeNode& node);  // a new incarnation, connected
  FakeNode& node(const std::string& id) { return nodes_.at(id); }
  // The plan did not come: what waited for it is forgotten without a word.
  void GiveUpLaunches(FakeNode& node) { node.launching.clear(); }
  // SIGKILL of the trainer of a rank; its daemon reports it.
  void KillTrainer(int64_t rank,
                   int32_t exit_code = -1,
                   int32_t signal = 9,
                   const std::string& reason = "");

  // Delivers everything that is on its way; time stands still.
  void Settle();
  // Time passes in ticks, with beats.
  void Advance(int64_t ms);
  // All trainers of each complete epoch finish one step, with the saves that are due.
  void TrainStep();
  void TrainSteps(int64_t count);

  plan::JobSpec Spec(const std::string& name, std::vector<int64_t> sizes, int64_t steps) const;
  SubmitDraft Draft(const plan::JobSpec& spec, const std::string& request_id);
  absl::StatusOr<JobView> Submit(const plan::JobSpec& spec);
  // Requests that are answered at once: not while writes are held.
  absl::StatusOr<JobView> Submit(SubmitDraft draft);
  absl::StatusOr<JobView> Cancel(const JobKey& key, const std::string& reason);
  absl::StatusOr<JobView> Delete(const JobKey& key, const DeleteDraft& draft);
  absl::StatusOr<JobView> Retry(const JobKey& key, const RetryDraft& draft);
  absl::StatusOr<NodeView> HoldNode(const std::string& node_id,
                                    NodeHold hold,
                                    bool lift,
                                    const std::string& reason);
  absl::StatusOr<OperationRecord> CheckpointNow(const JobKey& key,
                                                const std::string& request_id,
                                                int64_t deadline_ms = 0);
  absl::StatusOr<JobView> Rollback(const JobKey& key,
                                   const std::string& request_id,
                                   int64_t step,
                                   const std::string& path,
                                   const std::string& reason);
  absl::Status NoteMark(const JobKey& key,
                        int64_t step,
                        MarkChange change,
                        const std::string& reason);
  absl::Status ForgetNode(const std::string& node_id);
  JobView Job(const std::string& name);
  std::vector<JobEventRecord> Events(const std::string& name);
  std::vector<std::string> EventTypes(const std::string& name);
  std::vector<StepRecord> History(const std::string& name);  // surviving
  // Pretends that a trainer says something.
  void SendUp(FakeNode& node, UpMessage message);

  void Send(StreamId stream, DownMessage message) override;
  void Close(StreamId stream) override;

  JobController& controller() { return *controller_; }
  HeldStoreWriter& writer() { return *writer_; }
  ManualExecutor& pool() { return pool_; }
  FakePlanner planner;
  FakeKeeper keeper;
  testing::FakeClock clock;
  MemoryJobStore::Disk disk;
  ControllerOptions options;
  std::string folder;
  // Asked of each message down; true: it is lost on its way.
  std::function<bool(const FakeNode& node, const DownMessage& message)> lose;
  std::vector<CommitResult> commit_results;  // as trainers of rank 0 saw them
  std::vector<Launch> launches;
  std::map<int64_t, std::vector<StartRemark>> remarks;  // by rank: what a trainer says when ready
  std::set<int64_t> no_seals;                           // ranks that begin saves and never end them
  bool fatal = false;
  int64_t pause_ms = 0;  // for how long the coordinator's process did not run, told once

 private:
  void Handle(FakeNode& node, const DownMessage& message);
  void SendReady(FakeNode& node, const FakeTrainer& trainer);
  void HandleLaunch(FakeNode& node, const Launch& launch);
  void HandleCommand(FakeNode& node, const TrainerCommand& command);
  void HandleStop(FakeNode& node, const std::string& job_uid, int64_t epoch);
  void Exit(FakeNode& node,
            const FakeTrainer& trainer,
            int32_t code,
            int32_t signal,
            const std::string& reason);
  void Frame(FakeNode& node, const FakeTrainer& trainer, decltype(TrainerFrame::frame) frame);
  void Seal(FakeNode& node, FakeTrainer& trainer, int64_t attempt);
  void StepRank(FakeNode& node, FakeTrainer trainer, const plan::JobSpec& spec);
  bool EpochIsComplete(const FakeTrainer& sample) const;

  ManualExecutor strand_;
  ManualExecutor pool_;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<HeldStoreWriter> writer_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<LogStore> logs_;
  std::unique_ptr<JobController> controller_;
  std::map<std::string, FakeNode> nodes_;
  std::map<std::string, plan::JobSpec> specs_;  // by job name: what trainers were told
  StreamId last_stream_ = 0;
  int incarnations_ = 0;
  int requests_ = 0;
};

}  // namespace ravel::coordinator
