#pragma once

// The one decision maker: jobs, trainers, saves. Everything runs on its strand: decide (pure
// transition), hand the change to the writer, and when it is durable apply and act. The strand
// waits for no disk: a job's steps queue in its entry, one of them is being written, and the next
// is decided from the record that this one leaves. Waiting is level-triggered: Reconcile looks at
// what a job's trainers are and does what its state asks for, after every message and on every
// tick, so nothing depends on having seen an edge; while a step is under way it does nothing.

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
#include "coordinator/fleet/device_inventory.h"
#include "coordinator/fleet/fleet_messages.h"
#include "coordinator/fleet/membership.h"
#include "coordinator/fleet/node_blame.h"
#include "coordinator/fleet/node_looks.h"
#include "coordinator/fleet/outbox.h"
#include "coordinator/fleet/stale_trainers.h"
#include "coordinator/jobs/admission.h"
#include "coordinator/jobs/agenda.h"
#include "coordinator/jobs/controller_metrics.h"
#include "coordinator/jobs/executor.h"
#include "coordinator/jobs/feed.h"
#include "coordinator/jobs/goodput.h"
#include "coordinator/jobs/job_requests.h"
#include "coordinator/jobs/job_run.h"
#include "coordinator/jobs/job_state_machine.h"
#include "coordinator/jobs/planner.h"
#include "coordinator/jobs/retention_turn.h"
#include "coordinator/jobs/scheduler.h"
#include "coordinator/jobs/wall_deadline.h"
#include "coordinator/jobs/work_pools.h"
#include "coordinator/jobs/zombies.h"
#include "coordinator/saves/checkpoint_keeper.h"
#include "coordinator/saves/save_coordinator.h"
#include "coordinator/store/bell.h"
#include "coordinator/store/job_record.h"
#include "coordinator/store/job_store.h"
#include "coordinator/store/log_store.h"
#include "coordinator/store/metrics_log.h"
#include "coordinator/store/state_disk.h"
#include "coordinator/store/store_writer.h"

namespace ravel::coordinator {

struct ControllerOptions {
  int64_t detection_ms = 5000;  // T while no job asks for a shorter one
  int64_t step_timeout_ms =
      600 * 1000;  // hard wall: steady steps without progress for that long are stuck
  int64_t save_timeout_ms = 120 * 1000;     // for all seals of one save
  int64_t store_timeout_ms = 120 * 1000;    // for a checkpoint store to say where to start from
  int64_t tick_ms = 20;                     // how often Tick is called
  RowRetention retention;                   // of old rows; now_ms is not used
  int64_t lost_node_ms = 24 * 3600 * 1000;  // a lost node is forgotten after so long
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
  // For how long this process did not run since the last call (PauseMeter); empty: it always ran.
  std::function<int64_t()> take_pause_ms = {};
  std::function<std::string()> new_id = {};  // of jobs and operations; empty: random ones
  // The thread that writes metrics and logs; null: they are written at once.
  ThreadExecutor* files = nullptr;
  Bell* growth = nullptr;           // rung when they have grown; may be null
  const StateDisk* disk = nullptr;  // null: there is always room
  WorkPools* pools = nullptr;       // for calls of checkpoint stores; null: `pool`
  // Writes to `store`, and calls back on the strand; null: inside the call, which waits for it.
  StoreWriter* writer = nullptr;
};

// Every method runs on the strand.
class JobController {
 public:
  JobController(ControllerOptions options, ControllerParts parts);

  // Once, first: reads the store, raises the term, ends what ran before.
  absl::Status Start();
  void Tick();

