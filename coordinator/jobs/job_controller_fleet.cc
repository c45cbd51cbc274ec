// JobController: what daemons say. A Hello is the moment of truth: it says what the node really
// runs, and is compared with what should run there. Trainers of old epochs are stopped, lost
// launches are sent again, and slots that a new incarnation of the daemon cannot have are given up.
// Every later message is accepted only from the rank's present node and epoch (Accept), so stale
// messages change nothing. Arrival times are those of the network thread, not of the strand: a busy
// coordinator does not declare nodes lost.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "common/version.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/store/complaint.h"

namespace ravel::coordinator {
namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

std::string LastLine(const std::string& tail) {
  const size_t end = tail.find_last_not_of(" \r\n");
  if (end == std::string::npos) {
    return "";
  }
  const size_t begin = tail.find_last_of('\n', end);
  return tail.substr(begin == std::string::npos ? 0 : begin + 1,
                     end - (begin == std::string::npos ? 0 : begin + 1) + 1);
}

std::string DescribeExit(const std::string& node_id,
                         const TrainerExited& exited,
                         const std::string& said) {
  std::string text = absl::StrCat("rank ", exited.rank, " on ", node_id, ": ");
  absl::StrAppend(&text,
                  exited.signal != 0 ? absl::StrCat("killed by signal ", exited.signal)
                                     : absl::StrCat("exit code ", exited.exit_code));
  const std::string detail = !said.empty()             ? said
                             : !exited.message.empty() ? exited.message
                                                       : LastLine(exited.tail);
  return detail.empty() ? text : absl::StrCat(text, ": ", detail);
}

}  // namespace

int64_t JobController::Send(StreamId stream, decltype(DownMessage::kind) kind) {
  const int64_t id = ++command_id_;
  parts_.fleet->Send(stream, {term_, id, std::move(kind)});
  return id;
}

int64_t JobController::SendToNode(const std::string& node_id, decltype(DownMessage::kind) kind) {
  const NodeRecord* node = membership_.Find(node_id);
  // Without a stream the message is dropped: the node's next Hello is compared with what should run
  // there.
  return node != nullptr && node->stream ? Send(*node->stream, std::move(kind)) : ++command_id_;
}

void JobController::OnHello(StreamId stream, const HelloMessage& hello, int64_t arrived_ms) {
  const int64_t now_ms = std::min(arrived_ms, parts_.clock->MonotonicMs());
  const NodeRecord* before = membership_.Find(hello.node_id);
  // A node that is only remembered has not been here either.
  const bool first_contact = before == nullptr || before->facts.incarnation.empty();
  const std::optional<HelloOutcome> admitted = AdmitNode(stream, hello, now_ms);
  if (!admitted) {
    return;
  }
  const HelloOutcome& outcome = *admitted;
  if (outcome.replaced) {
    if (outcome.new_incarnation) {
      Send(*outcome.replaced,
           Rejected{absl::StrCat("another daemon has registered as ", hello.node_id)});
    }
    parts_.fleet->Close(*outcome.replaced);
  }
  if (outcome.new_incarnation) {
    if (!first_contact) {  // else what it holds tells what is left: this process may be the new one
      LoseSlots(hello.node_id, "its daemon was started anew", {});
    }
    OnNewIncarnation(hello);
  }
  expected_nodes_.erase(hello.node_id);
  Welcome welcome{cluster_id_,
                  membership_.TimesOf(hello.node_id).beat_ms(),
                  ReconcileHeld(hello.node_id, hello),
                  AgreedProtocol(kFleetProtocols, {hello.oldest_protocol, hello.protocol})};
  Send(stream, std::move(welcome));
  TellHeld(hello);
  for (const HeldTrainer& held : hello.trainers) {
    for (const ckpt::Seal& seal : held.seals) {
      OnFrame(hello.node_id, {held.job_uid, held.epoch, held.attempt, held.rank, seal});
    }
  }
  if (hello.draining) {
    DrainNode(hello.node_id, "its daemon is stopping");
  }
  for (const std::string& uid : scheduler_.JobsOn(hello.node_id)) {
    Reconcile(entries_.at(uid));
  }
  Schedule();
}

