// JobController: trainers that outlived a coordinator, and what ranks should have been told. After
// a restart the last launch of each job is read from the database. If this build plans the job to
// the same digest, its trainers are adopted as their nodes return, and no step is lost; otherwise
// the epoch is ended. Messages to daemons may be lost with a stream, so nothing is tracked per
// message: each beat says what a trainer has been told, and Tell sends the difference to what it
// should have been told.

#include <algorithm>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "common/ckpt/step_layout.h"
#include "common/crypto.h"
#include "common/logging.h"
#include "coordinator/jobs/job_controller.h"

namespace ravel::coordinator {
namespace {

// "node-a:0 node-b:0", in rank order; empty when it is not that.
std::vector<RankPlace> ParseMembers(const std::string& members) {
  std::vector<RankPlace> places;
  for (const absl::string_view member : absl::StrSplit(members, ' ', absl::SkipEmpty())) {
    const size_t colon = member.rfind(':');
    RankPlace place;
    if (colon == absl::string_view::npos ||
        !absl::SimpleAtoi(member.substr(colon + 1), &place.device)) {
      return {};
    }
    place.node_id = std::string(member.substr(0, colon));
    places.push_back(std::move(place));
  }
  return places;
}

// The save attempt of an epoch's saves, from 1 to below ckpt::kRemovedAttempt. A node is in one
// cluster at a time: two coordinators on copies of one state, which begin the same epoch, have
// other nodes, and so other names for what their trainers write.
int64_t SaveAttemptOf(const JobRecord& record, const JobRun& run) {
  std::string text = absl::StrCat(record.uid, " ", run.epoch);
  for (const TrainerSlot& slot : run.slots) {
    absl::StrAppend(&text, " ", slot.place.node_id);
  }
  const Sha256Digest digest = Sha256(text);
  int64_t number = 0;
  for (size_t byte = 0; byte < 4; ++byte) {
    number = number * 256 + static_cast<uint8_t>(digest.at(byte));
  }
  return 1 + number % (ckpt::kRemovedAttempt - 1);
}

}  // namespace

bool JobController::BeginAdoption(Entry& entry) {
  const JobRecord& record = entry.record;
  const bool launched = HoldsDevices(record.state) && record.state != JobState::kStopping &&
                        record.launched_epoch == record.epoch && entry.launched &&
                        entry.launched->epoch == record.epoch;
  if (!launched) {
    return false;
  }
  const std::vector<RankPlace> places = ParseMembers(entry.launched->members);
  if (places.empty() || static_cast<int64_t>(places.size()) != entry.launched->world_size) {
    return false;
  }
  JobRun& run = entry.run;
  run.phase = RunPhase::kAdopting;
  run.epoch = record.epoch;
  run.transport = entry.launched->transport;
  run.restore_step = entry.launched->restore_path.empty() ? -1 : entry.launched->first_step;
  run.restore_path = entry.launched->restore_path;
  run.phase_since_ms = run.progress_ms = run.save_ms = parts_.clock->MonotonicMs();
  run.board.Reset(static_cast<int64_t>(places.size()));
  for (const RankPlace& place : places) {
    TrainerSlot slot;
    slot.place = place;
    run.slots.push_back(std::move(slot));
    expected_nodes_.insert(place.node_id);
  }
  const std::string uid = record.uid;
  StorePool(record.spec, StoreWork::kRestore)
      ->Post([this,
              uid,
              epoch = record.epoch,
              spec = record.spec,
              ranks = record.world_size,
              shared_memory = SharesMemory(run.transport)] {
        auto world = parts_.planner->Plan(spec, ranks, shared_memory);
        parts_.strand->Post([this, uid, epoch, world] { OnAdoptionPlanned(uid, epoch, world); });
      });
  return true;
}

void JobController::OnAdoptionPlanned(const std::string& uid,
                                      int64_t epoch,
                                      absl::StatusOr<std::shared_ptr<const PlannedWorld>> world) {
  Entry* entry = FindEntry(uid);
  if (entry == nullptr || entry->run.epoch != epoch || entry->run.phase != RunPhase::kAdopting) {
    return;  // the epoch was given up in the meantime
  }
  // Seals of a plan that this build does not make cannot be held against it.
  std::string obstacle;
  if (!world.ok()) {
    obstacle = std::string(world.status().message());
  } else if (Hex((*world)->digest) != entry->launched->plan_digest) {
    obstacle = "this build plans the job differently than the one that launched it";
  }
  if (!obstacle.empty()) {
    entry->run.Blame({"CoordinatorRestart", obstacle, "", -1, entry->progress.step});
    Reconcile(*entry);
    return;
  }
  entry->run.world = *std::move(world);
  Reconcile(*entry);
}

void JobController::CheckAdoption(Entry& entry) {
  const JobRun& run = entry.run;
  const bool all_known =
      std::all_of(run.slots.begin(), run.slots.end(), [](const TrainerSlot& slot) {
        return slot.seen || slot.exited;
      });
  if (all_known && run.world != nullptr) {
    FinishAdoption(entry);
    Reconcile(entry);
  }
}

void JobController::FinishAdoption(Entry& entry) {
  JobRun& run = entry.run;
  bool trains =
      entry.record.state == JobState::kRunning || entry.record.state == JobState::kFinishing;
  int64_t step = 0;
  for (const TrainerSlot& slot : run.slots) {
    trains = trains || slot.has.until_step >= 0;
    run.sequence = std::max(run.sequence, slot.has.save_sequence);
    run.then_stop = run.then_stop || slot.has.then_stop;
    step = std::max(step, slot.step);
  }
  for (const std::string& id : open_operations_) {
    const OperationRecord& operation = operations_.at(id);
    if (operation.job_uid == entry.record.uid) {
      run.sequence = std::max(run.sequence, operation.sequence);
    }
  }
  run.phase = trains ? RunPhase::kTraining : RunPhase::kBootstrapping;
  run.last_step_done = run.last_step_done || entry.record.state == JobState::kFinishing;
  run.phase_since_ms = run.progress_ms = run.save_ms = parts_.clock->MonotonicMs();
  run.trained_since_ms = parts_.clock->WallMs();
  if (trains && entry.record.state == JobState::kResizing && !run.then_stop) {
    run.sequence += 1;  // the order to save and stop was lost with the coordinator that gave it
    run.then_stop = true;
  }
  if (trains) {
    GrantHorizon(entry);  // sent below, with what else is missing
  }
  JobEvent event = MakeEvent(JobEventKind::kAdopted);
  event.step = step;
  event.cause.message = absl::StrCat(
      run.slots.size(), " ranks went on without a coordinator; term ", term_, " has taken over");
  Do(entry, std::move(event));
  CommitNext(entry);
  for (size_t rank = 0; rank < run.slots.size(); ++rank) {
    Tell(entry, run.slots[rank], static_cast<int64_t>(rank), true);
  }
}

void JobController::LoseAbsentNodes() {
  for (const std::string& node_id : std::exchange(expected_nodes_, {})) {
    LoseSlots(node_id, "it did not return after the coordinator's restart", {});
  }
  if (parts_.clock->MonotonicMs() < return_until_ms_) {
    return;
  }
  for (const auto& [node_id, row] : std::exchange(known_nodes_, {})) {
    if (membership_.Find(node_id) == nullptr) {
      membership_.Remember(node_id,
                           {.message = "it did not return after the coordinator's restart",
                            .wall_ms = parts_.clock->WallMs()});
    }
    SaveRow(node_id, "its absence");
  }
}

void JobController::NoteHeld(Entry& entry,
                             TrainerSlot& slot,
                             const std::string& state,
                             int64_t step,
                             const TrainerHas& has) {
  if (!slot.seen) {
    slot.seen = true;
    entry.run.progress_ms = parts_.clock->MonotonicMs();
  }
  slot.state = state;
  slot.has = has;
  slot.step = std::max(slot.step, step);
  // Asked for by its daemon while there was no coordinator.
  entry.run.sequence = std::max(entry.run.sequence, has.save_sequence);
  if (state == "ready" || state == "running" || state == "done") {
    slot.ready = true;
  }
}

Wanted JobController::WantedOf(const Entry& entry) const {
  const JobRun& run = entry.run;
  Wanted wanted;
  wanted.until_step = run.until_step;
  wanted.save_every_ms = entry.record.spec.checkpoint.every_ms;
  wanted.save_sequence = run.sequence;
  wanted.then_stop = run.then_stop;
  return wanted;
}

void JobController::Tell(Entry& entry, TrainerSlot& slot, int64_t rank, bool returned) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  const JobRun& run = entry.run;
  // A command that was sent a moment ago may be on its way.
  const bool waits = !returned && now_ms - slot.told_ms < 2 * membership_.times().beat_ms();
  if (slot.exited || waits || slot.state == "launching") {
    return;
  }
  if (run.phase == RunPhase::kQuiescing) {
    if (slot.state != "stopping") {
      slot.told_ms = now_ms;
      SendToNode(slot.place.node_id,
                 TrainerCommand{entry.record.uid, run.epoch, rank, PeerLost{entry.record.reason}});
      slot.ordered = SendToNode(
          slot.place.node_id,
          StopTrainers{entry.record.uid, run.epoch, entry.record.reason, DetectionOf(entry)});
    }
    return;
  }
  if (run.phase != RunPhase::kBootstrapping && run.phase != RunPhase::kTraining) {
    return;
  }
  for (auto& frame : Missing(WantedOf(entry), run.board.complete(), slot.has)) {
    slot.told_ms = now_ms;
    SendToNode(slot.place.node_id,
               TrainerCommand{entry.record.uid, run.epoch, rank, std::move(frame)});
  }
}

