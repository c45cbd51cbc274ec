// The daemon's process: fleet_client and supervisor of worker/daemon, message by message.

#include "tests/coordinator/simulation/daemon.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {
namespace {

constexpr int64_t kFirstBackoffUs = 200'000;
constexpr int64_t kLastBackoffUs = 5'000'000;
constexpr int64_t kLeastPatienceUs = 5'000'000;
constexpr int64_t kWelcomeDeadlineUs = 10'000'000;
constexpr int64_t kDrainLimitUs = 10'000'000;
constexpr int64_t kStopGraceUs = 2'000'000;

}  // namespace

Daemon::Daemon(World& world, std::string id, int64_t devices)
    : world_(world), id_(std::move(id)), devices_(devices) {}

void Daemon::Later(int64_t delay_us, std::function<void()> work) {
  world_.events().At(delay_us, [this, process = process_, work = std::move(work)]() mutable {
    if (process != process_ || !alive_) {
      return;
    }
    const int64_t frozen_us = frozen_until_us_ - world_.events().now_us();
    if (frozen_us > 0) {
      Later(frozen_us, std::move(work));
    } else {
      work();
    }
  });
}

void Daemon::LaterFor(const Trainer& trainer,
                      int64_t delay_us,
                      std::function<void(Trainer&)> work) {
  const Key key{trainer.job_uid, trainer.epoch, trainer.rank};
  Later(delay_us, [this, key, serial = trainer.serial, work = std::move(work)] {
    const auto found = trainers_.find(key);
    if (found != trainers_.end() && found->second.serial == serial && !found->second.hung) {
      work(found->second);
    }
  });
}

void Daemon::Start() {
  alive_ = true;
  draining_ = false;
  ++process_;
  frozen_until_us_ = 0;
  incarnation_ = absl::StrCat(id_, "-process-", process_);
  stream_ = 0;
  welcomed_ = false;
  failed_attempts_ = 0;
  term_ = 0;
  cluster_id_.clear();
  beat_us_ = 1'000'000;
  beats_sent_ = 0;
  unacknowledged_.clear();
  results_.clear();
  trainers_.clear();
  launching_.clear();
  jobs_.clear();
  seals_.clear();
  world_.Trace(id_, "starts as ", incarnation_);
  Connect();
}

void Daemon::Kill(bool stream_breaks) {
  world_.Trace(id_, stream_breaks ? "is killed" : "loses its power");
  alive_ = false;
  for (const auto& [key, trainer] : trainers_) {
    world_.OnTrainerGone(trainer, true);
  }
  trainers_.clear();
  const StreamId stream = std::exchange(stream_, 0);
  if (stream == 0) {
    return;
  }
  if (stream_breaks) {
    world_.network().Break(stream, world_.random().Between(0, 2000));
  } else {
    world_.network().SwallowUp(stream);
    world_.network().SwallowDown(stream);
  }
}

void Daemon::Freeze(int64_t for_us) {
  frozen_until_us_ = world_.events().now_us() + for_us;
}

void Daemon::Thaw() {
  frozen_until_us_ = 0;
}

void Daemon::Drain() {
  if (!alive_ || draining_) {
    return;
  }
  world_.Trace(id_, "drains");
  draining_ = true;
  SendControl(DrainNotice{"SIGTERM"});
  Later(kDrainLimitUs, [this] {
    for (auto& [key, trainer] : trainers_) {
      JobEpochs& job = jobs_[trainer.job_uid];
      job.over = std::max(job.over, job.newest);
    }
    for (const auto& [key, copy] : std::map(trainers_)) {
      if (trainers_.contains(key)) {
        StopTrainer(trainers_.at(key), kStopGraceUs);
      }
    }
  });
  EndWhenEmpty();
}

void Daemon::EndWhenEmpty() {
  if (draining_ && trainers_.empty()) {
    Later(1'000'000, [this] {  // what it has to say is flushed
      if (draining_ && trainers_.empty()) {
        Kill(true);
      }
    });
  }
}

// -- fleet_client

void Daemon::Connect() {
  ++stream_number_;
  welcomed_ = false;
  heard_command_ = 0;
  heard_us_ = world_.events().now_us();
  stream_ = world_.OpenStream(*this);
  world_.network().SendUp(stream_, MakeHello());
  WatchBeats(stream_number_);
}