void JobController::OnNewIncarnation(const HelloMessage& hello) {
  std::erase_if(launches_,
                [&hello](const auto& sent) { return sent.second.node_id == hello.node_id; });
  for (auto& [uid, entry] : entries_) {
    entry.unfit.erase(hello.node_id);  // its daemon may have other flags now
  }
  SaveRow(hello.node_id, "its registration");
  log::Info(
      absl::StrCat("node ", hello.node_id, " registered with ", hello.devices.size(), " devices"));
}

std::vector<HeldTrainer> JobController::ReconcileHeld(const std::string& node_id,
                                                      const HelloMessage& hello) {
  std::vector<HeldTrainer> stop;
  std::set<TrainerKey> alive;
  stale_.ForgetNode(node_id);
  for (const HeldTrainer& held : hello.trainers) {
    if (held.state == "exited") {
      continue;
    }
    const TrainerKey key{held.job_uid, held.epoch, held.rank};
    alive.insert(key);
    if (held.state == "ended") {
      continue;  // how it ended is told next
    }
    Entry* entry = FindEntry(held.job_uid);
    const bool current = entry != nullptr && !IsTerminal(entry->record.state) &&
                         held.epoch == entry->record.epoch && held.epoch == entry->run.epoch &&
                         held.rank >= 0 &&
                         held.rank < static_cast<int64_t>(entry->run.slots.size()) &&
                         // Given up, though the new epoch still waits for the database.
                         !entry->run.slots[static_cast<size_t>(held.rank)].exited;
    if (entry != nullptr) {
      entry->epoch_floor = std::max(entry->epoch_floor, held.epoch);
    }
    if (current && !zombies_.Has(node_id, key)) {
      NoteHeld(*entry,
               entry->run.slots[static_cast<size_t>(held.rank)],
               held.state,
               held.step,
               held.has);
    } else {
      HeldTrainer order = held;
      order.seals.clear();
      stop.push_back(std::move(order));
      ++stale_refused_;
      if (!zombies_.Has(node_id, key)) {  // of a zombie only its device is out
        stale_.Insert(node_id, key);
      }
    }
  }
  // A launch that was lost with the stream is sent again: nothing is gone.
  for (const std::string& uid : launching_[node_id]) {
    Entry* entry = FindEntry(uid);
    if (entry == nullptr || entry->run.phase != RunPhase::kBootstrapping) {
      continue;  // over meanwhile
    }
    for (size_t rank = 0; rank < entry->run.slots.size(); ++rank) {
      TrainerSlot& slot = entry->run.slots[rank];
      if (slot.place.node_id == node_id && !slot.seen) {
        alive.insert({uid, entry->run.epoch, static_cast<int64_t>(rank)});
        slot.told_ms = INT64_MIN / 2;
      }
    }
  }
  ReleaseZombies(zombies_.Keep(node_id, alive));
  LoseSlots(node_id, "its trainer was gone when the node came back", alive);
  return stop;
}

void JobController::LoseSlots(const std::string& node_id,
                              const std::string& reason,
                              const std::set<TrainerKey>& kept) {
  for (const std::string& uid : scheduler_.JobsOn(node_id)) {
    LoseSlotsOf(entries_.at(uid), node_id, reason, kept);
  }
}