  // Requests. Accepted means durable. One that is sent again while the first is being written gets
  // the same answer; of two jobs of one name the first wins, once it is durable.
  void Submit(SubmitDraft draft, Answer<JobView> answer);
  void Cancel(const JobKey& key, const std::string& reason, Answer<JobView> answer);
  // Sets what is wanted: the job goes once it is over and quiet, at once if it is. Its last view.
  // NotFound once it is gone.
  void Delete(const JobKey& key, const DeleteDraft& draft, Answer<JobView> answer);
  // A failed or cancelled job starts again from its newest commit. The same request id again
  // changes nothing.
  void Retry(const JobKey& key, const RetryDraft& draft, Answer<JobView> answer);
  // Puts a hold on a node, or lifts that one. Durable. Drained: jobs save and move on.
  void HoldNode(const std::string& node_id,
                NodeHold hold,
                bool lift,
                const std::string& reason,
                Answer<NodeView> answer);
  // `deadline_ms`: how long it may take; 0: ten minutes.
  void CheckpointNow(const JobKey& key,
                     const std::string& request_id,
                     int64_t deadline_ms,
                     Answer<OperationRecord> answer);
  // AlreadyExists when a job has this name.
  absl::Status CheckNameIsFree(const JobKey& key) const;
  absl::Status CheckRetry(const JobKey& key) const;  // why the job cannot be tried again now
  // The facts of a job that the keeper needs, also for a job that is not submitted yet.
  CheckpointJob CheckpointsOf(const JobRecord& record) const;
  // Sets the newest commit back to `step`, which the keeper has found good at `path`; later steps
  // are moved aside before training goes on from there.
  void Rollback(const JobKey& key,
                const std::string& request_id,
                int64_t step,
                const std::string& path,
                const std::string& reason,
                Answer<JobView> answer);
  // A mark of a step was changed in the store: recorded for people.
  void NoteMark(const JobKey& key,
                int64_t step,
                MarkChange change,
                const std::string& reason,
                StatusAnswer answer);
  // Takes a listing of the job's folder and corrects the rows of steps that are gone.
  void NoteFolder(const std::string& uid, const FolderView& folder);
  absl::StatusOr<JobView> Get(const JobKey& key) const;
  std::vector<JobView> List() const;  // copies of all: for tests
  // Visits the jobs after `after` in the order of submission, copying nothing, for as long as
  // `visit` returns true.
  void VisitJobs(const JobCursor& after, const std::function<bool(const JobGlimpse&)>& visit) const;
  // The reason for which a job waits, composed on demand; empty if it does not wait.
  std::string WhyQueued(const std::string& uid) const;
  absl::StatusOr<OperationRecord> GetOperation(const std::string& id) const;
  const std::vector<SaveRecord>& Saves(const std::string& job_uid) const;
  std::vector<NodeView> Nodes() const;
  // A node that is lost, out of the list; else FailedPrecondition.
  void ForgetNode(const std::string& node_id, StatusAnswer answer);
  // Asks a node what is at the paths of a job that is to be accepted; never waits.
  void LookOnNode(LookWish wish);
  // The largest devices of nodes that are here.
  DeviceInventory Inventory() const;
  ControllerMetrics Measure() const;
  Feed& feed() { return feed_; }
  const MetricsLog& metrics() const { return *parts_.metrics; }
  const LogStore& logs() const { return *parts_.logs; }
  JobStore& store() { return *parts_.store; }
  int64_t term() const { return term_; }
  const std::string& cluster_id() const { return cluster_id_; }
  int64_t stale_refused() const { return stale_refused_; }
  // The newest that is durable.
  int64_t resource_version() const { return shown_version_; }

  // The fleet. `arrived_ms`: monotonic, when it came in; without it, now.
  void OnHello(StreamId stream, const HelloMessage& hello, int64_t arrived_ms = INT64_MAX);
  void OnUp(StreamId stream, const UpMessage& message, int64_t arrived_ms = INT64_MAX);
  void OnStreamClosed(StreamId stream, int64_t arrived_ms = INT64_MAX);

