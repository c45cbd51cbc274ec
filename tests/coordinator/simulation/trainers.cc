// The trainers of a node: start, restore, steps in lock step, saves, ends.

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "tests/coordinator/simulation/daemon.h"
#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {

void Daemon::StartOne(const Launch& launch, const StartTrainer& start) {
  Trainer& trainer = trainers_[{launch.job_uid, launch.epoch, start.rank}];
  trainer = Trainer();
  trainer.job_uid = launch.job_uid;
  trainer.epoch = launch.epoch;
  trainer.attempt = launch.attempt;
  trainer.rank = start.rank;
  trainer.serial = ++last_serial_;
  trainer.start = start;
  trainer.spec = world_.SpecOf(start.job);
  trainer.step = start.first_step;
  world_.OnTrainerStarted(*this, trainer);
  LaterFor(trainer, world_.random().Between(20'000, 400'000), [this](Trainer& started) {
    Bootstrap(started);
  });
}

void Daemon::Bootstrap(Trainer& trainer) {
  if (trainer.start.world_size == 1) {
    Restore(trainer);
    return;
  }
  trainer.sent_record = true;
  const CommRecord record{
      "world", trainer.rank, absl::StrCat(trainer.job_uid, "/", trainer.epoch, "/", trainer.rank)};
  trainer.records.push_back(
      TrainerFrame{trainer.job_uid, trainer.epoch, trainer.attempt, trainer.rank, record});
  SendFrame(trainer, record);
}

void Daemon::Restore(Trainer& trainer) {
  const int64_t takes_us = world_.random().Between(10'000, 300'000);
  LaterFor(trainer, takes_us, [this](Trainer& restored) {
    const absl::StatusOr<uint64_t> weights =
        world_.checkpoints().Read(restored.start.restore_path, restored.start.first_step);
    if (!weights.ok()) {
      const bool corrupt = absl::IsDataLoss(weights.status());
      const std::string reason = corrupt ? "CheckpointCorrupt" : "StoreUnavailable";
      SendFrame(restored, TrainerFailed{17, reason, std::string(weights.status().message())});
      Exit({restored.job_uid, restored.epoch, restored.rank}, 17, 0, reason);
      return;
    }
    restored.weights = *weights;
    restored.ready = true;
    restored.state = restored.state == "starting" ? "ready" : restored.state;
    SendFrame(restored, TrainerReady{.step = restored.step});
    EnterStep(restored);
  });
}

void Daemon::HandleFrame(Trainer& trainer, const TrainerCommand& command) {
  if (const auto* set = std::get_if<CommRecordSet>(&command.frame)) {
    world_.checks().OnRecords(trainer, *set);
    if (trainer.sent_record) {  // single use
      trainer.sent_record = false;
      Restore(trainer);
    }
  } else if (const auto* run = std::get_if<RunTrainer>(&command.frame)) {
    const bool first = trainer.until_step < 0;
    trainer.until_step = std::max(trainer.until_step, run->until_step);
    if (first && trainer.ready && trainer.start.save_at_start && trainer.step == 0) {
      Save(trainer);
    }
    EnterStep(trainer);
  } else if (const auto* save = std::get_if<SaveTrainer>(&command.frame)) {
    trainer.save_sequence = std::max(trainer.save_sequence, save->sequence);
    trainer.stop_after_save = trainer.stop_after_save || save->then_stop;
  } else if (std::holds_alternative<PeerLost>(command.frame)) {
    const Key key{trainer.job_uid, trainer.epoch, trainer.rank};
    LaterFor(trainer, world_.random().Between(1000, 100'000), [this, key](Trainer& /*gone*/) {
      Exit(key, 11, 0, "CommError");
    });
  }
}