void JobController::LoseSlotsOf(Entry& entry,
                                const std::string& node_id,
                                const std::string& reason,
                                const std::set<TrainerKey>& kept) {
  JobRun& run = entry.run;
  if (run.phase == RunPhase::kPreparing || run.launch_waits) {
    return;  // judged when the launch finds no stream, or by LoseNodeFor
  }
  for (size_t rank = 0; rank < run.slots.size(); ++rank) {
    TrainerSlot& slot = run.slots[rank];
    if (slot.exited || slot.place.node_id != node_id ||
        kept.contains({entry.record.uid, run.epoch, static_cast<int64_t>(rank)})) {
      continue;
    }
    slot.exited = true;
    run.Blame({"NodeLost",
               absl::StrCat("node ", node_id, ": ", reason),
               node_id,
               static_cast<int64_t>(rank),
               entry.progress.step});
  }
  Wake(entry, parts_.clock->MonotonicMs());
}

void JobController::LoseNodeFor(Entry& entry,
                                const std::string& node_id,
                                const std::string& reason) {
  LoseSlotsOf(entry, node_id, reason, {});
  if (entry.run.phase == RunPhase::kPreparing || entry.run.launch_waits) {
    entry.run.Blame({"NodeLost",
                     absl::StrCat("node ", node_id, ": ", reason),
                     node_id,
                     -1,
                     entry.progress.step});
    Wake(entry, parts_.clock->MonotonicMs());
  }
}

void JobController::LoseNode(const LostNode& lost) {
  const std::string& node_id = lost.node_id;
  if (lost.left) {
    log::Info(absl::StrCat("node ", node_id, " has left: ", lost.reason));
  } else {
    log::Warning(absl::StrCat("node ", node_id, " is lost: ", lost.reason));
    ++counts_.nodes_lost;
  }
  stale_.ForgetNode(node_id);
  std::erase_if(launches_, [&node_id](const auto& sent) { return sent.second.node_id == node_id; });
  SaveRow(node_id, "its loss");
  const NodeRecord* node = membership_.Find(node_id);
  if (node != nullptr && node->stream) {
    parts_.fleet->Close(*node->stream);  // a frozen host that thaws introduces itself again
  }
}

void JobController::DrainNode(const std::string& node_id, const std::string& reason) {
  for (const std::string& uid : scheduler_.JobsOn(node_id)) {
    Entry& entry = entries_.at(uid);
    JobRun& run = entry.run;
    if (run.phase == RunPhase::kQuiescing) {
      continue;
    }
    run.draining.insert(node_id);
    FailureCause cause{"NodeDrain",
                       absl::StrCat("node ", node_id, " goes away: ", reason),
                       node_id,
                       -1,
                       entry.progress.step};
    const JobState state = entry.record.state;
    if (run.phase != RunPhase::kTraining) {
      run.Blame(std::move(cause));
    } else if (state == JobState::kRunning) {
      JobEvent event = MakeEvent(JobEventKind::kResizeRequested);
      event.cause = std::move(cause);
      Do(entry, std::move(event));
    }  // else its last save, or one before it stops, is under way
    Reconcile(entry);
  }
}

void JobController::OnStreamClosed(StreamId stream, int64_t arrived_ms) {
  const NodeRecord* const node = membership_.FindByStream(stream);
  NodeLoad load = NodeLoad::kIdle;
  if (node != nullptr) {
    const std::string& node_id = node->facts.node_id;
    for (const std::string& uid : scheduler_.JobsOn(node_id)) {
      load = entries_.at(uid).run.HasTrainersOn(node_id) ? NodeLoad::kHasTrainers : load;
    }
  }
  membership_.OnClosed(stream, std::min(arrived_ms, parts_.clock->MonotonicMs()), load);
}

