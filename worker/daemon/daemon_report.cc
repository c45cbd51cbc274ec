// Daemon: what this node says of itself and its trainers, in hellos and beats. Launches that are
// not trainers yet are told, too: a job whose data is being fetched makes progress.

#include <map>
#include <utility>

#include "common/version.h"
#include "worker/daemon/daemon.h"

namespace ravel::daemon {
namespace {

constexpr char kFetchingPhase[] = "fetching_data";  // as a trainer's phase

}  // namespace

v1::Hello Daemon::MakeHello() const {
  v1::Hello hello;
  hello.set_node_id(options_.node_id);
  hello.set_incarnation(incarnation_);
  hello.set_protocol(kFleetProtocols.newest);
  hello.set_oldest_protocol(kFleetProtocols.oldest);
  hello.set_data_address(options_.data_address);
  hello.set_host_id(options_.facts.host_id);
  hello.set_cpu_isa(options_.facts.cpu_isa);
  hello.set_version(options_.version);
  hello.set_device_message(options_.facts.device_message);
  hello.set_work_lock(options_.work_lock);
  hello.set_draining(stopping_);
  for (const auto& [name, network] : options_.launch_rules.networks) {
    hello.add_networks(name);
  }
  for (const DeviceFacts& facts : options_.facts.devices) {
    v1::Device& device = *hello.add_devices();
    device.set_kind(facts.kind);
    device.set_model(facts.model);
    device.set_memory_bytes(facts.memory_bytes);
    device.set_uuid(facts.uuid);
  }
  std::map<RankKey, v1::HeldTrainer> held;
  for (const TrainerProcess* trainer : supervisor_->trainers()) {
    const TrainerIdentity& identity = trainer->identity();
    v1::HeldTrainer& entry = held[{identity.job_uid, identity.epoch, identity.rank}];
    FillIdentity(identity, entry);
    entry.set_step(trainer->progress().step);
    entry.set_state(trainer->progress().state);
    *entry.mutable_has() = trainer->progress().has;
  }
  for (const auto& [key, identity] : launching_) {
    v1::HeldTrainer& entry = held[key];
    FillIdentity(identity, entry);
    entry.set_state("launching");
    entry.mutable_has()->set_until_step(-1);
  }
  for (const v1::TrainerExited& exited : fleet_->UnacknowledgedExits()) {
    v1::HeldTrainer& entry = held[{exited.job_uid(), exited.epoch(), exited.rank()}];
    FillIdentity({exited.job_uid(), exited.epoch(), exited.attempt(), exited.rank()}, entry);
    entry.set_state("ended");
  }
  for (const KeptSeal& kept : seals_) {
    v1::HeldTrainer& entry = held[{kept.identity.job_uid, kept.identity.epoch, kept.identity.rank}];
    if (entry.state().empty()) {
      FillIdentity(kept.identity, entry);
      entry.set_state("exited");
    }
    *entry.add_unacknowledged_seals() = kept.seal;
  }
  for (auto& [key, entry] : held) {
    *hello.add_trainers() = std::move(entry);
  }
  return hello;
}

std::vector<v1::TrainerBeat> Daemon::MakeBeat() const {
  std::vector<v1::TrainerBeat> beats;
  for (const TrainerProcess* trainer : supervisor_->trainers()) {
    v1::TrainerBeat& beat = beats.emplace_back();
    beat.set_job_uid(trainer->identity().job_uid);
    beat.set_rank(trainer->identity().rank);
    beat.set_epoch(trainer->identity().epoch);
    *beat.mutable_progress() = trainer->progress().progress;
    beat.set_state(trainer->progress().state);
    *beat.mutable_has() = trainer->progress().has;
    if (beat.has().until_step() >= 0) {
      beat.mutable_has()->clear_groups();
    }
  }
  for (const auto& [key, identity] : launching_) {
    v1::TrainerBeat& beat = beats.emplace_back();
    beat.set_job_uid(identity.job_uid);
    beat.set_rank(identity.rank);
    beat.set_epoch(identity.epoch);
    beat.set_state("launching");
    beat.mutable_has()->set_until_step(-1);
    const int64_t moved_bytes = data_->MovedBytes(identity.job_uid);
    if (moved_bytes >= 0) {
      beat.mutable_progress()->set_phase(kFetchingPhase);
      beat.mutable_progress()->set_moved_bytes(moved_bytes);
    }
  }
  return beats;
}

}  // namespace ravel::daemon