void Daemon::EnterStep(Trainer& trainer) {
  Gang& gang = world_.GangOf(trainer);
  const int64_t next = trainer.step + 1;
  // A longer horizon that arrives in the middle of a step begins nothing.
  if (!trainer.ready || trainer.leaving || trainer.dying || trainer.stepping ||
      gang.Waits(trainer.rank) || next > trainer.until_step || next > trainer.spec.steps) {
    return;
  }
  const Agreed brings{trainer.save_sequence, trainer.stop_after_save};
  const Key key{trainer.job_uid, trainer.epoch, trainer.rank};
  const uint64_t serial = trainer.serial;
  const int64_t step_us = world_.StepUs(trainer);
  const bool entered = gang.Enter(
      trainer.rank,
      next,
      trainer.start.world_size,
      brings,
      [this, key, serial, process = process_, step_us](const Agreed& agreed) {
        const auto found = trainers_.find(key);
        if (process == process_ && found != trainers_.end() && found->second.serial == serial) {
          found->second.stepping = true;
          LaterFor(
              found->second, step_us, [this, agreed](Trainer& done) { FinishStep(done, agreed); });
        }
      });
  if (!entered) {
    world_.checks().Fail(absl::StrCat("job ",
                                      trainer.start.job_name,
                                      " epoch ",
                                      trainer.epoch,
                                      ": rank ",
                                      trainer.rank,
                                      " enters step ",
                                      next,
                                      " while others are elsewhere"));
  }
}

void Daemon::FinishStep(Trainer& trainer, const Agreed& agreed) {
  trainer.stepping = false;
  trainer.step += 1;
  trainer.weights = AfterStep(trainer.weights, trainer.step);
  const plan::JobSpec& spec = trainer.spec;
  const bool last = trainer.step == spec.steps;
  if (trainer.rank == 0) {
    world_.OnStepDone(trainer);
    StepReport report;
    report.step = trainer.step;
    report.loss = 1.0F / static_cast<float>(trainer.step);
    report.tokens = 100;
    report.step_seconds = 0.1;
    report.time_ms = world_.events().WallMs();
    SendFrame(trainer, report);
  }
  const int64_t every = spec.checkpoint.every_steps;
  const bool asked = agreed.save_sequence > trainer.served_sequence;
  trainer.served_sequence = std::max(trainer.served_sequence, agreed.save_sequence);
  if (last || asked || (every > 0 && trainer.step % every == 0)) {
    Save(trainer);
  }
  if (last || agreed.stop) {
    trainer.leaving = true;
    trainer.done = last;
    LeaveIfSaved(trainer);
    return;
  }
  EnterStep(trainer);
}

void Daemon::Save(Trainer& trainer) {
  ckpt::Seal seal;
  seal.step = trainer.step;
  seal.epoch = trainer.epoch;
  seal.attempt = 1;
  seal.writer = trainer.rank;
  seal.sequence = trainer.served_sequence;
  trainer.saves_under_way += 1;
  trainer.saved_us = world_.events().now_us();
  trainer.last_saved_step = trainer.step;
  SendFrame(trainer, SaveStarted{seal.step, seal.sequence});
  const uint64_t weights = trainer.weights;
  LaterFor(trainer, world_.checkpoints().WriteUs(), [this, seal, weights](Trainer& saved) {
    saved.saves_under_way -= 1;
    const absl::Status written = world_.checkpoints().WriteShard(saved.start.checkpoint_root,
                                                                 seal.step,
                                                                 seal.epoch,
                                                                 seal.attempt,
                                                                 saved.rank,
                                                                 saved.start.world_size,
                                                                 weights);
    OnShardWritten(saved, seal, written.ok());
  });
}

void Daemon::OnShardWritten(Trainer& trainer, const ckpt::Seal& seal, bool written) {
  if (written) {
    seals_.push_back({{trainer.job_uid, trainer.epoch, trainer.rank}, trainer.attempt, seal});
    SendFrame(trainer, seal);
  } else {
    trainer.save_failed = seal.step == trainer.last_saved_step;
    SendFrame(trainer,
              SaveFailed{seal.step,
                         seal.sequence,
                         seal.attempt,
                         "StoreUnavailable",
                         "the store does not answer",
                         false});
  }
  LeaveIfSaved(trainer);
}

