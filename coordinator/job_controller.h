#pragma once

// The one decision maker: jobs, trainers, saves. Everything runs on its strand: decide (pure
// transition), persist, apply, act. Waiting is level-triggered: Reconcile looks at what a job's
// trainers are and does what its state asks for, after every message and on every tick, so nothing
// depends on having seen an edge.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "coordinator/admission.h"
#include "coordinator/bell.h"
#include "coordinator/checkpoint_keeper.h"
#include "coordinator/executor.h"
#include "coordinator/feed.h"
#include "coordinator/fleet_messages.h"
#include "coordinator/job_record.h"
#include "coordinator/job_run.h"
#include "coordinator/job_state_machine.h"
#include "coordinator/job_store.h"
#include "coordinator/log_store.h"
#include "coordinator/membership.h"
#include "coordinator/metrics_log.h"
#include "coordinator/outbox.h"
#include "coordinator/planner.h"
#include "coordinator/state_disk.h"
#include "coordinator/work_pools.h"

namespace ravel::coordinator {

struct ControllerOptions {
  int64_t detection_ms = 5000;  // T while no job asks for a shorter one
  int64_t step_timeout_ms =
      600 * 1000;  // hard wall: an epoch without progress for that long is stuck
  int64_t save_timeout_ms = 120 * 1000;   // for all seals of one save
  int64_t store_timeout_ms = 120 * 1000;  // for a checkpoint store to say where to start from
  int64_t tick_ms = 20;                   // how often Tick is called
};

// All outlive the controller.
struct ControllerParts {
  const Clock* clock = nullptr;
  Executor* strand = nullptr;
  Executor* pool = nullptr;
  JobStore* store = nullptr;
  Planner* planner = nullptr;
  CheckpointKeeper* keeper = nullptr;
  FleetLink* fleet = nullptr;
  MetricsLog* metrics = nullptr;
  LogStore* logs = nullptr;
  std::function<void(absl::Status)>
      on_fatal;  // another coordinator has taken over, or the database is damaged
  // The thread that writes metrics and logs; null: they are written at once.
  ThreadExecutor* files = nullptr;
  Bell* growth = nullptr;           // rung when they have grown; may be null
  const StateDisk* disk = nullptr;  // null: there is always room
  WorkPools* pools = nullptr;       // for calls of checkpoint stores; null: `pool`
};

struct NodeView {
  NodeRecord record;
  int64_t devices = 0;
  int64_t devices_free = 0;
};

struct SubmitDraft {
  std::string request_id;
  std::string hash;
  JobRecord record;  // names, canonical, planned, spec
};

struct JobKey {
  std::string namespace_name;
  std::string name;
};

// Every method runs on the strand.
class JobController {
 public:
  JobController(ControllerOptions options, ControllerParts parts);

  // Once, first: reads the store, raises the term, ends what ran before.
  absl::Status Start();
  void Tick();

  // Requests. Accepted means durable.
  absl::StatusOr<JobView> Submit(SubmitDraft draft);
  // Several in one transaction: one wait for the disk.
  std::vector<absl::StatusOr<JobView>> SubmitAll(std::vector<SubmitDraft> drafts);
  absl::StatusOr<JobView> Cancel(const JobKey& key, const std::string& reason);
  absl::StatusOr<OperationRecord> CheckpointNow(const JobKey& key, const std::string& request_id);
  // AlreadyExists when a job has this name.
  absl::Status CheckNameIsFree(const JobKey& key) const;
  // What the keeper needs to know of a job; of one that is not submitted yet, too.
  CheckpointJob CheckpointsOf(const JobRecord& record) const;
  // Sets the newest commit back to `step`, which the keeper has found good at `path`; later steps
  // are moved aside before training goes on from there.
  absl::StatusOr<JobView> Rollback(const JobKey& key,
                                   const std::string& request_id,
                                   int64_t step,
                                   const std::string& path,
                                   const std::string& reason);
  // A mark of a step was changed in the store: recorded for people.
  absl::Status NoteMark(const JobKey& key,
                        int64_t step,
                        MarkChange change,
                        const std::string& reason);
  // What the store holds: rows of steps that are gone are corrected.
  void NoteFolder(const std::string& uid, const FolderView& folder);
  absl::StatusOr<JobView> Get(const JobKey& key) const;
  std::vector<JobView> List() const;
  absl::StatusOr<OperationRecord> GetOperation(const std::string& id) const;
  std::vector<SaveRecord> Saves(const std::string& job_uid) const;
  std::vector<NodeView> Nodes() const;
  Feed& feed() { return feed_; }
  const MetricsLog& metrics() const { return *parts_.metrics; }
  const LogStore& logs() const { return *parts_.logs; }
  JobStore& store() { return *parts_.store; }
  int64_t term() const { return term_; }
  const std::string& cluster_id() const { return cluster_id_; }
  int64_t stale_refused() const { return stale_refused_; }
  int64_t resource_version() const { return resource_version_; }

