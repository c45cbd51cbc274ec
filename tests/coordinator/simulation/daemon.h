#pragma once

// One node: a daemon that follows the rules of worker/daemon (fleet_client, supervisor, daemon),
// and its trainers. A process that was killed leaves nothing but its node.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/model/job_spec.h"
#include "coordinator/fleet/fleet_messages.h"
#include "tests/coordinator/simulation/gang.h"
#include "tests/coordinator/simulation/settings.h"

namespace ravel::coordinator::simulation {

class World;

struct Trainer {
  std::string job_uid;
  int64_t epoch = 0;
  int64_t attempt = 0;
  int64_t rank = 0;
  uint64_t serial = 0;  // tells a process from another one of the same name
  StartTrainer start;
  plan::JobSpec spec;
  int64_t step = 0;
  uint64_t weights = 0;
  int64_t until_step = -1;
  int64_t save_sequence = 0;  // asked for
  int64_t served_sequence = 0;
  bool stop_after_save = false;
  int64_t saves_under_way = 0;
  int64_t last_saved_step = -1;
  bool save_failed = false;
  bool ready = false;
  bool stepping = false;  // all ranks are in its next step
  bool leaving = false;   // ends when its saves are written
  bool done = false;
  bool hung = false;
  bool unkillable = false;
  bool dying = false;
  bool sent_record = false;
  std::string state = "starting";
  TrainerHas has;                  // what its daemon has passed on to it
  std::vector<UpMessage> records;  // its own, until it is told to train
  int64_t save_every_us = 0;
  int64_t saved_us = 0;
};

class Daemon {
 public:
  using Key = std::tuple<std::string, int64_t, int64_t>;  // job, epoch, rank
  Daemon(World& world, std::string id, int64_t devices);

  // The process.
  void Start();
  void Kill(bool stream_breaks);  // with all trainers
  void Drain();
  bool alive() const { return alive_; }
  bool draining() const { return draining_; }
  void Freeze(int64_t for_us);
  void Thaw();

  // What the network brings.
  void OnDown(StreamId stream, const DownMessage& message);
  void OnClosed(StreamId stream);

  const std::string& id() const { return id_; }
  StreamId stream() const { return stream_; }
  int64_t devices() const { return devices_; }
  std::map<Key, Trainer>& trainers() { return trainers_; }
  void KillTrainer(const Key& key, int32_t code, int32_t signal, const std::string& reason);
  void HangTrainer(const Key& key);

 private:
  struct Unacknowledged {
    UpMessage message;
    int64_t beats_before = 0;
  };
  struct JobEpochs {
    int64_t newest = 0;
    int64_t over = -1;
    std::set<int64_t> started;  // ranks of the newest epoch
  };
  struct KeptSeal {
    Key key;
    int64_t attempt = 0;
    ckpt::Seal seal;
  };

  // Unless this process is gone by then; a frozen one does it when it thaws.
  void Later(int64_t delay_us, std::function<void()> work);
  void LaterFor(const Trainer& trainer, int64_t delay_us, std::function<void(Trainer&)> work);

  // daemon.cc: fleet_client.
  void Connect();
  HelloMessage MakeHello() const;
  void Disconnect();
  void OnWelcome(const Welcome& welcome);
  void OnBeatAck(int64_t seq);
  void WatchBeats(uint64_t stream_number);
  void SendBeat();
  void RepeatRecords();
  // Without a coordinator: a save by the clock that the last one has set.
  void SaveUnattended(uint64_t stream_number);
  void NoteTold(Trainer& trainer, const TrainerCommand& command);
  void SendControl(UpMessage message);
  void SendResult(int64_t command_id, bool ok, const std::string& message);
  // supervisor.
  void OnCommand(const DownMessage& message);
  void OnLaunch(int64_t command_id, const Launch& launch);
  void LaunchWithPlan(int64_t command_id, const Launch& launch);
  std::string WhyNot(const Launch& launch) const;
  bool Stop(const std::string& job_uid, int64_t epoch, int64_t grace_us);
  bool OnTrainerCommand(const TrainerCommand& command);
  void DropSeals(const std::string& job_uid, int64_t up_to_step);
  void EndWhenEmpty();

  // trainers.cc
  void StartOne(const Launch& launch, const StartTrainer& start);
  void Bootstrap(Trainer& trainer);
  void Restore(Trainer& trainer);
  void HandleFrame(Trainer& trainer, const TrainerCommand& command);
  void EnterStep(Trainer& trainer);
  void FinishStep(Trainer& trainer, const Agreed& agreed);
  void Save(Trainer& trainer);
  void OnShardWritten(Trainer& trainer, const ckpt::Seal& seal, bool must_succeed);
  void LeaveIfSaved(Trainer& trainer);
  void SendFrame(const Trainer& trainer, decltype(TrainerFrame::frame) frame);
  void StopTrainer(Trainer& trainer, int64_t grace_us);
  void Exit(const Key& key, int32_t code, int32_t signal, const std::string& reason);

  World& world_;
  const std::string id_;
  const int64_t devices_;
  bool alive_ = false;
  bool draining_ = false;
  uint64_t process_ = 0;  // number of the process that runs, or ran
  int64_t frozen_until_us_ = 0;
  std::string incarnation_;

  StreamId stream_ = 0;
  uint64_t stream_number_ = 0;
  uint64_t unattended_since_ = 0;
  bool welcomed_ = false;
  int failed_attempts_ = 0;
  int64_t term_ = 0;
  std::string cluster_id_;
  int64_t beat_us_ = 1'000'000;
  int64_t heard_us_ = 0;
  int64_t beats_sent_ = 0;
  int64_t heard_command_ = 0;  // on this stream
  std::deque<Unacknowledged> unacknowledged_;
  std::map<int64_t, CommandResult> results_;

  std::map<Key, Trainer> trainers_;
  std::map<Key, int64_t> launching_;  // attempts of ranks whose plan is on its way
  std::map<std::string, JobEpochs> jobs_;
  std::vector<KeptSeal> seals_;
  uint64_t last_serial_ = 0;
};

}  // namespace ravel::coordinator::simulation