// After Welcome: what these trainers were told while the stream was broken never reached them.
void JobController::TellHeld(const HelloMessage& hello) {
  for (const HeldTrainer& held : hello.trainers) {
    Entry* entry = FindEntry(held.job_uid);
    if (entry != nullptr && held.epoch == entry->run.epoch && held.rank >= 0 &&
        held.rank < static_cast<int64_t>(entry->run.slots.size())) {
      Tell(*entry, entry->run.slots[static_cast<size_t>(held.rank)], held.rank, true);
    }
  }
  RepeatLaunch(hello.node_id);
}

void JobController::RepeatLaunch(const std::string& node_id) {
  const auto found = launching_.find(node_id);
  if (found == launching_.end()) {
    return;
  }
  const int64_t now_ms = parts_.clock->MonotonicMs();
  std::erase_if(found->second, [&](const std::string& uid) {
    Entry* entry = FindEntry(uid);
    if (entry == nullptr || entry->run.phase != RunPhase::kBootstrapping) {
      return true;
    }
    if (!IsIdle(*entry)) {
      return false;  // what is under way may end the epoch: on disk it may be over already
    }
    bool missing = false;
    bool due = true;
    for (const TrainerSlot& slot : entry->run.slots) {
      if (slot.place.node_id == node_id && !slot.seen && !slot.exited) {
        missing = true;
        due = due && now_ms - slot.told_ms >= 2 * membership_.times().beat_ms();
      }
    }
    if (missing && due) {
      log::Warning(absl::StrCat(
          "job ", entry->record.name, ": node ", node_id, " holds no launch; sending it again"));
      for (TrainerSlot& slot : entry->run.slots) {
        slot.told_ms = slot.place.node_id == node_id ? now_ms : slot.told_ms;
      }
      std::map<std::string, Launch> launches = MakeLaunches(*entry);
      const int64_t command = SendToNode(node_id, std::move(launches[node_id]));
      NoteOrdered(*entry, node_id, command);
      launches_[command] = {uid, entry->run.epoch, node_id};
    }
    return !missing;
  });
  if (found->second.empty()) {
    launching_.erase(found);
  }
}