 private:
  // A transition with what belongs to its transaction and what follows it. It is decided when its
  // turn comes, from what the steps before it have left.
  struct Step {
    JobEvent event;
    StoreChange extra;
    std::function<void()> after;  // it is durable, applied and acted upon
    // Asked when its turn comes, may complete it; an error is its end, which needs `failed`.
    std::function<absl::Status(Step&)> check = {};
    // Changes the record beside the transition.
    std::function<void(JobRecord&)> edit = {};
    // Set: a step that the store refuses is not tried again, but told; nor does it wait behind one
    // that the store has refused.
    StatusAnswer failed = {};
  };
  // The change of a step, and its actions.
  struct Decided {
    std::shared_ptr<StoreChange> change = std::make_shared<StoreChange>();
    std::vector<JobActionKind> actions;
    bool transition = false;
  };
  struct Entry {
    JobRecord record;
    JobRun run;
    JobProgress progress;
    AvoidSet avoided;
    std::set<std::string> lacking;  // nodes that have not what the job names
    std::set<std::string> unfit;    // nodes with too small a data cache, or SubmitDraft::unfit
    SaveCoordinator saves;
    SaveCounts save_counts;    // of saves_: whoever changes these counts them again
    int64_t skip_told_ms = 0;  // wall time of the newest SaveSkipped event
    std::vector<JobCondition> conditions;
    std::deque<Step> waiting;  // in order; the first may be under way
    bool busy = false;         // the first of them is being written, or acted upon
    bool calling = false;      // it was handed over just now, by a call that has not returned
    bool refused = false;      // the store did not take the first: it is tried again at each tick
    std::vector<std::function<void()>> answers;  // to requests, when the step is done
    int settling = 0;             // commits that were intended before a restart are being looked at
    bool deleting = false;        // its checkpoints are being removed
    int64_t delete_after_ms = 0;  // wall time: not before, after a failed try
    int64_t swept_ms = 0;         // wall time
    RetentionTurn retention;
    ReleaseTurn release;
    std::optional<EpochRecord> launched;  // the newest epoch that was launched
    int64_t epoch_floor = 0;              // highest epoch of the job that a node has heard of
    int preparing = 0;    // looks at its steps on the pool; the next launch waits for them
    int64_t order = 0;    // of submission
    WallDeadline start;   // of the next attempt
    WallDeadline growth;  // the next resize may be
    // The last report to the scheduler: epoch, slots, and the number of slots that were over.
    std::tuple<int64_t, size_t, int64_t> held = {-1, 0, 0};
    std::set<std::string> nodes;  // where it holds devices, and is watched
    JobMeter meter;
    Goodput goodput;
    int64_t goodput_saved_ms = 0;  // monotonic
  };

