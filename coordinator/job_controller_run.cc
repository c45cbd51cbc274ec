// JobController: from placement to the end of an epoch.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/job_controller.h"

namespace ravel::coordinator {
namespace {

// Past the daemon's own kill time: then the exits are asked for by making the node introduce itself
// again.
constexpr int64_t kExitMarginMs = 5000;

// Why no node offers a GPU, in the nodes' own words, equal ones once; empty where one does.
std::string WhyNoGpu(const std::map<std::string, NodeRecord>& nodes) {
  std::map<std::string, std::vector<std::string>> names_by_reason;
  for (const auto& [id, node] : nodes) {
    for (const DeviceFacts& device : node.facts.devices) {
      if (device.kind == "gpu") {
        return "";
      }
    }
    names_by_reason[node.message.empty() ? "offers no GPU" : node.message].push_back(id);
  }
  if (names_by_reason.empty()) {
    return ": no node is connected";
  }
  std::string text = ": no node has a GPU";
  constexpr size_t kMostReasons = 3;
  size_t said = 0;
  for (const auto& [reason, names] : names_by_reason) {
    if (++said > kMostReasons) {
      absl::StrAppend(&text, "; and other reasons");
      break;
    }
    const size_t others = names.size() - 1;
    absl::StrAppend(&text, said == 1 ? " (" : "; ", names.front());
    if (others > 0) {
      absl::StrAppend(&text, " and ", others, " more");
    }
    absl::StrAppend(&text, ": ", reason);
  }
  return text + ")";
}

// Whether the job has room without that node, on devices that others may hold just now.
bool FitsWithout(const std::string& node_id,
                 const plan::JobSpec& spec,
                 const std::map<std::string, NodeRecord>& nodes) {
  int64_t devices = 0;
  for (const auto& [id, node] : nodes) {
    if (id == node_id || node.state != NodeState::kReady) {
      continue;
    }
    devices += std::count_if(
        node.facts.devices.begin(), node.facts.devices.end(), [&spec](const DeviceFacts& device) {
          return (device.kind == "cpu") == spec.cpu_devices;
        });
  }
  return ChooseSize(spec, devices) > 0;
}

}  // namespace

void JobController::Reconcile(Entry& entry) {
  if (!entry.waiting.empty() || entry.settling) {
    return;
  }
  const JobRecord& record = entry.record;
  const bool stopping = record.state == JobState::kStopping;
  const bool broken =
      record.state == JobState::kRecovering && record.launched_epoch != record.epoch;
  if (stopping || broken) {
    if (broken && entry.run.phase == RunPhase::kIdle) {
      return;  // waits to be placed
    }
    if (!entry.run.AllExited() || entry.run.committing > 0) {
      NudgeQuiescing(entry);
      return;
    }
    JobEvent event = MakeEvent(JobEventKind::kQuiesced);
    event.cause = entry.run.failure.value_or(FailureCause{"CommError", "", "", -1, -1});
    event.cause.elsewhere = FitsWithout(event.cause.node, record.spec, membership_.nodes());
    if (record.reason == "Rollback") {
      event.cause = {record.reason, record.message, "", -1, -1};  // whatever the stop looks like
    }
    const std::string uid = record.uid;
    Do(entry, Step{std::move(event), {}, [this, uid] {
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
    if (entry.waiting.empty()) {
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
    Do(entry, std::move(step));
  }
  if (run.last_step_done && entry.record.state != JobState::kFinishing) {
    JobEvent event = MakeEvent(JobEventKind::kLastStep);
    event.step = entry.record.spec.steps;
    Do(entry, std::move(event));
  }
  if (run.AllExited() && run.committing == 0) {
    const bool all_done = std::all_of(
        run.slots.begin(), run.slots.end(), [](const TrainerSlot& slot) { return slot.done; });
    if (all_done) {
      Do(entry, MakeEvent(JobEventKind::kAllDone));
    } else if (entry.record.state == JobState::kResizing) {
      run = JobRun();
      scheduling_needed_ = true;
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

void JobController::CheckStall(Entry& entry) {
  const int64_t still_ms = parts_.clock->MonotonicMs() - entry.run.progress_ms;
  if (still_ms < options_.step_timeout_ms) {
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
  const bool others_wait = std::any_of(entries_.begin(), entries_.end(), [](const auto& other) {
    return other.second.record.state == JobState::kQueued;
  });
  int64_t free = 0;
  if (record.world_size < record.spec.device_count && !others_wait) {
    for (const NodeOffer& offer : FreeDevices(record.spec.cpu_devices)) {
      free += static_cast<int64_t>(offer.devices.size());
    }
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
  const bool rested = record.resized_ms == 0 || parts_.clock->WallMs() - record.resized_ms >=
                                                    record.spec.elastic.grow_every_ms;
  if (settled && rested && run.saves.empty() && run.committing == 0) {
    JobEvent event = MakeEvent(JobEventKind::kResizeRequested);
    event.cause.message = absl::StrCat(record.world_size, " → ", larger, " devices");
    Do(entry, std::move(event));
  }
}

std::vector<NodeOffer> JobController::FreeDevices(bool cpu) const {
  std::map<std::string, std::set<int64_t>> used;
  for (const auto& [uid, entry] : entries_) {
    for (const TrainerSlot& slot : entry.run.slots) {
      if (!slot.exited) {
        used[slot.place.node_id].insert(slot.place.device);
      }
    }
  }
  std::vector<NodeOffer> offers;
  for (const auto& [id, node] : membership_.nodes()) {
    const auto stale = stale_.find(id);
    if (node.state != NodeState::kReady || !node.stream ||
        (stale != stale_.end() && !stale->second.empty())) {
      continue;
    }
    NodeOffer offer{id, node.facts.host_id, node.facts.data_address, {}};
    for (size_t device = 0; device < node.facts.devices.size(); ++device) {
      const bool fits = (node.facts.devices[device].kind == "cpu") == cpu;
      if (fits && !used[id].contains(static_cast<int64_t>(device))) {
        offer.devices.push_back(static_cast<int64_t>(device));
      }
    }
    if (!offer.devices.empty()) {
      offers.push_back(std::move(offer));
    }
  }
  return offers;
}

bool JobController::HasStaleTrainers(const std::string& uid) const {
  for (const auto& [node_id, trainers] : stale_) {
    const auto first = trainers.lower_bound({uid, INT64_MIN, INT64_MIN});
    if (first != trainers.end() && std::get<0>(*first) == uid) {
      return true;
    }
  }
  return false;
}

void JobController::Schedule() {
  const bool registering =
      !expected_nodes_.empty() && parts_.clock->MonotonicMs() < registration_until_ms_;
  if (registering) {
    return;
  }
  LoseAbsentNodes();
  for (const std::string& uid : order_) {
    Entry& entry = entries_.at(uid);
    const JobRecord& record = entry.record;
    const bool waits =
        record.state == JobState::kQueued ||
        (record.state == JobState::kRecovering && record.launched_epoch != record.epoch) ||
        record.state == JobState::kResizing;
    if (waits && entry.run.phase == RunPhase::kIdle && entry.waiting.empty() && !entry.settling &&
        entry.preparing == 0 && !HasStaleTrainers(uid) &&
        record.not_before_ms <= parts_.clock->WallMs()) {
      TryPlace(entry);
    }
  }
}

bool JobController::TryPlace(Entry& entry) {
  JobRecord& record = entry.record;
  std::vector<NodeOffer> offers = FreeDevices(record.spec.cpu_devices);
  int64_t free = 0;
  for (const NodeOffer& offer : offers) {
    free += static_cast<int64_t>(offer.devices.size());
  }
  const int64_t size = ChooseSize(record.spec, free);
  std::string obstacle;
  if (size == 0) {
    obstacle =
        absl::StrCat("needs ",
                     record.spec.elastic.sizes.empty() ? 1 : record.spec.elastic.sizes.front(),
                     " free ",
                     record.spec.cpu_devices ? "cpu" : "gpu",
                     " devices, ",
                     free,
                     " are free",
                     record.spec.cpu_devices ? "" : WhyNoGpu(membership_.nodes()));
  }
  std::vector<RankPlace> places;
  absl::StatusOr<std::string> transport = std::string();
  if (size > 0) {
    places = PlaceRanks(size, std::move(offers));
    transport = TransportOf(record.spec, places);
    obstacle = transport.ok() ? "" : std::string(transport.status().message());
  }
  if (!obstacle.empty()) {
    if (record.state != JobState::kQueued) {
      Do(entry, MakeEvent(JobEventKind::kBelowMinimum));
    } else if (record.message != obstacle) {
      record.message = obstacle;  // an explanation, not a fact to keep
      Publish(entry);
    }
    return false;
  }
  entry.run = JobRun();
  for (RankPlace& place : places) {
    TrainerSlot slot;
    slot.place = std::move(place);
    entry.run.slots.push_back(std::move(slot));
  }
  entry.run.transport = *transport;
  entry.run.phase = RunPhase::kPreparing;
  JobEvent event = MakeEvent(JobEventKind::kPlaced);
  event.world_size = size;
  event.epoch_floor = entry.epoch_floor;
  Do(entry, std::move(event));
  return true;
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

void JobController::OnPrepared(const std::string& uid, int64_t epoch, Prepared prepared) {
  Entry* entry = FindEntry(uid);
  if (entry == nullptr) {
    return;
  }
  entry->preparing -= 1;
  if (prepared.restore.settled) {
    NoteSettled(*entry, *prepared.restore.settled);
  }
  if (entry->record.epoch != epoch || entry->run.phase != RunPhase::kPreparing) {
    return;  // the epoch was given up in the meantime
  }
  const RestorePoint& restore = prepared.restore;
  const int64_t steps = entry->record.spec.steps;
  if (prepared.status.ok() && !restore.own && restore.step >= steps) {
    prepared.status = absl::InvalidArgumentError(absl::StrCat(
        "spec.checkpoint.resumeFrom: step ", restore.step, " is not below training.steps ", steps));
    prepared.reason = "PlanRejected";
  }
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
  LaunchTrainers(*entry, restore);
}

void JobController::LaunchTrainers(Entry& entry, const RestorePoint& restore) {
  JobRun& run = entry.run;
  const JobRecord& record = entry.record;
  run.phase = RunPhase::kBootstrapping;
  run.restore_step = restore.step;
  run.restore_path = restore.path;
  run.progress_ms = parts_.clock->MonotonicMs();
  run.board.Reset(static_cast<int64_t>(run.slots.size()));
  entry.progress.step = std::max<int64_t>(restore.step, 0);
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
    if (job.run.epoch == epoch && job.run.phase == RunPhase::kBootstrapping) {
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
    launches_[command] = {entry.record.uid, entry.run.epoch};
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
  if (run.phase == RunPhase::kPreparing) {
    run.slots.clear();  // nothing was launched
  }
  run.phase = RunPhase::kQuiescing;
  run.quiesce_nudged_ms = parts_.clock->MonotonicMs();
  const std::string reason = entry.record.reason;
  // The watchdogs first: a step thread that is stuck in a collective hears nothing else.
  SendToNodes(entry, {entry.record.uid, run.epoch, -1, PeerLost{reason}});
  for (const std::string& node_id : NodesOf(entry)) {
    SendToNode(node_id,
               StopTrainers{entry.record.uid, run.epoch, reason, membership_.times().detection_ms});
  }
  for (auto save = run.saves.begin(); save != run.saves.end();) {
    save = save->second.committing ? std::next(save) : run.saves.erase(save);
  }
  if (run.committing == 0) {
    FinishOperations(entry.record.uid, INT64_MAX, OperationState::kFailed, reason, -1, "");
  }
}

void JobController::NudgeQuiescing(Entry& entry) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  if (now_ms - entry.run.quiesce_nudged_ms < 3 * membership_.times().detection_ms + kExitMarginMs) {
    return;
  }
  entry.run.quiesce_nudged_ms = now_ms;
  for (const std::string& node_id : NodesOf(entry)) {
    const NodeRecord* node = membership_.Find(node_id);
    log::Warning(absl::StrCat(
        "job ", entry.record.name, ": no exit from ", node_id, "; asking it to register anew"));
    if (node != nullptr && node->stream) {
      parts_.fleet->Close(*node->stream);
    }
  }
}

}  // namespace ravel::coordinator