void JobController::OnUp(StreamId stream, const UpMessage& message, int64_t arrived_ms) {
  const NodeRecord* node = membership_.FindByStream(stream);
  if (node == nullptr) {
    return;  // an older stream of a node that is here on another one
  }
  const std::string node_id = node->facts.node_id;
  const int64_t heard_ms = std::min(arrived_ms, parts_.clock->MonotonicMs());
  if (!membership_.OnHeard(stream, heard_ms, parts_.clock->WallMs())) {
    parts_.fleet->Close(stream);
    return;
  }
  std::visit(Overloaded{[&](const BeatMessage& beat) { OnBeat(stream, node_id, beat); },
                        [&](const TrainerFrame& frame) { OnFrame(node_id, frame); },
                        [&](const TrainerExited& exited) { OnExited(node_id, exited); },
                        [&](const LogBatch& batch) { OnLog(node_id, batch); },
                        [&](const CommandResult& result) { OnCommandResult(node_id, result); },
                        [&](const LookResult& result) {
                          looks_.OnResult(stream, result);
                          SendLooks();
                        },
                        [&](const DrainNotice& notice) {
                          membership_.OnDrain(stream, notice.reason);
                          DrainNode(node_id, notice.reason);
                        }},
             message);
}

void JobController::OnBeat(StreamId stream, const std::string& node_id, const BeatMessage& beat) {
  const int64_t now_ms = parts_.clock->MonotonicMs();
  for (const TrainerBeat& trainer : beat.trainers) {
    Entry* entry = FindEntry(trainer.job_uid);
    const TrainerKey key{trainer.job_uid, trainer.epoch, trainer.rank};
    if (zombies_.Has(node_id, key) || trainer.state == "ended" || trainer.state == "exited") {
      continue;
    }
    // A trainer that was given up with its node and beats again is as stale as any older epoch.
    const bool known = entry != nullptr && trainer.epoch == entry->run.epoch && trainer.rank >= 0 &&
                       trainer.rank < static_cast<int64_t>(entry->run.slots.size()) &&
                       !entry->run.slots[static_cast<size_t>(trainer.rank)].exited;
    if (!known) {
      ++stale_refused_;
      if (stale_.Insert(node_id, key)) {
        Send(stream,
             StopTrainers{
                 trainer.job_uid, trainer.epoch, "StaleEpoch", membership_.times().detection_ms});
      }
      continue;
    }
    TrainerSlot& slot = entry->run.slots[static_cast<size_t>(trainer.rank)];
    if (trainer.step > slot.step || trainer.phase != slot.phase ||
        trainer.moved_bytes > slot.moved_bytes) {
      entry->run.progress_ms = now_ms;
    }
    slot.moved_bytes = trainer.moved_bytes;
    slot.step = trainer.step;
    slot.phase = trainer.phase;
    slot.phase_age_ms = trainer.phase_age_ms;
    NoteHeld(*entry, slot, trainer.state, trainer.step, trainer.has);
    Tell(*entry, slot, trainer.rank, false);
    entry->run.collectives.OnBeat(trainer.rank, {trainer.step, trainer.phase, trainer.collectives});
  }
  NoteUnnamed(node_id, beat);
  RepeatLaunch(node_id);
  const bool takes_work = membership_.OnBeat(stream, beat, now_ms);
  Send(stream, BeatAck{beat.seq, beat.padding});
  if (takes_work) {
    Schedule();
  }
}