HelloMessage Daemon::MakeHello() const {
  HelloMessage hello;
  hello.node_id = id_;
  hello.incarnation = incarnation_;
  hello.work_lock = absl::StrCat("folder of ", id_);
  hello.protocol = 1;
  hello.cluster_id = cluster_id_;
  hello.term = term_;
  hello.host_id = id_;
  hello.data_address = "127.0.0.1";
  for (int64_t device = 0; device < devices_; ++device) {
    hello.devices.push_back({"cpu", "simulated", 1 << 30, absl::StrCat(id_, "-", device)});
  }
  std::map<Key, HeldTrainer> held;
  for (const auto& [key, trainer] : trainers_) {
    held[key] = {trainer.job_uid,
                 trainer.epoch,
                 trainer.attempt,
                 trainer.rank,
                 trainer.step,
                 trainer.state,
                 {},
                 trainer.has};
  }
  for (const auto& [key, attempt] : launching_) {
    const auto& [job, epoch, rank] = key;
    held[key] = {job, epoch, attempt, rank, 0, "launching", {}, {}};
  }
  for (const Unacknowledged& kept : unacknowledged_) {
    if (const auto* exited = std::get_if<TrainerExited>(&kept.message)) {
      HeldTrainer& entry = held[{exited->job_uid, exited->epoch, exited->rank}];
      entry.job_uid = exited->job_uid;
      entry.epoch = exited->epoch;
      entry.attempt = exited->attempt;
      entry.rank = exited->rank;
      entry.state = "ended";
    }
  }
  for (const KeptSeal& kept : seals_) {
    HeldTrainer& entry = held[kept.key];
    if (entry.state.empty()) {
      const auto& [job, epoch, rank] = kept.key;
      entry = {job, epoch, kept.attempt, rank, 0, "exited", {}, {}};
    }
    entry.seals.push_back(kept.seal);
  }
  for (auto& [key, entry] : held) {
    hello.trainers.push_back(std::move(entry));
  }
  return hello;
}

void Daemon::OnClosed(StreamId stream) {
  if (stream == stream_ && alive_) {
    // The process may be frozen: it hears of it later.
    Later(0, [this, stream] {
      if (stream == stream_) {
        Disconnect();
      }
    });
  }
}

void Daemon::Disconnect() {
  world_.network().CloseFromBelow(stream_);
  stream_ = 0;
  ++stream_number_;
  welcomed_ = false;
  unattended_since_ = stream_number_;
  SaveUnattended(stream_number_);
  const int doublings = std::min(failed_attempts_++, 10);
  const int64_t whole = std::min(kLastBackoffUs, kFirstBackoffUs << doublings);
  Later(world_.random().Between(whole / 2, whole), [this, number = stream_number_] {
    if (number == stream_number_) {
      Connect();
    }
  });
}

void Daemon::OnDown(StreamId stream, const DownMessage& message) {
  if (!alive_) {
    return;
  }
  if (frozen_until_us_ > world_.events().now_us()) {
    Later(0, [this, stream, message] { OnDown(stream, message); });
    return;
  }
  if (stream != stream_) {
    return;
  }
  heard_us_ = world_.events().now_us();
  if (message.term < term_) {
    world_.checks().OnStaleTermRefused();
    Disconnect();
    return;
  }
  if (message.term > term_) {
    term_ = message.term;
    results_.clear();
  }
  heard_command_ = std::max(heard_command_, message.command_id);
  if (const auto* welcome = std::get_if<Welcome>(&message.kind)) {
    OnWelcome(*welcome);
  } else if (const auto* ack = std::get_if<BeatAck>(&message.kind)) {
    OnBeatAck(ack->seq);
  } else if (const auto* rejected = std::get_if<Rejected>(&message.kind)) {
    world_.checks().OnRejected(id_, rejected->reason);
    Kill(true);
  } else if (const auto known = results_.find(message.command_id);
             message.command_id != 0 && known != results_.end()) {
    SendControl(known->second);
  } else {
    OnCommand(message);
  }
}

