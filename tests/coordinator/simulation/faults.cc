// What goes wrong in a simulation, and its end.

#include <iterator>

#include "tests/coordinator/simulation/world.h"

namespace ravel::coordinator::simulation {

Daemon& World::AnyDaemon() {
  return *std::next(daemons_.begin(), random_.Between(0, settings_.nodes - 1))->second;
}

void World::FaultLater() {
  if (settings_.faults.empty()) {
    return;
  }
  events_.At(random_.Between(0, 2 * settings_.fault_every_ms * 1000), [this] {
    if (!healed_) {
      ++faults_done_;
      Inject(random_.Pick(settings_.faults));
      FaultLater();
    }
  });
}

void World::Inject(Fault fault) {
  Trace("FAULT ", FaultName(fault));
  switch (fault) {
    case Fault::kStreamBreak:
    case Fault::kHalfOpen:
    case Fault::kBlackHole:
    case Fault::kPartition:
      InjectStream(fault);
      break;
    case Fault::kFreezeNode:
    case Fault::kKillDaemon:
    case Fault::kPowerLoss:
    case Fault::kDrain:
      InjectNode(fault);
      break;
    case Fault::kKillTrainer:
    case Fault::kHangTrainer:
      InjectTrainer(fault);
      break;
    case Fault::kFreezeCoordinator:
    case Fault::kKillCoordinator:
    case Fault::kCrashAtWrite:
    case Fault::kDiskFull:
    case Fault::kDiskError:
    case Fault::kWallClock:
      InjectCoordinator(fault);
      break;
    case Fault::kStoreDown:
    case Fault::kStoreSlow:
    case Fault::kCorruptStep:
      InjectStore(fault);
      break;
  }
}

void World::InjectStream(Fault fault) {
  Daemon& daemon = AnyDaemon();
  Trace("  on ", daemon.id());
  if (fault == Fault::kPartition) {
    const int64_t way = random_.Between(1, 3);
    network_.Partition(
        daemon.id(), (way & 1) != 0, (way & 2) != 0, random_.Between(100'000, 15'000'000));
  } else if (daemon.stream() == 0) {
    return;
  } else if (fault == Fault::kStreamBreak) {
    network_.Break(daemon.stream(), random_.Between(0, 5000));
  } else if (fault == Fault::kHalfOpen) {
    network_.Break(daemon.stream(), random_.Between(0, 20'000'000));
  } else {
    const int64_t way = random_.Between(1, 3);
    if ((way & 1) != 0) {
      network_.SwallowUp(daemon.stream());
    }
    if ((way & 2) != 0) {
      network_.SwallowDown(daemon.stream());
    }
  }
}

void World::RestartLater(Daemon& daemon) {
  events_.At(random_.Between(100'000, 10'000'000), [this, &daemon] {
    if (!daemon.alive()) {
      daemon.Start();
    } else if (daemon.draining()) {
      RestartLater(daemon);
    }
  });
}

void World::InjectNode(Fault fault) {
  Daemon& daemon = AnyDaemon();
  if (!daemon.alive()) {
    return;
  }
  Trace("  on ", daemon.id());
  if (fault == Fault::kFreezeNode) {
    daemon.Freeze(random_.Between(50'000, 12'000'000));
    return;
  }
  reports_may_be_lost_ = true;
  if (fault == Fault::kDrain) {
    daemon.Drain();
  } else {
    daemon.Kill(fault == Fault::kKillDaemon);
  }
  RestartLater(daemon);
}

void World::InjectTrainer(Fault fault) {
  for (int attempt = 0; attempt < 8; ++attempt) {
    Daemon& daemon = AnyDaemon();
    if (daemon.trainers().empty()) {
      continue;
    }
    const int64_t which = random_.Between(0, static_cast<int64_t>(daemon.trainers().size()) - 1);
    const Daemon::Key key = std::next(daemon.trainers().begin(), which)->first;
    Trace("  on ", daemon.id(), ", rank ", std::get<2>(key));
    if (fault == Fault::kKillTrainer) {
      daemon.KillTrainer(key, 0, 9, "");
    } else {
      daemon.HangTrainer(key);
    }
    return;
  }
}

void World::InjectCoordinator(Fault fault) {
  const int64_t for_us = random_.Between(100'000, 5'000'000);
  if (fault == Fault::kFreezeCoordinator) {
    frozen_until_us_ = events_.now_us() + for_us;
  } else if (fault == Fault::kKillCoordinator) {
    KillCoordinator("SIGKILL");
  } else if (fault == Fault::kCrashAtWrite) {
    const double rate = random_.Chance(0.5) ? 0.3 : 0.05;
    (random_.Chance(0.5) ? disk_weather_.crash_before_rate : disk_weather_.crash_after_rate) = rate;
    checkpoints_.weather.crash_rate = random_.Chance(0.5) ? rate : 0;
    events_.At(for_us, [this] {
      disk_weather_.crash_before_rate = disk_weather_.crash_after_rate = 0;
      checkpoints_.weather.crash_rate = 0;
    });
  } else if (fault == Fault::kDiskFull) {
    disk_weather_.full = true;
    events_.At(for_us, [this] { disk_weather_.full = false; });
  } else if (fault == Fault::kDiskError) {
    disk_weather_.error_rate = 0.5;
    events_.At(for_us, [this] { disk_weather_.error_rate = 0; });
  } else {
    events_.StepWallClock(random_.Between(-30'000, 30'000));
  }
}

void World::InjectStore(Fault fault) {
  const int64_t for_us = random_.Between(100'000, 10'000'000);
  if (fault == Fault::kStoreDown) {
    checkpoints_.weather.down = true;
    events_.At(for_us, [this] { checkpoints_.weather.down = false; });
  } else if (fault == Fault::kStoreSlow) {
    checkpoints_.weather.write_us = random_.Between(1'000'000, 8'000'000);
    events_.At(for_us, [this] { checkpoints_.weather.write_us = StoreWeather().write_us; });
  } else if (!clients_.empty()) {
    checkpoints_.CorruptNewest(absl::StrCat("/ckpt/", random_.Pick(clients_).spec.name));
  }
}

// From here on nothing fails any more: all that is broken comes back.
void World::Heal() {
  Trace("HEALED");
  healed_ = true;
  disk_weather_ = DiskWeather();
  checkpoints_.weather = StoreWeather();
  network_.Heal();
  network_.set_repeats(false);
  frozen_until_us_ = 0;
  for (auto& [id, daemon] : daemons_) {
    daemon->Thaw();
    if (!daemon->alive()) {
      RestartLater(*daemon);
    }
  }
  ReleaseNodes();
}

// The operator: what was quarantined for the faults is repaired.
void World::ReleaseNodes() {
  if (controller_ != nullptr) {
    CoordinatorDo([this] {
      for (const auto& [id, daemon] : daemons_) {
        controller_->HoldNode(
            id, NodeHold::kQuarantined, true, "repaired", [](const absl::StatusOr<NodeView>&) {});
      }
    });
  }
  events_.At(10'000'000, [this] { ReleaseNodes(); });
}

}  // namespace ravel::coordinator::simulation