  // The fleet.
  void OnHello(StreamId stream, const HelloMessage& hello);
  void OnUp(StreamId stream, const UpMessage& message);
  void OnStreamClosed(StreamId stream);

 private:
  // A transition that is waiting for the store, with what belongs to its transaction and what
  // follows it.
  struct Step {
    JobEvent event;
    StoreChange extra;
    std::function<void()> after;
  };
  struct Entry {
    JobRecord record;
    JobRun run;
    JobProgress progress;
    std::deque<Step> waiting;  // the store refused: tried again at each tick, in order
    bool settling = false;     // commits that were intended before a restart are being looked at
    std::optional<EpochRecord> launched;  // the newest epoch that was launched
    int64_t epoch_floor = 0;              // highest epoch of the job that a node has heard of
    int preparing = 0;  // looks for a restore point on the pool; the next launch waits for them
  };
  using TrainerKey = std::tuple<std::string, int64_t, int64_t>;  // job, epoch, rank

  // job_controller.cc: state, requests, the persist-apply-act cycle.
  Entry* FindEntry(const std::string& uid);
  const Entry* FindEntry(const JobKey& key) const;
  Entry* FindEntry(const JobKey& key) {
    return const_cast<Entry*>(std::as_const(*this).FindEntry(key));
  }
  JobView ViewOf(const Entry& entry) const;
  void Publish(const Entry& entry);
  JobEvent MakeEvent(JobEventKind kind) const;
  absl::Status Persist(StoreChange& change);
  absl::Status TryStep(Entry& entry, Step& step);
  // Now if the store allows, else later; keeps order.
  void Do(Entry& entry, Step step);
  void Do(Entry& entry, JobEvent event) { Do(entry, Step{std::move(event), {}, {}}); }
  void Act(Entry& entry, JobActionKind action);
  void LoadJob(JobRecord record);
  void Settle(Entry& entry, const SaveRecord& save);
  void UpdateDetection();
  // Validates and writes, within a group; what it returns becomes visible by Accept. An answer of
  // an earlier request has no `uid` left to accept.
  struct Drafted {
    JobRecord record;
    std::optional<JobView> known;
  };
  absl::StatusOr<Drafted> WriteDraft(SubmitDraft draft);
  JobView AcceptDraft(JobRecord record);
  // Where calls of the job's checkpoint store run: a store that hangs holds up its own jobs only.
  Executor* StorePool(const plan::JobSpec& spec, StoreWork kind) const {
    return parts_.pools == nullptr ? parts_.pool
                                   : &parts_.pools->Store(spec.checkpoint.store, kind);
  }
  // Files are written off the strand, in order. False: too much is waiting, and it is dropped.
  bool WriteFiles(std::function<void()> work) const {
    if (parts_.disk != nullptr && parts_.disk->low()) {
      return false;
    }
    if (parts_.files == nullptr) {
      work();
      return true;
    }
    return parts_.files->TryPost(std::move(work));
  }

  // job_controller_adopt.cc: trainers that outlived a coordinator, and what ranks should have been
  // told.
  // False: nothing runs that could be taken over.
  bool BeginAdoption(Entry& entry);
  void OnAdoptionPlanned(const std::string& uid,
                         int64_t epoch,
                         absl::StatusOr<std::shared_ptr<const PlannedWorld>> world);
  void CheckAdoption(Entry& entry);
  void FinishAdoption(Entry& entry);
  // Slots of nodes that were there before the restart and did not return.
  void LoseAbsentNodes();
  // A node says that it holds this rank.
  void NoteHeld(Entry& entry,
                TrainerSlot& slot,
                const std::string& state,
                int64_t step,
                const TrainerHas& has);
  Wanted WantedOf(const Entry& entry) const;
  // Sends what the rank lacks; at most every two beats, unless its node has just returned.
  void Tell(Entry& entry, TrainerSlot& slot, int64_t rank, bool returned);
  // Ranks that should have been launched on a node, and are not there.
  void RepeatLaunch(const std::string& node_id);
  std::map<std::string, Launch> MakeLaunches(const Entry& entry) const;
  void RenewHorizon(Entry& entry);

  // job_controller_run.cc: from placement to the end of an epoch.
  void Reconcile(Entry& entry);
  void ReconcileRunning(Entry& entry);
  void Schedule();
  // Old trainers of the job still run on a node that is here: a new epoch waits for their devices.
  bool HasStaleTrainers(const std::string& uid) const;
  bool TryPlace(Entry& entry);
  std::vector<NodeOffer> FreeDevices(bool cpu) const;
  void Prepare(Entry& entry);
  struct Prepared {
    absl::Status status;
    std::string reason;  // of a status that is not OK
    RestorePoint restore;
    std::shared_ptr<const PlannedWorld> world;
    int64_t rollback_step = -1;  // as the record had it
  };