void Daemon::OnWelcome(const Welcome& welcome) {
  cluster_id_ = welcome.cluster_id;
  beat_us_ = std::clamp<int64_t>(welcome.beat_interval_ms, 20, 60'000) * 1000;
  welcomed_ = true;
  failed_attempts_ = 0;
  for (const HeldTrainer& held : welcome.stop) {
    Stop(held.job_uid, held.epoch, 0);
    std::erase_if(seals_, [&held](const KeptSeal& kept) {
      return std::get<0>(kept.key) == held.job_uid && std::get<1>(kept.key) <= held.epoch;
    });
  }
  RepeatRecords();
  for (Unacknowledged& kept : unacknowledged_) {
    kept.beats_before = beats_sent_;
    world_.network().SendUp(stream_, kept.message);
  }
  SendBeat();
}

void Daemon::WatchBeats(uint64_t stream_number) {
  Later(beat_us_, [this, stream_number] {
    if (stream_number != stream_number_) {
      return;
    }
    const int64_t limit =
        welcomed_ ? std::max(kLeastPatienceUs, 10 * beat_us_) : kWelcomeDeadlineUs;
    if (world_.events().now_us() - heard_us_ > limit) {
      Disconnect();
      return;
    }
    if (welcomed_) {
      SendBeat();
    }
    WatchBeats(stream_number);
  });
}

void Daemon::SendBeat() {
  BeatMessage beat;
  beat.seq = ++beats_sent_;
  beat.heard_command = heard_command_;
  for (const auto& [key, trainer] : trainers_) {
    TrainerBeat& told = beat.trainers.emplace_back();
    told.job_uid = trainer.job_uid;
    told.rank = trainer.rank;
    told.epoch = trainer.epoch;
    told.step = trainer.step;
    told.phase = trainer.ready ? "training" : "starting";
    told.state = trainer.state;
    told.has = trainer.has;
    if (told.has.until_step >= 0) {
      told.has.groups.clear();
    }
  }
  for (const auto& [key, attempt] : launching_) {
    TrainerBeat& told = beat.trainers.emplace_back();
    told.job_uid = std::get<0>(key);
    told.epoch = std::get<1>(key);
    told.rank = std::get<2>(key);
    told.state = "launching";
  }
  world_.network().SendUp(stream_, UpMessage(std::move(beat)));
}

void Daemon::RepeatRecords() {
  for (const auto& [key, trainer] : trainers_) {
    for (const UpMessage& record : trainer.records) {
      SendControl(record);
    }
  }
}

void Daemon::SaveUnattended(uint64_t stream_number) {
  Later(500'000, [this, stream_number] {
    if (stream_number != unattended_since_ || welcomed_) {
      return;
    }
    for (auto& [key, trainer] : trainers_) {
      const bool due = trainer.save_every_us > 0 && trainer.state == "running" &&
                       world_.events().now_us() - trainer.saved_us >= trainer.save_every_us;
      if (trainer.rank == 0 && due) {
        TrainerCommand command{
            trainer.job_uid, trainer.epoch, 0, SaveTrainer{trainer.has.save_sequence + 1, false}};
        NoteTold(trainer, command);
        HandleFrame(trainer, command);
      }
    }
    SaveUnattended(stream_number);
  });
}

void Daemon::NoteTold(Trainer& trainer, const TrainerCommand& command) {
  TrainerHas& has = trainer.has;
  if (const auto* run = std::get_if<RunTrainer>(&command.frame)) {
    if (has.until_step < 0) {
      trainer.saved_us = world_.events().now_us();
      trainer.state = trainer.state == "stopping" ? trainer.state : "running";
    }
    has.until_step = std::max(has.until_step, run->until_step);
    trainer.save_every_us = run->save_every_ms * 1000;
    trainer.records.clear();
  } else if (const auto* save = std::get_if<SaveTrainer>(&command.frame)) {
    has.save_sequence = std::max(has.save_sequence, save->sequence);
    has.then_stop = has.then_stop || save->then_stop;
    trainer.saved_us = world_.events().now_us();
  } else if (const auto* set = std::get_if<CommRecordSet>(&command.frame)) {
    if (std::find(has.groups.begin(), has.groups.end(), set->group) == has.groups.end()) {
      has.groups.push_back(set->group);
    }
  }
}

void Daemon::OnBeatAck(int64_t seq) {
  while (!unacknowledged_.empty() && unacknowledged_.front().beats_before < seq) {
    unacknowledged_.pop_front();
  }
}

void Daemon::SendControl(UpMessage message) {
  if (welcomed_) {
    world_.network().SendUp(stream_, message);
  }
  unacknowledged_.push_back({std::move(message), beats_sent_});
}

void Daemon::SendResult(int64_t command_id, bool ok, const std::string& message) {
  results_[command_id] = {command_id, ok, message};
  SendControl(results_[command_id]);
}

// -- supervisor