void Daemon::LeaveIfSaved(Trainer& trainer) {
  if (!trainer.leaving || trainer.saves_under_way > 0) {
    return;
  }
  const Key key{trainer.job_uid, trainer.epoch, trainer.rank};
  if (trainer.save_failed) {
    SendFrame(trainer, TrainerFailed{17, "StoreUnavailable", "the last save could not be written"});
    Exit(key, 17, 0, "StoreUnavailable");
  } else if (trainer.done) {
    trainer.state = "done";
    SendFrame(trainer, TrainerDone{trainer.step});
    Exit(key, 0, 0, "Done");
  } else {
    Exit(key, 10, 0, "Stopped");
  }
}

void Daemon::SendFrame(const Trainer& trainer, decltype(TrainerFrame::frame) frame) {
  SendControl(TrainerFrame{
      trainer.job_uid, trainer.epoch, trainer.attempt, trainer.rank, std::move(frame)});
}

void Daemon::StopTrainer(Trainer& trainer, int64_t grace_us) {
  trainer.state = "stopping";
  const Key key{trainer.job_uid, trainer.epoch, trainer.rank};
  if (!trainer.hung && world_.random().Chance(0.9)) {
    LaterFor(trainer, world_.random().Between(1000, 50'000), [this, key](Trainer& /*gone*/) {
      Exit(key, 10, 0, "Stopped");
    });
  }
  Later(grace_us + 1000, [this, key, serial = trainer.serial] {
    const auto found = trainers_.find(key);
    if (found != trainers_.end() && found->second.serial == serial) {
      KillTrainer(key, 0, 9, "Stopped");
    }
  });
}

void Daemon::KillTrainer(const Key& key, int32_t code, int32_t signal, const std::string& reason) {
  const auto found = trainers_.find(key);
  if (found == trainers_.end() || found->second.dying) {
    return;
  }
  found->second.dying = true;
  found->second.hung = true;  // says nothing more
  const int64_t takes_us = found->second.unkillable ? world_.random().Between(5'000'000, 20'000'000)
                                                    : world_.random().Between(500, 30'000);
  Later(takes_us, [this, key, serial = found->second.serial, code, signal, reason] {
    const auto dying = trainers_.find(key);
    if (dying != trainers_.end() && dying->second.serial == serial) {
      Exit(key, code, signal, reason);
    }
  });
}

void Daemon::HangTrainer(const Key& key) {
  const auto found = trainers_.find(key);
  if (found == trainers_.end()) {
    return;
  }
  found->second.hung = true;
  found->second.unkillable = world_.random().Chance(0.1);
  Later(std::max<int64_t>(5 * beat_us_, 2'000'000) + 100'000,
        [this, key, serial = found->second.serial] {
          const auto silent = trainers_.find(key);
          if (silent != trainers_.end() && silent->second.serial == serial) {
            KillTrainer(key, 0, 9, "Stall");
          }
        });
}

void Daemon::Exit(const Key& key, int32_t code, int32_t signal, const std::string& reason) {
  const auto found = trainers_.find(key);
  if (found == trainers_.end()) {
    return;
  }
  if (world_.bug() == Bug::kGhostTrainer && world_.random().Chance(0.3)) {
    found->second.hung = found->second.dying = true;
    return;
  }
  const Trainer gone = std::move(found->second);
  trainers_.erase(found);
  world_.Trace(id_,
               "trainer of ",
               gone.start.job_name,
               " epoch ",
               gone.epoch,
               " rank ",
               gone.rank,
               " ends at step ",
               gone.step,
               ": ",
               reason);
  SendControl(TrainerExited{
      gone.job_uid, gone.epoch, gone.attempt, gone.rank, code, signal, reason, "", ""});
  world_.OnTrainerGone(gone, !gone.done && code != 10);
  EndWhenEmpty();
}

}  // namespace ravel::coordinator::simulation
