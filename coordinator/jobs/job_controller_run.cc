// JobController: from placement to the end of an epoch. Reconcile compares the record's state with
// what the trainers are and does the next thing that is missing: prepare (restore point and plan,
// on a pool), launch, let train, stop, wait for all exits. It is called after every message and on
// every tick, so no edge can be missed. The launch is durable before it is sent, because a
// restarted coordinator adopts by that record. Epochs fence: a process that cannot be killed keeps
// its device out of the pool (DeclareZombie), but does not keep the job from going on.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "common/plan/numerics.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

// After SIGKILL a process still has to give back what it holds; a busy host takes its time.
constexpr int64_t kLeastExitMs = 1000;

}  // namespace

void JobController::Reconcile(Entry& entry) {
  ReconcileState(entry);
  SyncSchedule(entry);
}

void JobController::ReconcileState(Entry& entry) {
  if (!IsIdle(entry) || entry.settling > 0) {
    return;  // looked at when what is under way is done
  }
  const JobRecord& record = entry.record;
  if (record.spec.max_run_time_ms > 0 && record.state != JobState::kStopping &&
      HeldMs(record, parts_.clock->WallMs()) >= record.spec.max_run_time_ms) {
    Do(entry, MakeEvent(JobEventKind::kRunTimeOver));
    if (!IsIdle(entry)) {
      return;
    }
  }
  const bool stopping = record.state == JobState::kStopping;
  const bool broken =
      record.state == JobState::kRecovering && record.launched_epoch != record.epoch;
  if (stopping || broken) {
    if (broken && entry.run.phase == RunPhase::kIdle) {
      return;  // waits to be placed
    }
    if (!entry.run.AllExited() || entry.run.committing > 0) {
      CheckQuiescing(entry);
      return;
    }
    JobEvent event = MakeEvent(JobEventKind::kQuiesced);
    event.cause = entry.run.failure.value_or(FailureCause{"CommError", "", "", -1, -1});
    event.cause.elsewhere = FitsElsewhere(entry, event.cause.node);
    if (record.reason == "Rollback") {
      event.cause = {record.reason, record.message, "", -1, -1};  // whatever the stop looks like
    }
    const std::string uid = record.uid;
    StoreChange extra;
    if (broken) {
      extra.events = NoteFailure(entry, event.cause);
    }
    Do(entry, Step{std::move(event), std::move(extra), [this, uid] {
                     Entry* done = FindEntry(uid);
                     if (!IsTerminal(done->record.state)) {
                       done->run = JobRun();
                     }
                   }});
    return;
  }
  if (HoldsDevices(record.state)) {
    ReconcileRunning(entry);
  }
}

void JobController::ReconcileRunning(Entry& entry) {
  JobRun& run = entry.run;
  if (run.failure) {
    JobEvent event = MakeEvent(JobEventKind::kEpochBroken);
    event.cause = *run.failure;
    event.cause.step = entry.progress.step;
    event.epoch_floor = entry.epoch_floor;
    run.failure->step = entry.progress.step;
    Do(entry, std::move(event));
    if (IsIdle(entry)) {
      Reconcile(entry);
    }
    return;
  }
  if (run.phase == RunPhase::kAdopting) {
    CheckAdoption(entry);
    return;
  }
  const int64_t phase_ms = parts_.clock->MonotonicMs() - run.phase_since_ms;
  if (run.phase == RunPhase::kPreparing && phase_ms > options_.store_timeout_ms) {
    // Its answer, should it come yet, is for an epoch that is over.
    run.Blame({"StoreUnavailable",
               absl::StrCat(
                   entry.record.spec.checkpoint.store, ": no answer for ", phase_ms / 1000, " s"),
               "",
               -1,
               entry.progress.step});
    return;  // broken at the next tick
  }
  if (run.phase == RunPhase::kIdle || run.phase == RunPhase::kPreparing) {
    return;
  }
  if (run.phase == RunPhase::kBootstrapping && run.AllReady()) {
    Step step = {.event = MakeEvent(JobEventKind::kAllReady), .extra = {}, .after = {}};
    step.extra.events = std::exchange(run.remarks, {});
    entry.lacking.clear();
    Do(entry, std::move(step));
    if (!IsIdle(entry)) {
      return;
    }
  }
  if (run.last_step_done && entry.record.state != JobState::kFinishing) {
    JobEvent event = MakeEvent(JobEventKind::kLastStep);
    event.step = entry.record.spec.steps;
    Do(entry, std::move(event));
    if (!IsIdle(entry)) {
      return;
    }
  }
  if (run.AllExited() && run.committing == 0) {
    const bool all_done = std::all_of(
        run.slots.begin(), run.slots.end(), [](const TrainerSlot& slot) { return slot.done; });
    if (all_done) {
      Do(entry, MakeEvent(JobEventKind::kAllDone));
    } else if (entry.record.state == JobState::kResizing) {
      run = JobRun();
    } else {
      run.Blame({"ProcessCrash", "the trainers stopped unasked", "", -1, entry.progress.step});
    }
    return;
  }
  CheckStall(entry);
  CheckCollectives(entry);
  CheckSaves(entry);
  CheckGrowth(entry);
}

