#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "common/crypto.h"
#include "tests/bench/fake_fleet.h"
#include "tests/testing/eventually.h"

namespace ravel::bench {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kStep{1000};
constexpr milliseconds kRound{5};
constexpr milliseconds kReconnect{500};
constexpr int64_t kCollectivesPerStep = 40;
constexpr int64_t kTokensPerStep = 4096;

double Ms(SteadyClock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

struct FakeFleet::Node {
  // What a trainer shows of itself and of what it was told; held is a HeldTrainer or a TrainerBeat.
  static void Show(const Trainer& trainer, auto& held) {
    held.set_state(trainer.until_step >= 0                          ? "running"
                   : trainer.has_records || trainer.world_size == 1 ? "ready"
                                                                    : "starting");
    v1::TrainerHas& has = *held.mutable_has();
    has.set_until_step(trainer.until_step);
    has.set_save_sequence(trainer.save_sequence);
    if (trainer.has_records && trainer.until_step < 0) {
      has.add_groups("world");
    }
  }

  std::string id;
  std::string incarnation;
  std::unique_ptr<daemon::FleetChannel> channel;
  // Only Start, Run and the destructor touch it.
  std::unique_ptr<daemon::FleetStream> stream;
  std::unique_ptr<daemon::FleetStream> old_stream;  // kept until nobody calls it any more

  Mutex mutex;
  bool open ABSL_GUARDED_BY(mutex) = false;
  bool welcomed ABSL_GUARDED_BY(mutex) = false;
  bool dead ABSL_GUARDED_BY(mutex) = false;    // gone, and does not return
  bool silent ABSL_GUARDED_BY(mutex) = false;  // frozen: connected, says nothing
  milliseconds beat_interval ABSL_GUARDED_BY(mutex) = milliseconds(1000);
  SteadyClock::time_point next_beat ABSL_GUARDED_BY(mutex);
  SteadyClock::time_point reconnect ABSL_GUARDED_BY(mutex);
  int64_t term ABSL_GUARDED_BY(mutex) = 0;
  int64_t beats ABSL_GUARDED_BY(mutex) = 0;
  std::map<int64_t, SteadyClock::time_point> sent ABSL_GUARDED_BY(mutex);
  std::map<TrainerKey, Trainer> trainers ABSL_GUARDED_BY(mutex);
  std::vector<v1::Up> outgoing
      ABSL_GUARDED_BY(mutex);  // sent by Run, so that no callback calls its own stream
};

FakeFleet::FakeFleet(FleetOptions options) : options_(std::move(options)) {}

FakeFleet::~FakeFleet() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  for (const std::unique_ptr<Node>& node : nodes_) {
    node->stream.reset();
    node->old_stream.reset();
  }
}

void FakeFleet::Start() {
  const SteadyClock::time_point now = SteadyClock::now();
  for (int i = 0; i < options_.nodes; ++i) {
    auto node = std::make_unique<Node>();
    node->id = absl::StrFormat("%s%05d", options_.prefix, i);
    node->incarnation = RandomHex(16);
    node->channel = daemon::FleetChannel::Create(options_.address);
    {
      const MutexLock lock(node->mutex);
      node->reconnect = now + milliseconds(i);  // a thousand in a second
    }
    nodes_.push_back(std::move(node));
  }
  thread_ = std::thread([this] { Run(); });
}

void FakeFleet::Open(Node& node) {
  node.old_stream = std::move(node.stream);
  node.stream = node.channel->Open(
      {.received = [this, &node](v1::Down down) { OnReceived(node, std::move(down)); },
       .closed =
           [this, &node](const absl::Status&) {
             const MutexLock lock(node.mutex);
             if (node.open && !node.dead && !node.silent) {
               const MutexLock count(mutex_);
               ++streams_lost_;
             }
             node.open = node.welcomed = false;
             node.sent.clear();
             node.outgoing.clear();
             node.reconnect = SteadyClock::now() + kReconnect;
           }});
  SendHello(node);
}

void FakeFleet::SendHello(Node& node) {
  v1::Up up;
  v1::Hello& hello = *up.mutable_hello();
  hello.set_node_id(node.id);
  hello.set_incarnation(node.incarnation);
  hello.set_protocol(1);
  hello.set_data_address("127.0.0.1");
  hello.set_host_id("host of " + node.id);
  hello.set_cpu_isa("avx2");
  hello.set_version("0.1.0");
  for (int i = 0; i < options_.devices; ++i) {
    v1::Device& device = *hello.add_devices();
    device.set_kind("cpu");
    device.set_model("fake");
    device.set_memory_bytes(int64_t{80} << 30);
    device.set_uuid(absl::StrCat(node.id, "-", i));
  }
  {
    const MutexLock lock(node.mutex);
    hello.set_term(node.term);
    for (const auto& [key, trainer] : node.trainers) {
      v1::HeldTrainer& held = *hello.add_trainers();
      held.set_job_uid(key.first);
      held.set_rank(key.second);
      held.set_epoch(trainer.epoch);
      held.set_attempt(trainer.attempt);
      held.set_step(trainer.step);
      Node::Show(trainer, held);
    }
  }
  node.stream->Send(up, daemon::FleetStream::Kind::kControl);
}

// -- what the coordinator says

void FakeFleet::OnReceived(Node& node, v1::Down down) {
  const MutexLock lock(node.mutex);
  if (node.dead || node.silent) {
    return;
  }
  const SteadyClock::time_point now = SteadyClock::now();
  node.term = std::max(node.term, down.term());
  switch (down.kind_case()) {
    case v1::Down::kWelcome:
      node.welcomed = true;
      node.beat_interval = milliseconds(std::max<int64_t>(20, down.welcome().beat_interval_ms()));
      node.next_beat = now;
      for (const v1::HeldTrainer& held : down.welcome().stop()) {
        v1::StopTrainers stop;
        stop.set_job_uid(held.job_uid());
        stop.set_epoch(held.epoch());
        OnStop(node, stop);
      }
      break;
    case v1::Down::kBeatAck: {
      const auto sent = node.sent.find(down.beat_ack().seq());
      if (sent != node.sent.end()) {
        const MutexLock count(mutex_);
        acks_.push_back(Ms(now - sent->second));
        node.sent.erase(sent);
      }
      break;
    }
    case v1::Down::kLaunch:
      OnLaunch(node, down.command_id(), down.launch());
      break;
    case v1::Down::kTrainer:
      OnCommand(node, down.trainer());
      Answer(node, down.command_id());
      break;
    case v1::Down::kStop:
      OnStop(node, down.stop());
      Answer(node, down.command_id());
      break;
    default:
      break;
  }
}

void FakeFleet::Answer(Node& node, int64_t command_id) {
  v1::Up up;
  up.mutable_result()->set_command_id(command_id);
  up.mutable_result()->set_ok(true);
  node.outgoing.push_back(std::move(up));
}

// Trainers of an older epoch are gone; the new ones send their record and, alone, are ready at
// once.
void FakeFleet::OnLaunch(Node& node, int64_t command_id, const v1::Launch& launch) {
  {
    const MutexLock lock(mutex_);
    std::pair<int64_t, SteadyClock::time_point>& newest = launched_[launch.job_uid()];
    if (launch.epoch() > newest.first) {
      newest = {launch.epoch(), SteadyClock::now()};
    }
  }
  Answer(node, command_id);
  for (const v1::StartTrainer& start : launch.trainers()) {
    const TrainerKey key{launch.job_uid(), start.rank()};
    if (node.trainers.contains(key) && node.trainers[key].epoch >= launch.epoch()) {
      continue;  // a launch that was sent again
    }
    Trainer& trainer = node.trainers[key];
    trainer = Trainer();
    trainer.epoch = launch.epoch();
    trainer.attempt = launch.attempt();
    trainer.world_size = start.world_size();
    trainer.step = start.first_step();
    v1::TrainerUp record;
    v1::CommRecord& comm = *record.mutable_comm_record();
    comm.set_job_uid(launch.job_uid());
    comm.set_epoch(launch.epoch());
    comm.set_group("world");
    comm.set_rank(start.rank());
    comm.set_record("127.0.0.1:0");
    SendFrame(node, key, trainer, std::move(record));
    if (trainer.world_size == 1) {
      v1::TrainerUp ready;
      ready.mutable_ready()->set_step(trainer.step);
      SendFrame(node, key, trainer, std::move(ready));
    }
  }
}

void FakeFleet::OnCommand(Node& node, const v1::TrainerCommand& command) {
  for (auto& [key, trainer] : node.trainers) {
    if (key.first != command.job_uid() || trainer.epoch != command.epoch() ||
        (command.rank() >= 0 && command.rank() != key.second)) {
      continue;
    }
    if (command.frame().has_comm_records()) {
      trainer.has_records = true;
      v1::TrainerUp ready;
      ready.mutable_ready()->set_step(trainer.step);
      SendFrame(node, key, trainer, std::move(ready));
    } else if (command.frame().has_save()) {
      trainer.save_sequence = std::max(trainer.save_sequence, command.frame().save().sequence());
    } else if (command.frame().has_run()) {
      if (trainer.until_step < 0) {
        trainer.next_step = SteadyClock::now() + kStep;
      }
      trainer.until_step = command.frame().run().until_step();
      if (key.second == 0) {
        const MutexLock lock(mutex_);
        running_.insert(key.first);
      }
    }
  }
}

void FakeFleet::OnStop(Node& node, const v1::StopTrainers& stop) {
  for (auto trainer = node.trainers.begin(); trainer != node.trainers.end();) {
    if (trainer->first.first == stop.job_uid() && trainer->second.epoch <= stop.epoch()) {
      SendExit(node, trainer->first, trainer->second);
      const MutexLock lock(mutex_);
      running_.erase(stop.job_uid());
      trainer = node.trainers.erase(trainer);
    } else {
      ++trainer;
    }
  }
}

// -- what the nodes say

void FakeFleet::SendFrame(Node& node,
                          const TrainerKey& key,
                          const Trainer& trainer,
                          v1::TrainerUp frame) {
  v1::Up up;
  v1::TrainerFrame& outer = *up.mutable_trainer();
  outer.set_job_uid(key.first);
  outer.set_epoch(trainer.epoch);
  outer.set_attempt(trainer.attempt);
  outer.set_rank(key.second);
  *outer.mutable_frame() = std::move(frame);
  node.outgoing.push_back(std::move(up));
}

void FakeFleet::SendExit(Node& node, const TrainerKey& key, const Trainer& trainer) {
  v1::Up up;
  v1::TrainerExited& exited = *up.mutable_exited();
  exited.set_job_uid(key.first);
  exited.set_epoch(trainer.epoch);
  exited.set_attempt(trainer.attempt);
  exited.set_rank(key.second);
  exited.set_exit_code(10);
  exited.set_reason("Stopped");
  node.outgoing.push_back(std::move(up));
}

void FakeFleet::SendBeat(Node& node, SteadyClock::time_point now) {
  v1::Up up;
  v1::Beat& beat = *up.mutable_beat();
  beat.set_seq(++node.beats);
  for (const auto& [key, trainer] : node.trainers) {
    v1::TrainerBeat& each = *beat.add_trainers();
    each.set_job_uid(key.first);
    each.set_rank(key.second);
    each.set_epoch(trainer.epoch);
    Node::Show(trainer, each);
    v1::TrainerProgress& progress = *each.mutable_progress();
    progress.set_step(trainer.step);
    progress.set_phase(trainer.until_step < 0 ? "waiting" : "forward");
    v1::CollectiveState& state = *progress.add_collectives();
    state.set_group("world");
    state.set_sequence(static_cast<uint64_t>(trainer.total_issued));
    state.set_completed(static_cast<uint64_t>(trainer.total_issued));
    state.set_hash(static_cast<uint64_t>(trainer.total_issued) * 2654435761u);
  }
  node.sent[node.beats] = now;
  node.next_beat += node.beat_interval;
  if (node.next_beat < now) {
    node.next_beat = now + node.beat_interval;  // this program was late: no burst
  }
  node.stream->Send(up, daemon::FleetStream::Kind::kControl);
}

void FakeFleet::Step(Node& node,
                     const TrainerKey& key,
                     Trainer& trainer,
                     SteadyClock::time_point now) {
  trainer.next_step += kStep;
  if (trainer.next_step < now) {
    trainer.next_step = now + kStep;
  }
  ++trainer.step;
  trainer.total_issued += kCollectivesPerStep;
  if (key.second != 0) {
    return;  // the coordinator keeps what rank 0 says
  }
  v1::TrainerUp frame;
  v1::StepReport& report = *frame.mutable_step();
  report.set_step(trainer.step);
  report.set_loss(4.0f + 1.0f / static_cast<float>(trainer.step));
  report.set_grad_norm(1);
  report.set_lr(3e-4);
  report.set_tokens(kTokensPerStep);
  report.set_step_seconds(1);
  report.set_planned_bytes(int64_t{1} << 30);
  report.set_measured_bytes(int64_t{1} << 30);
  SendFrame(node, key, trainer, std::move(frame));
  const MutexLock lock(mutex_);
  ++step_reports_;
}

// Opens, steps, sends and beats what is due on one node.
void FakeFleet::Serve(Node& node, SteadyClock::time_point now) {
  bool open = false;
  {
    const MutexLock lock(node.mutex);
    open = !node.dead && !node.open && now >= node.reconnect;
    node.open = node.open || open;
  }
  if (open) {
    Open(node);
  }
  std::vector<v1::Up> outgoing;
  bool close = false;
  {
    const MutexLock lock(node.mutex);
    close = node.dead;
    node.welcomed = node.welcomed && !node.dead;
    if (!node.dead && !node.silent && node.open) {
      for (auto& [key, trainer] : node.trainers) {
        if (trainer.until_step > trainer.step && now >= trainer.next_step) {
          Step(node, key, trainer, now);
        }
      }
      if (node.welcomed) {
        outgoing.swap(node.outgoing);
      }
    }
  }
  if (close) {
    node.stream.reset();  // without the node's lock, which its last callback takes
    return;
  }
  for (const v1::Up& up : outgoing) {
    node.stream->Send(up, daemon::FleetStream::Kind::kControl);
  }
  const MutexLock lock(node.mutex);
  if (node.welcomed && node.open && !node.silent && !node.dead && now >= node.next_beat) {
    SendBeat(node, now);
  }
}

void FakeFleet::Run() {
  while (true) {
    {
      const MutexLock lock(mutex_);
      if (stopping_) {
        return;
      }
    }
    for (const std::unique_ptr<Node>& node : nodes_) {
      Serve(*node, SteadyClock::now());
    }
    testing::PauseBetweenLooks(kRound);
  }
}

// -- what is asked

int FakeFleet::welcomed() const {
  return static_cast<int>(std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) {
    const MutexLock lock(node->mutex);
    return node->welcomed && !node->silent;
  }));
}