  // job_controller.cc: state, requests, the persist-apply-act cycle.
  Entry* FindEntry(const std::string& uid);
  const Entry* FindEntry(const JobKey& key) const;
  Entry* FindEntry(const JobKey& key) {
    return const_cast<Entry*>(std::as_const(*this).FindEntry(key));
  }
  JobView ViewOf(const Entry& entry) const;
  JobGlimpse GlimpseOf(const Entry& entry) const;
  void Publish(const Entry& entry);
  JobEvent MakeEvent(JobEventKind kind) const;
  std::string NewId() const;
  // job_controller_steps.cc: changes on their way to the disk.
  // Numbers what is new in the change; `done` when it is durable.
  void Persist(const std::shared_ptr<StoreChange>& change, StatusAnswer done);
  // An event for people, which changes nothing: published when it is durable.
  void Record(JobEventRecord event);
  // In order, after the steps that wait; within the call where the writer is inline and none does.
  void Do(Entry& entry, Step step);
  void Do(Entry& entry, JobEvent event) { Do(entry, Step{std::move(event), {}, {}}); }
  // A step that somebody waits for. `request_id` may be empty. What the job's new state asks for is
  // done before the answer.
  void Ask(Entry& entry, Step step, const std::string& request_id, StatusAnswer answer);
  // Begins the steps that can begin. The entry may be gone afterwards, as after all that follows.
  void Pump(const std::string& uid);
  void Begin(Entry& entry);
  Decided Decide(const Entry& entry, const Step& step) const;
  void OnWritten(const std::string& uid, const Decided& decided, const absl::Status& status);
  void EndStep(Entry& entry, const Decided& decided, const absl::Status& status);
  void ApplyStep(Entry& entry, const Decided& decided, const Step& step);
  void RefuseStep(Entry& entry, const absl::Status& status);
  void GiveAnswers(const std::string& uid);
  bool IsIdle(const Entry& entry) const { return entry.waiting.empty() && !entry.busy; }
  // Requests by id and new jobs by name, while they are being written.
  // True: it is one of them, and `again` is called when that is over.
  bool WaitsFor(const std::string& what, std::function<void()> again);
  void EndWriting(const std::string& what);
  // The answer to an earlier request of this id; an error if that was another request.
  absl::StatusOr<std::optional<std::string>> KnownAnswer(const std::string& request_id,
                                                         const std::string& hash);
  static std::string RequestName(const std::string& request_id) { return "request " + request_id; }
  // The record of a request about a job that is asked for the first time, answered with the job's
  // uid. Nothing: `again` is called when the one of the same id is on disk, or `over` was given the
  // earlier answer or an error.
  std::optional<RequestRecord> BeginRequest(const JobKey& key,
                                            const RequestText& text,
                                            std::function<void()> again,
                                            const Answer<std::string>& over);
  // The answer of a request about a job: its view, once it is done.
  StatusAnswer WithView(const std::string& uid, Answer<JobView> answer);
  // The same for a request that was answered before with that uid.
  Answer<std::string> WithKnownView(Answer<JobView> answer);
  void Act(Entry& entry, JobActionKind action);
  void LoadJob(JobRecord record, const GoodputRow& ledger);
  Entry& AddEntry(JobRecord record);
  // Steps that wait for the store, then what its state asks for.
  void LookAt(Entry& entry, int64_t now_ms);
  void Settle(Entry& entry, const SaveRecord& save);
  absl::Status CheckDraft(const SubmitDraft& draft) const;
  JobView AcceptDraft(const JobRecord& record, const std::set<std::string>& unfit);
  // Runs calls of the job's checkpoint store: a store that hangs holds up its own jobs only.
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
  // Sends what the held trainers of a returning node lack.
  void TellHeld(const HelloMessage& hello);
  // The order to launch or to stop the job's ranks on the node has this id.
  void NoteOrdered(Entry& entry, const std::string& node_id, int64_t command);
  // Takes a trainer that a beat does not name as absent, if its node has heard its newest order.
  void NoteUnnamed(const std::string& node_id, const BeatMessage& beat);
  // Ranks that should have been launched on a node, and are not there.
  void RepeatLaunch(const std::string& node_id);
  std::map<std::string, Launch> MakeLaunches(const Entry& entry) const;
  // True: it was raised.
  bool GrantHorizon(Entry& entry);
  void RenewHorizon(Entry& entry);

  // job_controller_retention.cc: what goes away again.
  // `save_after`: a save that found no space is asked for again if steps could be deleted.
  void Retain(Entry& entry, bool save_after);
  void OnRetained(Entry& entry, const absl::StatusOr<std::vector<int64_t>>& deleted);
  bool IsQuiet(const Entry& entry) const;
  // If it is wanted and can be done now. The entry may be gone afterwards.
  void TryDelete(Entry& entry);
  // Removes the rows, then the job.
  void Forget(Entry& entry);
  void Remove(const std::string& uid);
  // A few jobs of all, in turn.
  void SweepJobs();
  void SweepRows(Entry& entry, int64_t now_ms);
  RowRetention Retention(int64_t now_ms) const;
  // Lost nodes that were not heard of for long.
  void SweepNodes(int64_t now_ms);
  // On the writer's thread, which it holds up for a while.
  void Sweep(std::function<absl::Status(JobStore&)> work);
  Step DeleteStep(const std::string& uid, const DeleteDraft& draft);
  static absl::Status CheckDelete(const JobRecord& job, bool force);

