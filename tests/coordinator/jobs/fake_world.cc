#include "tests/coordinator/jobs/fake_world.h"

#include <cstdlib>
#include <filesystem>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/check.h"

namespace ravel::coordinator {
namespace {

// As worker/daemon/trainer_process tells it.
std::string StateOf(const FakeTrainer& trainer) {
  return trainer.stopping  ? "stopping"
         : trainer.running ? "running"
         : trainer.ready   ? "ready"
                           : "starting";
}

TrainerHas HasOf(const FakeTrainer& trainer) {
  return {trainer.until_step, trainer.sequence, trainer.then_stop, trainer.groups};
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PlannedWorld>> FakePlanner::Plan(const plan::JobSpec& spec,
                                                                      int64_t ranks,
                                                                      bool shared_memory) {
  RETURN_IF_ERROR(failure);
  auto world = std::make_shared<PlannedWorld>();
  world->bytes = absl::StrCat(spec.name, " on ", ranks, shared_memory ? " shared" : "", build);
  world->digest = world->bytes;
  world->plan.ranks = ranks;
  return std::shared_ptr<const PlannedWorld>(std::move(world));
}

std::string FakePlanner::EncodeSpec(const plan::JobSpec& spec) {
  specs_.push_back(spec);
  return absl::StrCat(specs_.size() - 1);
}

absl::StatusOr<plan::JobSpec> FakePlanner::DecodeSpec(const std::string& planned) {
  size_t index = 0;
  CHECK(absl::SimpleAtoi(planned, &index) && index < specs_.size());
  return specs_[index];
}

FakeWorld::FakeWorld() {
  std::string pattern = (std::filesystem::temp_directory_path() / "coordinator-XXXXXX").string();
  CHECK(mkdtemp(pattern.data()) != nullptr);
  folder = pattern;
  std::filesystem::create_directories(folder + "/metrics");
  options.detection_ms = 1000;
  options.tick_ms = 20;
}

FakeWorld::~FakeWorld() {
  KillCoordinator();
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

void FakeWorld::StartCoordinator(std::unique_ptr<JobStore> store) {
  KillCoordinator();
  store_ = store != nullptr ? std::move(store) : std::make_unique<MemoryJobStore>(&disk);
  metrics_ = std::make_unique<MetricsLog>(folder + "/metrics");
  logs_ = std::make_unique<LogStore>(folder + "/logs");
  writer_ = std::make_unique<HeldStoreWriter>(store_.get());
  ControllerParts parts{&clock,
                        &strand_,
                        &pool_,
                        store_.get(),
                        &planner,
                        &keeper,
                        this,
                        metrics_.get(),
                        logs_.get(),
                        [this](const absl::Status&) { fatal = true; },
                        [this] { return std::exchange(pause_ms, 0); }};
  parts.writer = writer_.get();
  controller_ = std::make_unique<JobController>(options, parts);
  const absl::Status started = controller_->Start();
  CHECK_MSG(started.ok(), std::string(started.message()).c_str());
}

void FakeWorld::KillCoordinator() {
  strand_.Clear();
  pool_.Clear();
  controller_.reset();
  writer_.reset();
  store_.reset();  // its lock too
  for (auto& [id, node] : nodes_) {
    node.stream = 0;
    node.inbox.clear();
  }
}

FakeNode& FakeWorld::AddGpuNode(const std::string& id, std::vector<std::string> models) {
  nodes_[id].gpu_models = std::move(models);
  return AddNode(id, 0);
}

FakeNode& FakeWorld::AddNode(const std::string& id, int64_t devices) {
  FakeNode& node = nodes_[id];
  node.id = id;
  node.work_lock = "folder of " + id;
  node.devices = devices;
  node.incarnation = absl::StrCat("incarnation-", ++incarnations_);
  Connect(node);
  return node;
}

void FakeWorld::Connect(FakeNode& node) {
  HelloMessage hello;
  hello.node_id = node.id;
  hello.incarnation = node.incarnation;
  hello.protocol = 1;
  hello.host_id = node.host_id;
  hello.data_address = "127.0.0.1";
  hello.device_message = node.device_message;
  hello.draining = node.draining;
  hello.work_lock = node.work_lock;
  for (const std::string& model : node.gpu_models) {
    hello.devices.push_back(
        {"gpu", model, int64_t{80} << 30, absl::StrCat("device-", hello.devices.size())});
  }
  for (int64_t i = 0; i < node.devices; ++i) {
    hello.devices.push_back({"cpu", "test", 1 << 30, absl::StrCat("device-", i)});
  }
  for (const auto& [key, trainer] : node.trainers) {
    hello.trainers.push_back({trainer.job_uid,
                              trainer.epoch,
                              trainer.attempt,
                              trainer.rank,
                              trainer.step,
                              StateOf(trainer),
                              {},
                              HasOf(trainer)});
  }
  for (const auto& [job, epoch, rank] : node.launching) {
    hello.trainers.push_back({job, epoch, 1, rank, 0, "launching", {}, {}});
  }
  node.stream = ++last_stream_;
  node.heard_command = 0;
  node.alive = true;
  hello.term = node.term;
  controller_->OnHello(node.stream, hello);
  Settle();
  for (UpMessage& message : std::exchange(node.unheard, {})) {
    SendUp(node, std::move(message));
  }
  for (const auto& [key, trainer] : std::map(node.trainers)) {
    for (const CommRecord& record : trainer.records) {
      Frame(node, trainer, record);
    }
  }
  Settle();
}

void FakeWorld::Disconnect(FakeNode& node) {
  const StreamId stream = std::exchange(node.stream, 0);
  node.inbox.clear();
  if (controller_ != nullptr && stream != 0) {
    controller_->OnStreamClosed(stream);
  }
}

void FakeWorld::Kill(FakeNode& node) {
  node.alive = false;
  node.trainers.clear();
  node.launching.clear();
  node.unheard.clear();
  Disconnect(node);
  Settle();
}

void FakeWorld::Restart(FakeNode& node) {
  node.trainers.clear();
  node.launching.clear();
  node.unheard.clear();
  node.incarnation = absl::StrCat("incarnation-", ++incarnations_);
  Disconnect(node);
  Connect(node);
}

void FakeWorld::KillTrainer(int64_t rank,
                            int32_t exit_code,
                            int32_t signal,
                            const std::string& reason) {
  for (auto& [id, node] : nodes_) {
    for (const auto& [key, trainer] : std::map(node.trainers)) {
      if (trainer.rank == rank) {
        Exit(node, trainer, exit_code, signal, reason);
      }
    }
  }
  Settle();
}

void FakeWorld::Settle() {
  bool busy = true;
  while (busy) {
    busy = strand_.RunOne() || pool_.RunOne();
    for (auto& [id, node] : nodes_) {
      if (!node.inbox.empty() && !node.frozen) {
        const DownMessage message = std::move(node.inbox.front());
        node.inbox.pop_front();
        Handle(node, message);
        busy = true;
      }
    }
  }
}

void FakeWorld::Advance(int64_t ms) {
  for (int64_t passed = 0; passed < ms; passed += options.tick_ms) {
    clock.AdvanceMs(options.tick_ms);
    for (auto& [id, node] : nodes_) {
      if (node.stream == 0 || node.frozen || controller_ == nullptr || passed % 100 != 0) {
        continue;
      }
      BeatMessage beat;
      beat.heard_command = node.heard_command;
      for (const auto& [job, epoch, rank] : node.launching) {
        beat.trainers.push_back({job, rank, epoch, 0, "", 0, {}, "launching", {}});
      }
      for (const auto& [key, trainer] : node.trainers) {
        beat.trainers.push_back({trainer.job_uid,
                                 trainer.rank,
                                 trainer.epoch,
                                 trainer.step,
                                 node.phase,
                                 0,
                                 {},
                                 StateOf(trainer),
                                 HasOf(trainer)});
        beat.trainers.back().moved_bytes = node.moved_bytes;
      }
      controller_->OnUp(node.stream, beat);
    }
    if (controller_ != nullptr) {
      controller_->Tick();
    }
    Settle();
  }
}

void FakeWorld::Send(StreamId stream, DownMessage message) {
  for (auto& [id, node] : nodes_) {
    if (node.stream == stream) {
      if (!lose || !lose(node, message)) {
        node.inbox.push_back(std::move(message));
      }
      return;
    }
  }
}

void FakeWorld::Close(StreamId stream) {
  strand_.Post([this, stream] {
    for (auto& [id, node] : nodes_) {
      if (node.stream == stream && !node.inbox.empty() && !node.frozen) {
        Close(stream);  // after what was sent before
        return;
      }
      if (node.stream == stream) {
        Disconnect(node);
      }
    }
    if (controller_ != nullptr) {
      controller_->OnStreamClosed(stream);
    }
  });
}

void FakeWorld::SendUp(FakeNode& node, UpMessage message) {
  if (controller_ != nullptr && node.stream != 0) {
    controller_->OnUp(node.stream, message);
  } else if (node.alive) {
    node.unheard.push_back(std::move(message));
  }
}

void FakeWorld::Frame(FakeNode& node,
                      const FakeTrainer& trainer,
                      decltype(TrainerFrame::frame) frame) {
  SendUp(node,
         TrainerFrame{
             trainer.job_uid, trainer.epoch, trainer.attempt, trainer.rank, std::move(frame)});
}

void FakeWorld::Exit(FakeNode& node,
                     const FakeTrainer& trainer,
                     int32_t code,
                     int32_t signal,
                     const std::string& reason) {
  const FakeTrainer gone = trainer;
  node.trainers.erase({gone.job_uid, gone.epoch, gone.rank});
  SendUp(node,
         TrainerExited{
             gone.job_uid, gone.epoch, gone.attempt, gone.rank, code, signal, reason, "", ""});
}

void FakeWorld::Handle(FakeNode& node, const DownMessage& message) {
  node.term = std::max(node.term, message.term);
  node.heard_command = std::max(node.heard_command, message.command_id);
  if (const auto* welcome = std::get_if<Welcome>(&message.kind)) {
    for (const HeldTrainer& held : welcome->stop) {
      HandleStop(node, held.job_uid, held.epoch);
    }
  } else if (std::holds_alternative<Launch>(message.kind) && !node.refuses_with.empty()) {
    SendUp(node, CommandResult{message.command_id, false, "data: not found", node.refuses_with});
  } else if (const auto* launch = std::get_if<Launch>(&message.kind); launch && node.plans_wait) {
    for (const StartTrainer& start : launch->trainers) {
      node.launching.insert({launch->job_uid, launch->epoch, start.rank});
    }
  } else if (launch != nullptr) {
    HandleLaunch(node, *launch);
    SendUp(node, CommandResult{message.command_id, true, ""});
  } else if (const auto* command = std::get_if<TrainerCommand>(&message.kind)) {
    HandleCommand(node, *command);
  } else if (const auto* stop = std::get_if<StopTrainers>(&message.kind)) {
    HandleStop(node, stop->job_uid, stop->epoch);
  } else if (const auto* rejected = std::get_if<Rejected>(&message.kind)) {
    node.rejected = rejected->reason;
  }
}

void FakeWorld::SendReady(FakeNode& node, const FakeTrainer& trainer) {
  Frame(node,
        trainer,
        TrainerReady{.step = trainer.step,
                     .planned_bytes = 0,
                     .measured_bytes = 0,
                     .restore_seconds = 0,
                     .remarks = remarks[trainer.rank]});
}

void FakeWorld::HandleLaunch(FakeNode& node, const Launch& launch) {
  launches.push_back(launch);
  std::vector<StartTrainer> fresh;
  for (const StartTrainer& start : launch.trainers) {
    if (node.trainers.contains({launch.job_uid, launch.epoch, start.rank})) {
      continue;  // the order came twice
    }
    fresh.push_back(start);
    FakeTrainer trainer;
    trainer.job_uid = launch.job_uid;
    trainer.job_name = start.job_name;
    trainer.epoch = launch.epoch;
    trainer.attempt = launch.attempt;
    trainer.rank = start.rank;
    trainer.world_size = start.world_size;
    trainer.step = start.first_step;
    trainer.save_at_start = start.save_at_start;
    node.trainers[{trainer.job_uid, trainer.epoch, trainer.rank}] = trainer;
  }
  for (const StartTrainer& start : fresh) {
    if (node.exits_with != 0) {
      const FakeTrainer broken = node.trainers[{launch.job_uid, launch.epoch, start.rank}];
      Exit(node, broken, node.exits_with, 0, "");
      continue;
    }
    const FakeTrainer trainer = node.trainers[{launch.job_uid, launch.epoch, start.rank}];
    if (start.world_size == 1) {
      node.trainers[{launch.job_uid, launch.epoch, start.rank}].ready = true;
      SendReady(node, trainer);
    } else {
      const CommRecord record{"world", start.rank, absl::StrCat("record-", start.rank)};
      node.trainers[{launch.job_uid, launch.epoch, start.rank}].records.push_back(record);
      Frame(node, trainer, record);
    }
  }
}

void FakeWorld::HandleCommand(FakeNode& node, const TrainerCommand& command) {
  for (const auto& [key, copy] : std::map(node.trainers)) {
    if (copy.job_uid != command.job_uid || copy.epoch != command.epoch ||
        (command.rank >= 0 && command.rank != copy.rank)) {
      continue;
    }
    FakeTrainer& trainer = node.trainers[key];
    if (const auto* set = std::get_if<CommRecordSet>(&command.frame)) {
      EXPECT_EQ(static_cast<int64_t>(set->records.size()), trainer.world_size);
      trainer.groups.push_back(set->group);
      if (!std::exchange(trainer.ready, true)) {
        SendReady(node, FakeTrainer(trainer));
      }
    } else if (const auto* run = std::get_if<RunTrainer>(&command.frame)) {
      trainer.records.clear();
      trainer.until_step = std::max(trainer.until_step, run->until_step);
      if (!std::exchange(trainer.running, true) && trainer.save_at_start) {
        Seal(node, trainer, 1);
      }
    } else if (const auto* save = std::get_if<SaveTrainer>(&command.frame)) {
      trainer.sequence = save->sequence;
      trainer.then_stop = trainer.then_stop || save->then_stop;
    } else if (const auto* commit = std::get_if<CommitResult>(&command.frame)) {
      if (trainer.rank == 0) {
        commit_results.push_back(*commit);
      }
    } else if (std::holds_alternative<PeerLost>(command.frame)) {
      if (node.stops_trainers) {
        Exit(node, copy, 11, 0, "CommError");
      }
    }
  }
}

void FakeWorld::HandleStop(FakeNode& node, const std::string& job_uid, int64_t epoch) {
  for (const auto& [key, trainer] : std::map(node.trainers)) {
    if (trainer.job_uid == job_uid && trainer.epoch <= epoch && node.stops_trainers) {
      Exit(node, trainer, 10, 0, "Stopped");
    }
  }
}

void FakeWorld::Seal(FakeNode& node, FakeTrainer& trainer, int64_t attempt) {
  ckpt::Seal seal;
  seal.step = trainer.step;
  seal.epoch = trainer.epoch;
  seal.attempt = attempt;
  seal.writer = trainer.rank;
  seal.sequence = trainer.sequence;
  trainer.served_sequence = trainer.sequence;
  const FakeTrainer sealed = trainer;
  Frame(node, sealed, SaveStarted{sealed.step, sealed.sequence});
  if (!no_seals.contains(sealed.rank)) {
    Frame(node, sealed, seal);
  }
}

bool FakeWorld::EpochIsComplete(const FakeTrainer& sample) const {
  int64_t running = 0;
  for (const auto& [id, node] : nodes_) {
    for (const auto& [key, trainer] : node.trainers) {
      const bool member = trainer.job_uid == sample.job_uid && trainer.epoch == sample.epoch;
      running += member && trainer.running && !node.frozen ? 1 : 0;
    }
  }
  return running == sample.world_size;
}

void FakeWorld::StepRank(FakeNode& node, FakeTrainer trainer, const plan::JobSpec& spec) {
  trainer.step += 1;
  const int64_t every = spec.checkpoint.every_steps;
  const bool last = trainer.step == spec.steps;
  const bool asked = trainer.sequence > trainer.served_sequence;
  const bool due = last || asked || (every > 0 && trainer.step % every == 0);
  const std::tuple<std::string, int64_t, int64_t> key{trainer.job_uid, trainer.epoch, trainer.rank};
  node.trainers[key] = trainer;
  if (trainer.rank == 0) {
    StepReport report;
    report.step = trainer.step;
    report.loss = 1.0F / static_cast<float>(trainer.step);
    report.tokens = 100;
    report.step_seconds = 0.5;
    report.time_ms = clock.WallMs();
    Frame(node, trainer, report);
  }
  if (due && node.trainers.contains(key)) {
    Seal(node, node.trainers[key], 1);
  }
  if (!node.trainers.contains(key)) {
    return;
  }
  if (last) {
    Frame(node, trainer, TrainerDone{trainer.step});
    Exit(node, trainer, 0, 0, "Done");
  } else if (asked && trainer.then_stop) {
    Exit(node, trainer, 10, 0, "Stopped");
  }
}

void FakeWorld::TrainStep() {
  std::vector<std::pair<std::string, FakeTrainer>> ranks;  // node and trainer
  for (const auto& [id, node] : nodes_) {
    for (const auto& [key, trainer] : node.trainers) {
      if (!node.frozen && trainer.step < trainer.until_step && EpochIsComplete(trainer)) {
        ranks.emplace_back(id, trainer);
      }
    }
  }
  for (const auto& [id, trainer] : ranks) {
    StepRank(nodes_.at(id), trainer, specs_[trainer.job_name]);
  }
  Settle();
}

void FakeWorld::TrainSteps(int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    TrainStep();
    Advance(40);
  }
}

plan::JobSpec FakeWorld::Spec(const std::string& name,
                              std::vector<int64_t> sizes,
                              int64_t steps) const {
  plan::JobSpec spec;
  spec.name = name;
  spec.steps = steps;
  spec.device_count = sizes.back();
  spec.elastic.sizes = std::move(sizes);
  spec.elastic.grow_delay_ms = 0;
  spec.elastic.grow_every_ms = 0;
  spec.checkpoint.every_steps = 5;
  spec.checkpoint.every_ms = 0;
  spec.detection_ms = 1000;
  spec.restart.max_no_progress = 5;
  return spec;
}

SubmitDraft FakeWorld::Draft(const plan::JobSpec& spec, const std::string& request_id) {
  SubmitDraft draft;
  draft.request_id = request_id;
  draft.hash = "hash of " + spec.name;
  draft.record.namespace_name = "default";
  draft.record.name = spec.name;
  draft.record.planned = planner.EncodeSpec(spec);
  draft.record.spec = spec;
  specs_[spec.name] = spec;
  return draft;
}

absl::StatusOr<JobView> FakeWorld::Submit(const plan::JobSpec& spec) {
  absl::StatusOr<JobView> view = Submit(Draft(spec, absl::StrCat("request-", ++requests_)));
  Advance(40);
  return view;
}

JobView FakeWorld::Job(const std::string& name) {
  absl::StatusOr<JobView> view = controller_->Get({"default", name});
  CHECK(view.ok());
  return *view;
}

std::vector<JobEventRecord> FakeWorld::Events(const std::string& name) {
  const auto events = store_->Events(Job(name).record.uid, 0, 10'000);
  CHECK(events.ok());
  return *events;
}

std::vector<std::string> FakeWorld::EventTypes(const std::string& name) {
  std::vector<std::string> types;
  for (const JobEventRecord& event : Events(name)) {
    types.push_back(event.type);
  }
  return types;
}

std::vector<StepRecord> FakeWorld::History(const std::string& name) {
  return SurvivingHistory(*metrics_->Read(Job(name).record.uid));
}

}  // namespace ravel::coordinator