int FakeFleet::running_jobs() const {
  const MutexLock lock(mutex_);
  return static_cast<int>(running_.size());
}

Samples FakeFleet::TakeAcks(double pending_ms) {
  Samples taken;
  {
    const MutexLock lock(mutex_);
    taken.swap(acks_);
  }
  const SteadyClock::time_point now = SteadyClock::now();
  for (const std::unique_ptr<Node>& node : nodes_) {
    const MutexLock lock(node->mutex);
    for (const auto& [seq, sent] : node->sent) {
      if (!node->dead && !node->silent && Ms(now - sent) > pending_ms) {
        taken.push_back(Ms(now - sent));
      }
    }
  }
  return taken;
}

int64_t FakeFleet::step_reports() const {
  const MutexLock lock(mutex_);
  return step_reports_;
}

int64_t FakeFleet::streams_lost() const {
  const MutexLock lock(mutex_);
  return streams_lost_;
}

absl::StatusOr<FakeFleet::Victim> FakeFleet::Kill(bool silently) {
  for (const std::unique_ptr<Node>& node : nodes_) {
    const MutexLock lock(node->mutex);
    if (node->dead || node->silent || !node->welcomed || node->trainers.empty()) {
      continue;
    }
    const auto& [key, trainer] = *node->trainers.begin();
    const int64_t here =
        std::count_if(node->trainers.begin(), node->trainers.end(), [&](const auto& other) {
          return other.first.first == key.first && other.second.until_step >= 0;
        });
    if (here != trainer.world_size) {
      continue;
    }
    (silently ? node->silent : node->dead) = true;
    return Victim{node->id, key.first, trainer.epoch, SteadyClock::now()};
  }
  return absl::NotFoundError("no node has a running job of its own");
}

SteadyClock::time_point FakeFleet::Relaunched(const std::string& job_uid, int64_t epoch) const {
  const MutexLock lock(mutex_);
  const auto found = launched_.find(job_uid);
  return found != launched_.end() && found->second.first > epoch ? found->second.second
                                                                 : SteadyClock::time_point();
}

}  // namespace ravel::bench
