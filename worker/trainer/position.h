#pragma once

// The position of the step thread, for readers on other threads.

#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace ravel::trainer {

enum class TrainerPhase : int {
  kStarting,
  kRestoring,
  kWaiting,
  kTraining,
  kEvaluating,
  kSaving,
  kEnding
};

constexpr const char* PhaseText(TrainerPhase phase) {
  switch (phase) {
    case TrainerPhase::kStarting:
      return "starting";
    case TrainerPhase::kRestoring:
      return "restoring";
    case TrainerPhase::kWaiting:
      return "waiting";
    case TrainerPhase::kTraining:
      return "training";
    case TrainerPhase::kEvaluating:
      return "evaluating";
    case TrainerPhase::kSaving:
      return "saving";
    case TrainerPhase::kEnding:
      return "ending";
  }
  return "";
}

// Thread-safe: written by the step thread, read by the watchdog. `clock` outlives it.
class Position {
 public:
  explicit Position(const Clock& clock) : clock_(clock), since_ms_(clock.MonotonicMs()) {}

  void Enter(TrainerPhase phase) {
    phase_.store(phase);
    since_ms_.store(clock_.MonotonicMs());
  }
  void FinishStep(int64_t step) {
    step_.store(step);
    since_ms_.store(clock_.MonotonicMs());
  }
  // Bytes of the state that is being restored, so far.
  void Move(int64_t bytes) { moved_bytes_.store(bytes); }
  int64_t moved_bytes() const { return moved_bytes_.load(); }
  TrainerPhase phase() const { return phase_.load(); }
  int64_t step() const { return step_.load(); }
  int64_t phase_age_ms() const { return clock_.MonotonicMs() - since_ms_.load(); }

 private:
  const Clock& clock_;
  std::atomic<TrainerPhase> phase_ = TrainerPhase::kStarting;
  std::atomic<int64_t> step_ = 0;
  std::atomic<int64_t> since_ms_;
  std::atomic<int64_t> moved_bytes_ = 0;
};

}  // namespace ravel::trainer