  // job_controller_run.cc: from placement to the end of an epoch.
  void Reconcile(Entry& entry);
  void ReconcileState(Entry& entry);
  void ReconcileRunning(Entry& entry);
  void Prepare(Entry& entry);
  struct Prepared {
    absl::Status status;
    std::string reason;  // of a status that is not OK
    RestorePoint restore;
    std::shared_ptr<const PlannedWorld> world;
    int64_t rollback_step = -1;  // as the record had it
  };

  void CheckRestore(const Entry& entry, Prepared& prepared) const;
  void OnPrepared(const std::string& uid, int64_t epoch, Prepared prepared);
  void LaunchTrainers(Entry& entry, const RestorePoint& restore);
  void SendLaunches(Entry& entry);
  void StopRun(Entry& entry);
  // Kills trainers that have not exited in time, then gives them up.
  void CheckQuiescing(Entry& entry);
  void DeclareZombie(Entry& entry, int64_t rank);
  void ReleaseZombies(const std::vector<DeviceRef>& devices);
  void CheckStall(Entry& entry);
  int64_t StallWallMs(const Entry& entry) const;
  // Ranks whose collectives do not go together, and ranks that are late.
  void CheckCollectives(Entry& entry);
  void CheckGrowth(Entry& entry);
  void SendToNodes(Entry& entry, const TrainerCommand& command);
  std::set<std::string> NodesOf(const Entry& entry) const;

  // job_controller_schedule.cc: what the scheduler is told, and what it says.
  // Places whoever fits; costs nothing when nothing has changed.
  void Schedule();
  // Tells the scheduler what the job holds and whether it waits. After each change of either.
  void SyncSchedule(Entry& entry);
  void SyncNode(const std::string& node_id);
  void Place(Placement placement);
  // The node's beats follow the shortest T of who has ranks there.
  void WatchNodes(Entry& entry, std::set<std::string> nodes);
  // T of the job's ranks: its own, or the coordinator's when it does not ask for one.
  int64_t DetectionOf(const Entry& entry) const;
  // When the job is looked at next although nothing is heard of it.
  void Wake(Entry& entry, int64_t due_ms);
  int64_t NextLookMs(const Entry& entry, int64_t now_ms) const;
  // Composed when somebody asks.
  std::string WhyQueued(const Entry& entry) const;