// The cluster's wall for steps that go; bootstrap, restore, first steps, evaluation and saves have
// the job's warm-up allowance, counted from the newest byte or phase that moved.
int64_t JobController::StallWallMs(const Entry& entry) const {
  const JobRun& run = entry.run;
  const plan::JobSpec& spec = entry.record.spec;
  const bool steady =
      run.phase == RunPhase::kTraining && run.step_times.warm() &&
      std::all_of(run.slots.begin(), run.slots.end(), [](const TrainerSlot& slot) {
        return slot.phase.empty() || slot.phase == "training" || slot.phase == "waiting";
      });
  const auto usual_ms = static_cast<int64_t>(spec.stall_factor * run.step_times.P99() * 1000);
  return std::max({options_.step_timeout_ms, usual_ms, steady ? 0 : spec.warmup_allowance_ms});
}

void JobController::CheckStall(Entry& entry) {
  const int64_t still_ms = parts_.clock->MonotonicMs() - entry.run.progress_ms;
  if (still_ms < StallWallMs(entry)) {
    return;
  }
  // The rank that is furthest behind and longest in its phase is the one to look at.
  int64_t suspect = 0;
  for (size_t rank = 1; rank < entry.run.slots.size(); ++rank) {
    const TrainerSlot& slot = entry.run.slots[rank];
    const TrainerSlot& worst = entry.run.slots[static_cast<size_t>(suspect)];
    if (std::make_pair(slot.step, -slot.phase_age_ms) <
        std::make_pair(worst.step, -worst.phase_age_ms)) {
      suspect = static_cast<int64_t>(rank);
    }
  }
  const TrainerSlot& slot = entry.run.slots[static_cast<size_t>(suspect)];
  entry.run.Blame({"Stall",
                   absl::StrCat("no step for ",
                                still_ms / 1000,
                                " s; rank ",
                                suspect,
                                " (",
                                slot.place.node_id,
                                ") is at step ",
                                slot.step,
                                ", phase ",
                                slot.phase.empty() ? "unknown" : slot.phase),
                   slot.place.node_id,
                   suspect,
                   slot.step});
}