void JobController::OnExited(const std::string& node_id, const TrainerExited& exited) {
  stale_.Erase(node_id, {exited.job_uid, exited.epoch, exited.rank});
  ReleaseZombies(zombies_.Remove(node_id, {exited.job_uid, exited.epoch, exited.rank}));
  Entry* entry = FindEntry(exited.job_uid);
  if (entry == nullptr || exited.epoch != entry->run.epoch || exited.rank < 0 ||
      exited.rank >= static_cast<int64_t>(entry->run.slots.size())) {
    Schedule();
    return;
  }
  TrainerSlot& slot = entry->run.slots[static_cast<size_t>(exited.rank)];
  if (slot.exited || slot.place.node_id != node_id) {
    return;
  }
  slot.exited = true;
  slot.stopped = exited.exit_code == 10 && exited.signal == 0;
  const bool quiescing = entry->run.phase == RunPhase::kQuiescing;
  const bool finished = exited.exit_code == 0 && exited.signal == 0 && slot.done;
  const bool told = (slot.stopped || exited.reason == "Stopped") &&
                    (quiescing || entry->record.state == JobState::kResizing);
  if (!finished && !told) {
    std::string reason = !slot.failed_reason.empty() ? slot.failed_reason : exited.reason;
    if (reason.empty()) {
      reason = ExitReason(exited.exit_code, exited.signal);
    }
    if (reason == "Stopped" || reason == "Done") {
      // It ended unasked and before it was done.
      reason = entry->run.draining.contains(node_id) ? "NodeDrain" : "ProcessCrash";
    }
    const std::string late = entry->run.collectives.LastWord(exited.rank);
    FailureCause cause{
        reason,
        absl::StrCat(
            DescribeExit(node_id, exited, slot.failed_message), late.empty() ? "" : "; ", late),
        node_id,
        exited.rank,
        entry->progress.step};
    if (reason == "CheckpointCorrupt") {
      OnCorruptCheckpoint(*entry, cause);
    }
    entry->run.Blame(std::move(cause));
  }
  Reconcile(*entry);
  Schedule();
}

void JobController::OnCommandResult(const std::string& node_id, const CommandResult& result) {
  const auto launch = launches_.find(result.command_id);
  if (launch == launches_.end() || launch->second.node_id != node_id) {
    if (!result.ok) {
      log::Warning(absl::StrCat(
          "node ", node_id, " refused command ", result.command_id, ": ", result.message));
    }
    return;
  }
  const std::string uid = launch->second.job_uid;
  const int64_t epoch = launch->second.epoch;
  launches_.erase(launch);
  Entry* entry = FindEntry(uid);
  if (result.ok || entry == nullptr || entry->run.epoch != epoch) {
    return;
  }
  const std::string reason = ReasonOfRefusal(*entry, node_id, result.reason);
  for (size_t rank = 0; rank < entry->run.slots.size(); ++rank) {
    TrainerSlot& slot = entry->run.slots[rank];
    if (slot.place.node_id == node_id && !slot.exited) {
      slot.exited = true;
      entry->run.Blame({reason,
                        absl::StrCat("node ", node_id, " could not launch: ", result.message),
                        node_id,
                        static_cast<int64_t>(rank),
                        entry->progress.step});
    }
  }
  Reconcile(*entry);
}

void JobController::OnLog(const std::string& node_id, const LogBatch& batch) {
  if (FindEntry(batch.job_uid) == nullptr) {
    return;
  }
  std::vector<LogLine> lines;
  for (size_t i = 0; i < batch.lines.size(); ++i) {
    lines.push_back({batch.first_seq + static_cast<int64_t>(i),
                     batch.time_ms,
                     batch.attempt,
                     batch.rank,
                     node_id,
                     batch.lines[i]});
  }
  const bool taken = WriteFiles(
      [logs = parts_.logs, growth = parts_.growth, uid = batch.job_uid, lines = std::move(lines)] {
        const absl::StatusOr<std::vector<LogLine>> stored = logs->Append(uid, lines);
        if (!stored.ok()) {
          static ComplainNowAndThen lost;
          lost.Say(absl::StrCat("log lines are lost: ", std::string(stored.status().message())));
        } else if (growth != nullptr) {
          growth->Ring(uid);
        }
      });
  if (!taken) {
    static ComplainNowAndThen full;
    full.Say("log lines are lost: the state directory's disk does not keep up");
  }
}

std::pair<JobController::Entry*, TrainerSlot*> JobController::Accept(const std::string& node_id,
                                                                     const TrainerFrame& frame) {
  Entry* entry = FindEntry(frame.job_uid);
  const bool current = entry != nullptr && !IsTerminal(entry->record.state) &&
                       frame.epoch == entry->record.epoch && frame.epoch == entry->run.epoch &&
                       frame.rank >= 0 &&
                       frame.rank < static_cast<int64_t>(entry->run.slots.size()) &&
                       entry->run.slots[static_cast<size_t>(frame.rank)].place.node_id == node_id;
  if (!current) {
    ++stale_refused_;
    return {nullptr, nullptr};
  }
  return {entry, &entry->run.slots[static_cast<size_t>(frame.rank)]};
}