void JobController::NoteOrdered(Entry& entry, const std::string& node_id, int64_t command) {
  for (TrainerSlot& slot : entry.run.slots) {
    slot.ordered = slot.place.node_id == node_id ? command : slot.ordered;
  }
}

// A launch that was given up before its trainer existed ends without an exit.
void JobController::NoteUnnamed(const std::string& node_id, const BeatMessage& beat) {
  std::set<TrainerKey> named;
  for (const TrainerBeat& trainer : beat.trainers) {
    named.insert({trainer.job_uid, trainer.epoch, trainer.rank});
  }
  stale_.Keep(node_id, named);
  ReleaseZombies(zombies_.KeepHeard(node_id, named, beat.heard_command));
  for (const std::string& uid : scheduler_.JobsOn(node_id)) {
    Entry& entry = entries_.at(uid);
    JobRun& run = entry.run;
    bool gone = false;
    for (size_t rank = 0; rank < run.slots.size(); ++rank) {
      TrainerSlot& slot = run.slots[rank];
      const bool heard = slot.ordered > 0 && slot.ordered <= beat.heard_command;
      if (slot.exited || slot.place.node_id != node_id || !heard ||
          named.contains({uid, run.epoch, static_cast<int64_t>(rank)})) {
        continue;
      }
      if (run.phase == RunPhase::kQuiescing) {
        slot.exited = gone = true;
      } else if (run.phase == RunPhase::kBootstrapping && slot.seen) {
        slot.seen = false;  // its node could not fetch the plan: launched again
        launching_[node_id].insert(uid);
      }
    }
    if (gone) {
      Reconcile(entry);
    }
  }
}