  void OnPrepared(const std::string& uid, int64_t epoch, Prepared prepared);
  void LaunchTrainers(Entry& entry, const RestorePoint& restore);
  void SendLaunches(Entry& entry);
  void StopRun(Entry& entry);
  void NudgeQuiescing(Entry& entry);
  void CheckStall(Entry& entry);
  // Ranks whose collectives do not go together, and ranks that are late.
  void CheckCollectives(Entry& entry);
  void CheckGrowth(Entry& entry);
  void SendToNodes(Entry& entry, const TrainerCommand& command);
  std::set<std::string> NodesOf(const Entry& entry) const;

  // job_controller_fleet.cc: what daemons say.
  // The command's id.
  int64_t Send(StreamId stream, decltype(DownMessage::kind) kind);
  int64_t SendToNode(const std::string& node_id, decltype(DownMessage::kind) kind);
  void TellHeld(const HelloMessage& hello);
  std::vector<HeldTrainer> ReconcileHeld(const std::string& node_id, const HelloMessage& hello);
  void LoseNode(const std::string& node_id, const std::string& reason);
  // It goes away: jobs save and move on without it if there is time, else from their last commit.
  void DrainNode(const std::string& node_id, const std::string& reason);
  void LoseSlots(const std::string& node_id,
                 const std::string& reason,
                 const std::set<TrainerKey>& kept);
  void OnBeat(StreamId stream, const std::string& node_id, const BeatMessage& beat);
  void OnExited(const std::string& node_id, const TrainerExited& exited);
  void OnCommandResult(const std::string& node_id, const CommandResult& result);
  void OnTrainerFailed(Entry& entry, TrainerSlot& slot, int64_t rank, const TrainerFailed& failed);
  void OnLog(const std::string& node_id, const LogBatch& batch);
  void OnFrame(const std::string& node_id, const TrainerFrame& frame);
  // The entry and slot that a frame of the present epoch is for; null and counted when stale.
  std::pair<Entry*, TrainerSlot*> Accept(const std::string& node_id, const TrainerFrame& frame);
  void OnCommRecord(Entry& entry, const CommRecord& record);
  void OnReady(Entry& entry, TrainerSlot& slot, int64_t rank, const TrainerReady& ready);
  void OnStepReport(Entry& entry, const TrainerFrame& frame, const StepReport& report);

  // job_controller_saves.cc: saves.
  void RequestSave(Entry& entry, bool then_stop);
  void CheckSaves(Entry& entry);
  void OnSaveStarted(Entry& entry, const SaveStarted& started);
  void OnSeal(Entry& entry, int64_t rank, const ckpt::Seal& seal);
  void StartCommit(Entry& entry, std::pair<int64_t, int64_t> key);
  void OnCommitted(const std::string& uid,
                   SaveRecord save,
                   absl::StatusOr<CommittedSave> result,
                   int64_t sequence);
  void FinishOperations(const std::string& uid,
                        int64_t up_to_sequence,
                        OperationState state,
                        const std::string& reason,
                        int64_t step,
                        const std::string& save_id);
  void SaveOperation(const OperationRecord& operation);
  void Retain(Entry& entry);

  // job_controller_checkpoints.cc: the checkpoint store against the record.
  void OnCorruptCheckpoint(Entry& entry, const FailureCause& cause);
  RestoreQuery QueryOf(const Entry& entry) const;
  void NoteRestore(Entry& entry, const Prepared& prepared);
  void NoteSettled(Entry& entry, const SettledSave& settled);
  void NoteRollback(Entry& entry, int64_t step);
  void ReleaseCheckpoints(const Entry& entry);
  void LookAtFolder(const Entry& entry);
  void OnCondemned(const std::string& uid,
                   int64_t step,
                   const absl::StatusOr<StepVerdict>& verdict);

  ControllerOptions options_;
  ControllerParts parts_;
  Membership membership_;
  std::map<std::string, Entry> entries_;  // by uid
  std::vector<std::string> order_;        // uids, oldest first
  std::map<std::string, OperationRecord> operations_;
  std::map<std::string, std::vector<SaveRecord>> saves_;  // by uid
  // Trainers of epochs that are over, by node: their devices are taken until they are reported
  // gone.
  std::map<std::string, std::set<TrainerKey>> stale_;
  std::map<int64_t, std::pair<std::string, int64_t>>
      launches_;  // job and epoch by command id, until answered
  std::map<std::string, std::set<std::string>> launching_;  // uids by node, until seen there
  std::set<std::string> expected_nodes_;  // known before the restart and not back yet
  int64_t registration_until_ms_ = 0;  // monotonic: nothing is placed before that after a restart
  Feed feed_;
  std::string cluster_id_;
  int64_t term_ = 0;
  int64_t event_seq_ = 0;
  int64_t resource_version_ = 0;
  int64_t command_id_ = 0;
  int64_t stale_refused_ = 0;
  int64_t ticked_ms_ = 0;
  bool scheduling_needed_ = true;
};

}  // namespace ravel::coordinator