void Daemon::OnCommand(const DownMessage& message) {
  bool done = true;
  if (const auto* launch = std::get_if<Launch>(&message.kind)) {
    OnLaunch(message.command_id, *launch);
    return;
  }
  if (const auto* command = std::get_if<TrainerCommand>(&message.kind)) {
    if (const auto* commit = std::get_if<CommitResult>(&command->frame)) {
      DropSeals(command->job_uid, commit->step);
    }
    done = OnTrainerCommand(*command);
  } else if (const auto* stop = std::get_if<StopTrainers>(&message.kind)) {
    done = Stop(stop->job_uid, stop->epoch, stop->grace_ms * 1000);
  }
  SendResult(message.command_id, done, done ? "" : "refused");
}

void Daemon::OnLaunch(int64_t command_id, const Launch& launch) {
  for (const StartTrainer& start : launch.trainers) {
    launching_[{launch.job_uid, launch.epoch, start.rank}] = launch.attempt;
  }
  world_.FetchPlan(launch, [this, process = process_, command_id, launch](bool here, bool found) {
    if (process != process_ || !alive_) {
      return;
    }
    Later(0, [this, command_id, launch, here, found] {
      for (const StartTrainer& start : launch.trainers) {
        launching_.erase({launch.job_uid, launch.epoch, start.rank});
      }
      if (!here) {
        return;  // the coordinator sees that nothing was launched, and says it again
      }
      if (!found) {
        SendResult(command_id, false, "the coordinator does not know the plan");
      } else {
        LaunchWithPlan(command_id, launch);
      }
    });
  });
}

std::string Daemon::WhyNot(const Launch& launch) const {
  const auto job = jobs_.find(launch.job_uid);
  const bool over =
      job != jobs_.end() && (launch.epoch <= job->second.over || launch.epoch < job->second.newest);
  if (over) {
    return world_.bug() == Bug::kStaleEpochLaunched ? "" : "the epoch is over here";
  }
  if (draining_) {
    return "this node is going away";
  }
  return "";
}

void Daemon::LaunchWithPlan(int64_t command_id, const Launch& launch) {
  const std::string obstacle = WhyNot(launch);
  if (!obstacle.empty()) {
    SendResult(command_id, false, obstacle);
    return;
  }
  JobEpochs& job = jobs_[launch.job_uid];
  if (job.newest < launch.epoch) {
    job.newest = launch.epoch;
    job.started.clear();
  }
  for (const auto& [key, copy] : std::map(trainers_)) {
    if (std::get<0>(key) == launch.job_uid && std::get<1>(key) < launch.epoch) {
      Exit(key, 0, 9, "Stopped");
    }
  }
  Launch fresh = launch;  // an order may come twice
  std::erase_if(fresh.trainers, [&job](const StartTrainer& start) {
    return !job.started.insert(start.rank).second;
  });
  world_.checks().OnDaemonLaunches(*this, fresh, job.over);
  for (const StartTrainer& start : fresh.trainers) {
    StartOne(fresh, start);
  }
  SendResult(command_id, true, "");
}

bool Daemon::Stop(const std::string& job_uid, int64_t epoch, int64_t grace_us) {
  JobEpochs& job = jobs_[job_uid];
  for (const auto& [key, copy] : std::map(trainers_)) {
    if (std::get<0>(key) == job_uid && std::get<1>(key) <= epoch && trainers_.contains(key)) {
      StopTrainer(trainers_.at(key), grace_us);
    }
  }
  if (epoch < job.newest) {
    return false;
  }
  if (job.newest != epoch) {
    job.newest = epoch;
    job.started.clear();
  }
  job.over = std::max(job.over, epoch);
  return true;
}

bool Daemon::OnTrainerCommand(const TrainerCommand& command) {
  const auto job = jobs_.find(command.job_uid);
  if (job != jobs_.end() && command.epoch < job->second.newest) {
    return false;
  }
  bool found = false;
  for (const auto& [key, copy] : std::map(trainers_)) {
    const auto& [uid, epoch, rank] = key;
    if (uid == command.job_uid && epoch == command.epoch &&
        (command.rank < 0 || command.rank == rank)) {
      found = true;
      NoteTold(trainers_.at(key), command);
      LaterFor(copy, world_.random().Between(10, 500), [this, command](Trainer& trainer) {
        HandleFrame(trainer, command);
      });
    }
  }
  return found;
}

void Daemon::DropSeals(const std::string& job_uid, int64_t up_to_step) {
  std::erase_if(seals_, [&](const KeptSeal& kept) {
    return std::get<0>(kept.key) == job_uid && kept.seal.step <= up_to_step;
  });
}

}  // namespace ravel::coordinator::simulation