void JobController::CheckGrowth(Entry& entry) {
  JobRun& run = entry.run;
  const JobRecord& record = entry.record;
  if (record.state != JobState::kRunning || run.phase != RunPhase::kTraining) {
    return;
  }
  int64_t free = 0;
  if (record.world_size < record.spec.device_count && scheduler_.queued() == 0) {
    free = scheduler_.Free(ShapeOf(record.spec, ShunnedNodes(entry)));
  }
  const int64_t larger = free == 0 ? 0 : ChooseSize(record.spec, record.world_size + free);
  if (larger <= record.world_size) {
    run.grow_since_ms.reset();
    return;
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  if (!run.grow_since_ms) {
    run.grow_since_ms = now_ms;
  }
  const bool settled = now_ms - *run.grow_since_ms >= record.spec.elastic.grow_delay_ms;
  const int64_t every_ms = record.spec.elastic.grow_every_ms;
  entry.growth.Follow(record.resized_ms == 0 ? 0 : record.resized_ms + every_ms,
                      parts_.clock->WallMs(),
                      now_ms,
                      every_ms);
  const bool rested = now_ms >= entry.growth.due_ms();
  if (settled && rested && entry.saves.idle() && run.committing == 0) {
    JobEvent event = MakeEvent(JobEventKind::kResizeRequested);
    event.cause.message = absl::StrCat(record.world_size, " → ", larger, " devices");
    Do(entry, std::move(event));
  }
}

void JobController::Prepare(Entry& entry) {
  const int64_t epoch = entry.record.epoch;
  entry.run.epoch = epoch;
  entry.run.phase_since_ms = entry.run.progress_ms = parts_.clock->MonotonicMs();
  const std::string uid = entry.record.uid;
  const CheckpointJob job = CheckpointsOf(entry.record);
  const RestoreQuery query = QueryOf(entry);
  const int64_t ranks = entry.record.world_size;
  const bool shared_memory = SharesMemory(entry.run.transport);
  entry.preparing += 1;
  StorePool(job.spec, StoreWork::kRestore)
      ->Post([this, uid, epoch, job, query, ranks, shared_memory] {
        Prepared prepared;
        prepared.rollback_step = query.rollback_step;
        auto world = parts_.planner->Plan(job.spec, ranks, shared_memory);
        if (world.ok()) {
          prepared.world = *world;
          absl::StatusOr<RestorePoint> restore = parts_.keeper->PrepareRestore(job, query);
          if (restore.ok()) {
            prepared.restore = *std::move(restore);
          } else {
            prepared.status = restore.status();
            prepared.reason =
                absl::IsDataLoss(prepared.status) ? "NoGoodCheckpoint" : "StoreUnavailable";
          }
        } else {
          prepared.status = world.status();
          prepared.reason = "PlanRejected";
        }
        parts_.strand->Post([this, uid, epoch, prepared] { OnPrepared(uid, epoch, prepared); });
      });
}

// Refuses a restore point that the job cannot, or may not, go on from.
void JobController::CheckRestore(const Entry& entry, Prepared& prepared) const {
  const RestorePoint& restore = prepared.restore;
  const plan::JobSpec& spec = entry.record.spec;
  if (!prepared.status.ok()) {
    return;
  }
  if (restore.step >= spec.steps) {
    if (!restore.own) {
      prepared.status = absl::InvalidArgumentError(absl::StrCat("spec.checkpoint.resumeFrom: step ",
                                                                restore.step,
                                                                " is not below training.steps ",
                                                                spec.steps));
      prepared.reason = "PlanRejected";
    }
    return;  // nothing is left to compute
  }
  if (!restore.numerics_change.empty() && !spec.checkpoint.allow_numerics_change) {
    prepared.status =
        absl::FailedPreconditionError(plan::NumericsRefusal(restore.path, restore.numerics_change));
    prepared.reason = "NumericsChanged";
  }
}

void JobController::OnPrepared(const std::string& uid, int64_t epoch, Prepared prepared) {
  Entry* entry = FindEntry(uid);
  if (entry == nullptr) {
    return;
  }
  entry->preparing -= 1;
  SyncSchedule(*entry);  // it may wait for this look only
  if (prepared.restore.settled) {
    NoteSettled(*entry, *prepared.restore.settled);
  }
  if (entry->record.epoch != epoch || entry->run.phase != RunPhase::kPreparing) {
    return;  // the epoch was given up in the meantime
  }
  const RestorePoint& restore = prepared.restore;
  const int64_t steps = entry->record.spec.steps;
  CheckRestore(*entry, prepared);
  if (!prepared.status.ok()) {
    entry->run.Blame(
        {prepared.reason, std::string(prepared.status.message()), "", -1, entry->progress.step});
    Reconcile(*entry);
    return;
  }
  NoteRestore(*entry, prepared);
  entry->run.world = prepared.world;
  if (restore.own && restore.step >= steps) {
    entry->progress.step = restore.step;
    entry->run.slots.clear();
    Do(*entry, MakeEvent(JobEventKind::kAllDone));
    return;
  }
  TellNumericsChange(*entry, restore);
  LaunchTrainers(*entry, restore);
}

void JobController::LaunchTrainers(Entry& entry, const RestorePoint& restore) {
  JobRun& run = entry.run;
  const JobRecord& record = entry.record;
  run.phase = RunPhase::kBootstrapping;
  run.launch_waits = true;
  run.restore_step = restore.step;
  run.restore_path = restore.path;
  run.progress_ms = parts_.clock->MonotonicMs();
  run.board.Reset(static_cast<int64_t>(run.slots.size()));
  entry.progress.step = std::max<int64_t>(restore.step, 0);
  NoteDeviceTime(entry);
  entry.goodput.Restart(restore.step);
  std::string members;
  for (const TrainerSlot& slot : run.slots) {
    absl::StrAppend(
        &members, members.empty() ? "" : " ", slot.place.node_id, ":", slot.place.device);
  }
  JobEventRecord event;
  event.time_ms = parts_.clock->WallMs();
  event.job_uid = record.uid;
  event.epoch = run.epoch;
  event.attempt = record.attempt;
  event.step = restore.step;
  event.type = "Launched";
  event.message = absl::StrCat(run.slots.size(),
                               " ranks over ",
                               run.transport,
                               " on ",
                               members,
                               ", ",
                               restore.step < 0 ? "initial weights" : restore.path);
  entry.launched = EpochRecord{record.uid,
                               run.epoch,
                               record.attempt,
                               static_cast<int64_t>(run.slots.size()),
                               Hex(run.world->digest),
                               members,
                               std::max<int64_t>(restore.step, 0),
                               restore.path,
                               event.time_ms,
                               run.transport};
  // Durable first: a coordinator that is started anew takes these ranks over by this record.
  Step step{MakeEvent(JobEventKind::kNoted), {}, {}};
  step.extra.events.push_back(event);
  step.extra.epochs.push_back(*entry.launched);
  step.after = [this, uid = record.uid, epoch = run.epoch] {
    Entry& job = entries_.at(uid);
    const bool current = job.run.epoch == epoch && job.run.phase == RunPhase::kBootstrapping;
    if (current && !job.run.failure) {  // else it is over before anybody was told to launch
      job.run.launch_waits = false;
      SendLaunches(job);
    }
  };
  Do(entry, std::move(step));
}

void JobController::SendLaunches(Entry& entry) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  for (TrainerSlot& slot : entry.run.slots) {
    slot.told_ms = now_ms;
  }
  for (auto& [node_id, launch] : MakeLaunches(entry)) {
    launching_[node_id].insert(entry.record.uid);
    const int64_t command = SendToNode(node_id, std::move(launch));
    NoteOrdered(entry, node_id, command);
    launches_[command] = {entry.record.uid, entry.run.epoch, node_id};
  }
  Publish(entry);
}

