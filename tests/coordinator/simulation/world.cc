#include "tests/coordinator/simulation/world.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "common/check.h"

namespace ravel::coordinator::simulation {
namespace {

constexpr int64_t kMaxEvents = 200'000'000;

}  // namespace

void SimulatedExecutor::Post(std::function<void()> work) {
  queue_.push_back(std::move(work));
  Next();
}

void SimulatedExecutor::Next() {
  if (busy_ >= threads_ || queue_.empty()) {
    return;
  }
  ++busy_;
  std::function<void()> work = std::move(queue_.front());
  queue_.pop_front();
  events_.At(takes_us_(), [this, generation = generation_, work = std::move(work)]() mutable {
    if (generation != generation_) {
      return;
    }
    run_(std::move(work));
    if (generation == generation_) {
      --busy_;
      Next();
    }
  });
}

World::World(Settings settings)
    : settings_(std::move(settings)),
      random_(settings_.seed * 0x9E3779B97F4A7C15ULL + 77),
      checks_(*this),
      network_(events_,
               random_,
               {.up = [this](StreamId stream, const Network::Up& up) { OnUp(stream, up); },
                .closed_above =
                    [this](StreamId stream) {
                      strand_.Post([this, stream] { controller_->OnStreamClosed(stream); });
                    },
                .down =
                    [this](StreamId stream, const DownMessage& down) {
                      if (Daemon* daemon = DaemonOf(stream)) {
                        daemon->OnDown(stream, down);
                      }
                    },
                .closed_below =
                    [this](StreamId stream) {
                      if (Daemon* daemon = DaemonOf(stream)) {
                        daemon->OnClosed(stream);
                      }
                    }}),
      planner_(settings_.bug),
      checkpoints_(random_, checks_, settings_.bug),
      strand_(
          events_,
          [this] { return std::max<int64_t>(1, frozen_until_us_ - events_.now_us()); },
          [this](std::function<void()> work) { CoordinatorDo(work); }),
      pool_(
          events_,
          [this] {
            return random_.Chance(0.02) ? random_.Between(0, 20 * checkpoints_.weather.write_us)
                                        : random_.Between(100, 20'000);
          },
          [this](std::function<void()> work) { CoordinatorDo(work); }) {
  std::string pattern = (std::filesystem::temp_directory_path() / "simulation-XXXXXX").string();
  CHECK(mkdtemp(pattern.data()) != nullptr);
  folder_ = pattern;
  std::filesystem::create_directories(folder_ + "/metrics");
  network_.set_repeats(settings_.messages_repeat);
  pool_.set_threads(2);
  if (random_.Chance(0.2)) {
    disk_weather_.write_us = random_.Between(100'000, 2'000'000);  // a slow disk
  }
}

World::~World() {
  controller_.reset();
  metrics_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void World::AddTrace(std::string line) {
  trace_.push_back(absl::StrCat(events_.now_us() / 1000, ".", events_.now_us() % 1000, " ", line));
  if (trace_.size() > settings_.trace_lines) {
    trace_.pop_front();
  }
}

// -- the coordinator

void World::StartCoordinator() {
  ++process_;
  frozen_until_us_ = 0;
  Trace("COORDINATOR starts as process ", process_);
  planner_.Forget();
  store_ =
      std::make_unique<SimulatedJobStore>(&disk_, disk_weather_, random_, checks_, settings_.bug);
  metrics_ = std::make_unique<MetricsLog>(folder_ + "/metrics");
  logs_ = std::make_unique<LogStore>(folder_ + "/logs");
  writer_ = std::make_unique<SimulatedStoreWriter>(
      events_,
      random_,
      store_.get(),
      disk_weather_,
      settings_.bug,
      [this](std::function<void()> work) { CoordinatorDo(work); },
      [this](std::function<void()> work) { strand_.Post(std::move(work)); });
  ControllerOptions options;
  options.detection_ms = settings_.detection_ms;
  options.tick_ms = settings_.tick_ms;
  options.step_timeout_ms = 60'000;
  options.save_timeout_ms = 30'000;
  ControllerParts parts;
  parts.clock = &events_;
  parts.strand = &strand_;
  parts.pool = &pool_;
  parts.store = store_.get();
  parts.planner = &planner_;
  parts.keeper = &checkpoints_;
  parts.fleet = this;
  parts.metrics = metrics_.get();
  parts.logs = logs_.get();
  parts.on_fatal = [this](const absl::Status& status) {
    checks_.Fail(absl::StrCat("fatal: ", std::string(status.message())));
  };
  parts.writer = writer_.get();
  parts.new_id = [this] { return absl::StrCat("id-", 1'000'000 + ++ids_); };
  controller_ = std::make_unique<JobController>(options, parts);
  const uint64_t process = process_;
  CoordinatorDo([this] {
    const absl::Status started = controller_->Start();
    checks_.Expect(started.ok(), std::string(started.message()));
  });
  if (process_ == process && controller_ != nullptr) {
    checks_.AfterRestart(disk_);
    Ticks(process);
  }
}

void World::Ticks(uint64_t process) {
  events_.At(settings_.tick_ms * 1000, [this, process] {
    if (process != process_ || controller_ == nullptr) {
      return;
    }
    if (frozen_until_us_ <= events_.now_us()) {
      CoordinatorDo([this] { controller_->Tick(); });
    }
    Ticks(process);
  });
}

void World::KillCoordinator(const std::string& why) {
  if (controller_ == nullptr) {
    return;
  }
  Trace("COORDINATOR dies: ", why);
  strand_.Clear();
  pool_.Clear();
  checkpoints_.ForgetWanted();
  if (store_->not_durable()) {
    const int64_t term = disk_.term;
    disk_ = *store_->not_durable();
    disk_.term = term;
  }
  controller_.reset();
  writer_.reset();
  metrics_.reset();
  network_.LoseCoordinator();
  const int64_t away_us = healed_ || random_.Chance(0.8) ? random_.Between(50'000, 3'000'000)
                                                         : random_.Between(3'000'000, 30'000'000);
  events_.At(away_us, [this, process = process_] {
    if (process == process_ && controller_ == nullptr) {
      StartCoordinator();
    }
  });
}

void World::CoordinatorDo(const std::function<void()>& work) {
  try {
    work();
  } catch (const CoordinatorCrash&) {
    KillCoordinator("at a write");
  }
}

void World::OnUp(StreamId stream, const Network::Up& message) {
  strand_.Post([this, stream, message] {
    if (const auto* hello = std::get_if<HelloMessage>(&message)) {
      Trace("HELLO ", hello->node_id, " stream ", stream, " with ", hello->trainers.size());
      controller_->OnHello(stream, *hello);
    } else {
      controller_->OnUp(stream, std::get<UpMessage>(message));
    }
  });
}

void World::Send(StreamId stream, DownMessage message) {
  if (const auto* launch = std::get_if<Launch>(&message.kind)) {
    checks_.OnLaunchSent(disk_, *launch);
    Trace("LAUNCH ", launch->trainers.front().job_name, " epoch ", launch->epoch);
  }
  const auto* command = std::get_if<TrainerCommand>(&message.kind);
  const bool runs = command != nullptr && std::holds_alternative<RunTrainer>(command->frame);
  if (runs && settings_.bug == Bug::kSwallowedRun) {
    return;
  }
  network_.SendDown(stream, std::move(message));
}

void World::Close(StreamId stream) {
  network_.CloseFromAbove(stream);
}

// -- what daemons use

StreamId World::OpenStream(Daemon& daemon) {
  const StreamId stream = network_.Open(daemon.id(), controller_ != nullptr);
  daemon_of_[stream] = &daemon;
  return stream;
}

Daemon* World::DaemonOf(StreamId stream) {
  const auto found = daemon_of_.find(stream);
  return found == daemon_of_.end() || found->second->stream() != stream ? nullptr : found->second;
}

void World::FetchPlan(const Launch& launch, std::function<void(bool, bool)> done) {
  const auto world = controller_ == nullptr ? nullptr : planner_.Find(launch.plan_digest);
  if (world != nullptr) {
    checks_.OnPlan(launch, world->bytes);
  }
  // One in twenty waits: then the epoch may be over when the plan is there.
  const int64_t takes_us =
      random_.Chance(0.05) ? random_.Between(5000, 3'000'000) : random_.Between(200, 5000);
  events_.At(takes_us,
             [here = controller_ != nullptr, found = world != nullptr, done = std::move(done)] {
               done(here, found);
             });
}

int64_t World::StepUs(const Trainer& trainer) {
  // Of the job, with a little noise.
  const int64_t base = 20'000 + 10'000 * (static_cast<int64_t>(trainer.start.job_name.size()) % 7);
  return base + random_.Between(0, base / 10);
}

void World::OnTrainerStarted(Daemon& daemon, const Trainer& trainer) {
  Daemon*& member = members_[{trainer.job_uid, trainer.epoch}][trainer.rank];
  checks_.Expect(member == nullptr,
                 absl::StrCat("job ",
                              trainer.start.job_name,
                              " epoch ",
                              trainer.epoch,
                              ": rank ",
                              trainer.rank,
                              " is started twice"));
  member = &daemon;
}

void World::OnTrainerGone(const Trainer& trainer, bool abnormal) {
  const auto epoch = members_.find({trainer.job_uid, trainer.epoch});
  if (!abnormal || epoch == members_.end()) {
    return;
  }
  for (const auto& [rank, daemon] : epoch->second) {
    if (rank == trainer.rank || !random_.Chance(0.5)) {
      continue;
    }
    events_.At(random_.Between(10'000, 500'000),
               [daemon = daemon, key = Daemon::Key(trainer.job_uid, trainer.epoch, rank)] {
                 daemon->KillTrainer(key, 11, 0, "CommError");
               });
  }
}

void World::OnStepDone(const Trainer& trainer) {
  const auto [known, fresh] = trained_[trainer.job_uid].emplace(trainer.step, trainer.epoch);
  if (!fresh && known->second != trainer.epoch) {
    ++repeated_steps_;
    Trace("STEP ", trainer.step, " of ", trainer.start.job_name, " is trained again");
  }
}

std::string World::JobName(const std::string& uid) const {
  const auto found = disk_.jobs.find(uid);
  return found == disk_.jobs.end() ? uid : found->second.name;
}

int64_t World::StepsOf(const std::string& uid) {
  return planner_.DecodeSpec(disk_.jobs.at(uid).planned)->steps;
}

std::vector<StepRecord> World::History(const std::string& uid) {
  return SurvivingHistory(*metrics_->Read(uid));
}

void World::CheckFleetAtTheEnd() {
  for (const auto& [id, daemon] : daemons_) {
    checks_.Expect(daemon->trainers().empty(), absl::StrCat("a trainer still runs on ", id));
  }
  for (const NodeView& node : controller_->Nodes()) {
    checks_.Expect(node.devices_free == node.devices,
                   absl::StrCat("node ",
                                node.record.facts.node_id,
                                ": ",
                                node.devices_free,
                                " of ",
                                node.devices,
                                " devices are free at the end, state ",
                                std::string(NodeStateName(node.record.state))));
  }
}

// -- the whole

bool World::IsOver(const Client& client) const {
  const auto job = disk_.jobs.find(client.uid);
  if (job == disk_.jobs.end() || client.delete_at_us >= 0) {
    return job == disk_.jobs.end() && client.delete_asked;
  }
  return IsTerminal(job->second.state) && !(client.cancelled && client.retries);
}

bool World::AllOver() {
  return std::all_of(
      clients_.begin(), clients_.end(), [this](const Client& client) { return IsOver(client); });
}

int64_t World::succeeded() const {
  int64_t count = 0;
  for (const auto& [uid, job] : disk_.jobs) {
    count += job.state == JobState::kSucceeded ? 1 : 0;
  }
  return count;
}

std::string World::Run() {
  for (int64_t i = 0; i < settings_.nodes; ++i) {
    const std::string id = absl::StrCat("n", i);
    daemons_[id] = std::make_unique<Daemon>(*this, id, settings_.devices);
  }
  StartCoordinator();
  for (auto& [id, daemon] : daemons_) {
    events_.At(random_.Between(0, 1'000'000), [&started = *daemon] { started.Start(); });
  }
  PlanJobs();
  FaultLater();
  events_.At(settings_.faults_for_ms * 1000, [this] { Heal(); });
  const int64_t end_us = (settings_.faults_for_ms + settings_.finish_within_ms) * 1000;
  int64_t over_since_us = -1;
  while (checks_.broken().empty() && events_.now_us() < end_us && events_.RunOne()) {
    if (events_.handled() % 64 == 0 && healed_) {
      const bool over = AllOver();
      over_since_us = !over ? -1 : over_since_us < 0 ? events_.now_us() : over_since_us;
      // What the last jobs leave behind has some seconds to go.
      if (over && events_.now_us() - over_since_us > 40'000'000) {
        break;
      }
    }
    CHECK(events_.handled() < kMaxEvents);
  }
  checks_.Expect(controller_ != nullptr, "no coordinator runs at the end");
  if (checks_.broken().empty()) {
    checks_.AtTheEnd(disk_);
  }
  return checks_.broken();
}

}  // namespace ravel::coordinator::simulation
