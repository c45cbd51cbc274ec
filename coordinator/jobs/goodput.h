#pragma once

// Tells where the time of a job's devices went: a pure ledger. Each second of each device that the
// job holds is in one entry of it, so that the entries sum to the time held. Time comes in as a
// number; nothing is asked of the world.

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator/store/job_store.h"

namespace ravel::coordinator {

// In metrics and on disk by name: never renamed.
enum class DeviceTime {
  kProductive,       // steps of the surviving history
  kReplay,           // steps that a restart or a rollback threw away
  kSkippedStep,      // steps whose update was left out
  kEvaluation,       // on validation data
  kCheckpointStall,  // training stood still for a save; the final save
  kIdle,             // between steps: no horizon, or the host was busy
  kDetect,           // from the last finished step until a failure was noticed
  kDrain,            // from the order to stop until the last trainer was gone
  kReshape,          // from the last step before a change of size until the last trainer was gone
  kStart,    // from the placement until all ranks were ready: plan, processes, communicators
  kRestore,  // the part of it in which ranks read their state
};
inline constexpr size_t kDeviceTimes = 11;
std::string_view DeviceTimeName(DeviceTime time);

// Uses of a job's devices. On disk: do not renumber.
enum class DeviceUse {
  kNone = 0,       // it holds none
  kStarting = 1,   // placed, not all ranks are ready
  kTraining = 2,   // takes steps
  kReshaping = 3,  // takes its last steps of this size
  kFinishing = 4,  // took its last step
  kDraining = 5,   // broken, and not all trainers are gone
  kStopping = 6,   // cancelled, and not all trainers are gone
};

// A step that rank 0 reported.
struct TrainedStep {
  int64_t step = 0;
  double seconds = 0;
  bool skipped = false;
  bool evaluated = false;
  int64_t time_ms = 0;  // by the clock of rank 0's host
};

// Used only from the controller's strand.
class Goodput {
 public:
  using Times = std::array<int64_t, kDeviceTimes>;  // device-microseconds

  // What was until now belongs to the use and the devices of the call before. `now_ms` is
  // monotonic.
  void Observe(int64_t now_ms, int64_t devices, DeviceUse use);
  // The next epoch begins from this step (-1: from initial weights): what was trained above it is
  // replayed.
  void Restart(int64_t step);
  // All ranks are ready, after they read their state for so long. `wall_ms`: now.
  void Ready(double restore_seconds, int64_t wall_ms);
  // After Observe. Steps rise; one that was reported before changes nothing.
  void Report(const TrainedStep& step);
  // A save of this step has begun.
  void NoteSave(int64_t step) { save_step_ = step; }

  // Device time that is accounted for, which the entries sum to. What the present use takes is
  // added when it is known what it was: at the end of the step, or of the start.
  int64_t accounted_us() const { return held_us_ - pending_us_; }
  const Times& times() const { return times_; }
  int64_t devices() const { return devices_; }
  // Part of the accounted time that was productive; -1: none was held yet.
  double Ratio() const;

  // For the store, and back: `wall_ms` is now, in a new process. The devices went on with `use`
  // while no coordinator was there; kNone: they are not held any more.
  GoodputRow Row(const std::string& job_uid, int64_t wall_ms) const;
  void Load(const GoodputRow& row, int64_t now_ms, int64_t wall_ms, DeviceUse use);

 private:
  // Up to that step, by the curve.
  int64_t ProductiveAt(int64_t step) const;
  void Add(DeviceTime time, int64_t device_us) { times_[static_cast<size_t>(time)] += device_us; }
  // What was pending is known now.
  void Settle(DeviceTime time);

  Times times_ = {};
  int64_t held_us_ = 0;
  int64_t pending_us_ = 0;  // held, and not in an entry yet
  int64_t since_ms_ = 0;    // monotonic: accounted until then; 0: never observed
  int64_t devices_ = 0;
  DeviceUse use_ = DeviceUse::kNone;
  int64_t last_step_ = -1;    // the newest that was reported or restored
  int64_t last_time_ms_ = 0;  // of that report, or of Ready
  int64_t save_step_ = -1;    // of the newest save
  // Productive time by step: rising in both, straight between its points.
  std::vector<std::pair<int64_t, int64_t>> curve_;
};

}  // namespace ravel::coordinator