std::set<std::string> JobController::NodesOf(const Entry& entry) const {
  std::set<std::string> nodes;
  for (const TrainerSlot& slot : entry.run.slots) {
    if (!slot.exited) {
      nodes.insert(slot.place.node_id);
    }
  }
  return nodes;
}

void JobController::SendToNodes(Entry& entry, const TrainerCommand& command) {
  for (TrainerSlot& slot : entry.run.slots) {
    slot.told_ms = parts_.clock->MonotonicMs();
  }
  for (const std::string& node_id : NodesOf(entry)) {
    SendToNode(node_id, command);
  }
}

void JobController::StopRun(Entry& entry) {
  JobRun& run = entry.run;
  if (run.phase == RunPhase::kIdle) {
    return;
  }
  if (run.phase == RunPhase::kPreparing || run.launch_waits) {
    run.slots.clear();  // nothing was launched
  }
  run.phase = RunPhase::kQuiescing;
  run.quiesce_since_ms = parts_.clock->MonotonicMs();
  run.killed = false;
  const std::string reason = entry.record.reason;
  // The watchdogs first: a step thread that is stuck in a collective hears nothing else.
  SendToNodes(entry, {entry.record.uid, run.epoch, -1, PeerLost{reason}});
  for (const std::string& node_id : NodesOf(entry)) {
    NoteOrdered(
        entry,
        node_id,
        SendToNode(node_id, StopTrainers{entry.record.uid, run.epoch, reason, DetectionOf(entry)}));
  }
  entry.saves.DropUncommitted();
  if (run.committing == 0) {
    FinishOperations(entry.record.uid, INT64_MAX, OperationState::kFailed, reason, -1, "");
  }
}