void JobController::OnFrame(const std::string& node_id, const TrainerFrame& frame) {
  const auto [entry, slot] = Accept(node_id, frame);
  if (entry == nullptr) {
    return;
  }
  Entry& job = *entry;
  TrainerSlot& rank = *slot;
  std::visit(
      Overloaded{
          [&](const TrainerProgress& progress) { rank.step = progress.step; },
          [&](const CommRecord& record) { OnCommRecord(job, record); },
          [&](const TrainerReady& ready) { OnReady(job, rank, frame.rank, ready); },
          [&](const StepReport& report) { OnStepReport(job, frame, report); },
          [&](const ckpt::Seal& seal) { OnSeal(job, frame.rank, seal); },
          [&](const SaveStarted& started) { OnSaveStarted(job, started); },
          [&](const SaveFailed& failed) { OnSaveFailed(job, frame.rank, failed); },
          [&](const TrainerFailed& failed) { OnTrainerFailed(job, rank, frame.rank, failed); },
          [&](const LedgerReport& ledger) { job.run.collectives.OnLedger(frame.rank, ledger); },
          [&](const TrainerDone&) {
            rank.done = true;
            job.run.last_step_done = true;
          }},
      frame.frame);
  Reconcile(job);
}

void JobController::OnCommRecord(Entry& entry, const CommRecord& record) {
  absl::StatusOr<std::optional<CommRecordSet>> set = entry.run.board.Add(record);
  if (!set.ok()) {
    log::Warning(
        absl::StrCat("job ", entry.record.name, ": ", std::string(set.status().message())));
  } else if (set->has_value()) {
    entry.run.progress_ms = parts_.clock->MonotonicMs();
    SendToNodes(entry, {entry.record.uid, entry.run.epoch, -1, std::move(**set)});
  }
}

void JobController::OnReady(Entry& entry,
                            TrainerSlot& slot,
                            int64_t rank,
                            const TrainerReady& ready) {
  slot.seen = true;
  if (std::exchange(slot.remarked, true)) {
    return;  // told again after a broken stream
  }
  for (const StartRemark& remark : ready.remarks) {
    JobEventRecord event;
    event.time_ms = parts_.clock->WallMs();
    event.job_uid = entry.record.uid;
    event.epoch = entry.record.epoch;
    event.attempt = entry.record.attempt;
    event.step = ready.step;
    event.type = "Warning";
    event.reason = remark.reason;
    event.node = slot.place.node_id;
    event.rank = rank;
    event.message = remark.message;
    entry.run.remarks.push_back(std::move(event));
  }
  slot.ready = true;
  slot.step = ready.step;
  entry.run.restore_seconds = std::max(entry.run.restore_seconds, ready.restore_seconds);
  entry.run.progress_ms = parts_.clock->MonotonicMs();
}

void JobController::OnTrainerFailed(Entry& entry,
                                    TrainerSlot& slot,
                                    int64_t rank,
                                    const TrainerFailed& failed) {
  slot.failed_reason = failed.reason.empty() ? ExitReason(failed.code, 0) : failed.reason;
  slot.failed_message = failed.message;
  // Its exit follows within moments, but the others should not wait for it.
  FailureCause cause{slot.failed_reason,
                     absl::StrCat("rank ", rank, " on ", slot.place.node_id, ": ", failed.message),
                     slot.place.node_id,
                     rank,
                     entry.progress.step};
  if (cause.reason != "CheckpointCorrupt") {  // that one is handled when the trainer is gone
    entry.run.Blame(std::move(cause));
  }
}

}  // namespace ravel::coordinator