std::map<std::string, Launch> JobController::MakeLaunches(const Entry& entry) const {
  const JobRun& run = entry.run;
  const JobRecord& record = entry.record;
  const int64_t save_attempt = SaveAttemptOf(record, run);
  std::map<std::string, Launch> launches;
  for (size_t rank = 0; rank < run.slots.size(); ++rank) {
    const RankPlace& place = run.slots[rank].place;
    Launch& launch = launches[place.node_id];
    launch.job_uid = record.uid;
    launch.epoch = run.epoch;
    launch.attempt = record.attempt;
    launch.plan_digest = run.world->digest;
    StartTrainer start;
    start.job_name = record.name;
    start.rank = static_cast<int64_t>(rank);
    start.world_size = static_cast<int64_t>(run.slots.size());
    start.job = record.planned;
    start.device = place.device;
    start.transport = run.transport;
    start.restore_path = run.restore_path;
    start.checkpoint_root = parts_.keeper->Root(record.spec);
    start.first_step = std::max<int64_t>(run.restore_step, 0);
    start.host_address = place.address;
    start.save_at_start = record.spec.checkpoint.at_start && run.restore_step < 0;
    start.save_at_end = true;
    start.save_plan_hash = run.world->save_plan_hash;
    start.save_attempt = save_attempt;
    launch.trainers.push_back(std::move(start));
  }
  return launches;
}

bool JobController::GrantHorizon(Entry& entry) {
  JobRun& run = entry.run;
  const plan::JobSpec& spec = entry.record.spec;
  const int64_t step = std::max<int64_t>({0, entry.progress.step, run.restore_step});
  if (run.until_step >= 0 &&
      !HorizonNeedsRenewal(step, run.until_granted_at, run.until_step, spec.steps)) {
    return false;
  }
  const int64_t until = HorizonStep(step, entry.progress.step_seconds, spec.horizon_ms, spec.steps);
  run.until_granted_at = step;
  run.until_step = std::max(run.until_step, until);
  return true;
}

void JobController::RenewHorizon(Entry& entry) {
  if (GrantHorizon(entry)) {
    SendToNodes(entry,
                {entry.record.uid,
                 entry.run.epoch,
                 -1,
                 RunTrainer{entry.run.until_step, entry.record.spec.checkpoint.every_ms}});
  }
}

}  // namespace ravel::coordinator