  // job_controller_fleet.cc: what daemons say.
  // The command's id.
  int64_t Send(StreamId stream, decltype(DownMessage::kind) kind);
  int64_t SendToNode(const std::string& node_id, decltype(DownMessage::kind) kind);
  void OnNewIncarnation(const HelloMessage& hello);
  std::vector<HeldTrainer> ReconcileHeld(const std::string& node_id, const HelloMessage& hello);
  void LoseNode(const LostNode& lost);
  // By the job's own T: the node may still be there for others.
  void LoseNodeFor(Entry& entry, const std::string& node_id, const std::string& reason);
  // It goes away: jobs save and move on without it if there is time, else from their last commit.
  void DrainNode(const std::string& node_id, const std::string& reason);
  void LoseSlots(const std::string& node_id,
                 const std::string& reason,
                 const std::set<TrainerKey>& kept);
  void LoseSlotsOf(Entry& entry,
                   const std::string& node_id,
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

  // job_controller_nodes.cc: which nodes are to be trusted.
  // Nodes to keep the job from now: that failed it or others, as far as it has room elsewhere.
  std::set<std::string> AvoidedNodes(const Entry& entry) const;
  // Nodes that the job is rather smaller than on.
  std::set<std::string> ShunnedNodes(const Entry& entry) const;
  // Marks the place of a failure; what people should know of it.
  std::vector<JobEventRecord> NoteFailure(Entry& entry, const FailureCause& cause);
  // The reason of a refused launch: missing data is the job's fault only when all nodes lack it.
  std::string ReasonOfRefusal(Entry& entry, const std::string& node_id, const std::string& said);
  // Returns true if the job has room without that node and without the nodes that lack its data;
  // devices that other jobs hold now count as room.
  bool FitsElsewhere(const Entry& entry, const std::string& node_id) const;
  // A change of a node's row: composed when those before it are done, so that none of them is lost.
  struct NodeWrite {
    // Empty: there is nothing to write.
    std::function<absl::StatusOr<StoreChange>()> compose;
    StatusAnswer done;
  };
  void WriteNode(const std::string& node_id, NodeWrite write);
  void BeginNodeWrite(const std::string& node_id);
  void SaveRow(const std::string& node_id, const std::string& what);
  // In force when it is durable.
  void SaveHold(const std::string& node_id,
                NodeHold hold,
                const std::string& reason,
                StatusAnswer done);
  void Quarantine(Entry& entry, const FailureCause& cause);
  // The node is a member now; nullopt: it was refused, or sent away to ask again.
  std::optional<HelloOutcome> AdmitNode(StreamId stream, const HelloMessage& hello, int64_t now_ms);
  // Just after a start the daemon that had the name before comes first: another one has to ask
  // again.
  bool NameIsAwaited(const HelloMessage& hello) const;
  // Just after a start: nodes that were here before it may be on their way back.
  bool NodesReturn(int64_t now_ms) const {
    return !known_nodes_.empty() && now_ms < return_until_ms_;
  }
  // Sends the looks that nodes have time for.
  void SendLooks();
  NodeRow RowOf(const std::string& node_id) const;
  std::string NodeStateOf(const NodeRecord& node) const;
  NodeView ViewOfNode(const NodeRecord& node) const;

  // job_controller_metrics.cc: numbers for pages, and where the time of devices goes.
  // Before and after each change of a job's devices, or of what they do.
  void NoteDeviceTime(Entry& entry);
  void LoadGoodput(Entry& entry, const GoodputRow& row);
  void SaveGoodput(Entry& entry);  // now and then
  void WriteGoodput(Entry& entry);
  void NoteTrained(Entry& entry, const StepRecord& record);
  void CountEvent(const JobEventRecord& event);
  JobMetrics MeasureJob(const Entry& entry) const;
  void MeasureNodes(ControllerMetrics& metrics) const;

  // job_controller_saves.cc: saves.
  void RequestSave(Entry& entry, bool then_stop);
  void CheckSaves(Entry& entry);
  // The saves of the run's epoch.
  SaveCoordinator& SavesOf(Entry& entry);
  void OnSaveStarted(Entry& entry, const SaveStarted& started);
  void OnSaveFailed(Entry& entry, int64_t rank, const SaveFailed& failed);
  // Tells the trainers, the operations and the log of events; what was written is removed.
  void EndSave(Entry& entry, const EndedSave& ended);
  void AnswerSeal(Entry& entry, int64_t rank, CommitResult answer);
  void RemoveAttempt(Entry& entry, const SaveKey& key, bool make_room);
  void OnSeal(Entry& entry, int64_t rank, const ckpt::Seal& seal);
  // Commits the next save that all ranks have sealed, one at a time and in the order of steps, once
  // the plan of the run is known.
  void CommitNext(Entry& entry);
  void StartCommit(Entry& entry, const SaveKey& key);
  // Its intent is durable.
  void NoteSealed(const SaveRecord& save, int64_t sequence);
  void Commit(const SaveRecord& save,
              int64_t sequence,
              const std::shared_ptr<SaveRequest>& request);
  // Updates the condition CheckpointFresh, and ends a job whose limits on saves are passed.
  void CheckFreshness(Entry& entry);
  void AddRecord(const SaveRecord& record);
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
  // Writes the operations that the database has not taken.
  void SaveOperationsAgain();
  // As decided; people see it when it is durable.
  void NoteOperation(const OperationRecord& operation);
  void ShowOperation(const OperationRecord& operation);
  // The operation for a save that is requested now: a new save, a pending one or the newest commit.
  absl::StatusOr<OperationRecord> BeginOperation(Entry& entry);
  // Fails the operations whose deadline has passed; each says what used the time.
  void ExpireOperations();

  // job_controller_checkpoints.cc: the checkpoint store against the record.
  void OnCorruptCheckpoint(Entry& entry, const FailureCause& cause);
  RestoreQuery QueryOf(const Entry& entry) const;
  void TellMissingReports(Entry& entry, const RestorePoint& restore);
  void TellNumericsChange(Entry& entry, const RestorePoint& restore);
  void NoteRestore(Entry& entry, const Prepared& prepared);
  void NoteSettled(Entry& entry, const SettledSave& settled);
  void NoteRollback(Entry& entry, int64_t step);
  static absl::Status CheckRollback(const JobRecord& job, int64_t step);
  // A job that is over and quiet lets go of its pins and attempts, if that is due.
  void TryRelease(Entry& entry);
  void ReleaseCheckpoints(Entry& entry, StoreWork work);
  void NoteReleased(Entry& entry, const absl::StatusOr<std::optional<SettledSave>>& settled);
  void LookAtFolder(const Entry& entry);
  void OnCondemned(const std::string& uid,
                   int64_t step,
                   const absl::StatusOr<StepVerdict>& verdict);

  ControllerOptions options_;
  ControllerParts parts_;
  Membership membership_;
  NodePenalties penalties_;
  NodeLooks looks_;
  Scheduler scheduler_;
  Agenda agenda_;                          // jobs by when they are looked at next
  std::map<std::string, Entry> entries_;   // by uid
  std::map<JobKey, std::string> by_name_;  // uids
  std::set<JobCursor> by_age_;
  std::map<std::string, OperationRecord> operations_;        // as decided
  std::map<std::string, OperationRecord> shown_operations_;  // as durable
  std::set<std::string> unsaved_operations_;                 // ids
  std::set<std::string> open_operations_;                    // ids
  std::map<std::string, std::vector<SaveRecord>> saves_;     // by uid
  StaleTrainers stale_;
  Zombies zombies_;
  std::map<int64_t, SentLaunch> launches_;  // by command id, until answered or its node vanishes
  std::map<std::string, std::set<std::string>> launching_;  // uids by node, until seen there
  std::map<std::string, NodeRow> known_nodes_;  // that were here when this coordinator started
  std::set<std::string> expected_nodes_;        // known before the restart and not back yet
  int64_t return_until_ms_ = 0;                 // monotonic: these are awaited until then
  int64_t registration_until_ms_ = 0;  // monotonic: nothing is placed before that after a restart
  std::map<std::string, int> releasing_;  // calls of Release that are under way, by store
  Feed feed_;
  std::unique_ptr<StoreWriter> inline_writer_;
  std::map<std::string, std::vector<std::function<void()>>> being_written_;
  std::map<std::string, std::deque<NodeWrite>> node_writes_;  // by node; the first is under way
  std::string cluster_id_;
  int64_t term_ = 0;
  int64_t event_seq_ = 0;
  int64_t resource_version_ = 0;  // the newest that was given to a change
  int64_t shown_version_ = 0;
  int64_t command_id_ = 0;
  int64_t stale_refused_ = 0;
  int64_t last_order_ = 0;
  ControllerCounts counts_;
  // Both until a node changes.
  mutable std::optional<std::string> why_no_gpu_;
  mutable std::optional<DeviceInventory> inventory_;
  JobCursor swept_;
  int64_t requests_swept_ms_ = 0;
};

}  // namespace ravel::coordinator