void JobController::CheckQuiescing(Entry& entry) {
  JobRun& run = entry.run;
  const int64_t grace_ms = DetectionOf(entry);
  const int64_t since_ms = parts_.clock->MonotonicMs() - run.quiesce_since_ms;
  if (run.phase != RunPhase::kQuiescing || since_ms < grace_ms) {
    return;
  }
  if (!run.killed) {  // the first order may be lost
    run.killed = true;
    for (const std::string& node_id : NodesOf(entry)) {
      NoteOrdered(
          entry,
          node_id,
          SendToNode(node_id, StopTrainers{entry.record.uid, run.epoch, entry.record.reason, 0}));
    }
  }
  if (since_ms < grace_ms + std::max(grace_ms, kLeastExitMs)) {
    return;
  }
  for (size_t rank = 0; rank < run.slots.size(); ++rank) {
    const NodeRecord* node = membership_.Find(run.slots[rank].place.node_id);
    // Without a stream the exit may be on its way; the node comes back or is lost.
    if (!run.slots[rank].exited && node != nullptr && node->stream) {
      DeclareZombie(entry, static_cast<int64_t>(rank));
    }
  }
  Wake(entry, parts_.clock->MonotonicMs());
}

// Fencing by epoch makes waiting unnecessary: what the old rank still does counts for nothing.
void JobController::DeclareZombie(Entry& entry, int64_t rank) {
  const JobRecord& record = entry.record;
  TrainerSlot& slot = entry.run.slots[static_cast<size_t>(rank)];
  slot.exited = true;
  zombies_.Add(slot.place.node_id,
               {record.uid, entry.run.epoch, rank},
               slot.place.device,
               record.name,
               slot.ordered);
  scheduler_.SetBlocked({slot.place.node_id, slot.place.device}, true);
  JobEventRecord event;
  event.time_ms = parts_.clock->WallMs();
  event.job_uid = record.uid;
  event.epoch = entry.run.epoch;
  event.attempt = record.attempt;
  event.step = entry.progress.step;
  event.type = "Zombie";
  event.reason = "Unkillable";
  event.node = slot.place.node_id;
  event.rank = rank;
  event.message = absl::StrCat("rank ",
                               rank,
                               " on ",
                               slot.place.node_id,
                               " was killed and is not gone; device ",
                               slot.place.device,
                               " is out until its exit is reported");
  log::Warning(absl::StrCat("job ", record.name, ": ", event.message));
  Record(std::move(event));
}

void JobController::ReleaseZombies(const std::vector<DeviceRef>& devices) {
  for (const DeviceRef& device : devices) {
    log::Info(absl::StrCat("device ", device.device, " of ", device.node_id, " is back"));
    scheduler_.SetBlocked(device, false);
  }
}

}  // namespace ravel::coordinator
