#pragma once

// Runs of a job for six steps that save after three, and runs that go on from there.

#include <cstdint>
#include <string>

#include "common/ckpt/manifest.h"
#include "tests/testing/fake_supervisor.h"

namespace ravel::trainer {

inline constexpr int64_t kResumeStep = 3;
inline constexpr int64_t kResumeSteps = 6;

// Every run has an epoch and a store of its own below the folder. Used from one thread.
class ResumeRuns {
 public:
  explicit ResumeRuns(std::string folder) : folder_(std::move(folder)) {}
  // All six steps; evaluates nothing.
  EpochArgs Whole(const plan::JobSpec& spec, int ranks);
  // What a run of `args` does after the save of `from`: the last three steps.
  static EpochArgs From(const EpochOutcome& from, EpochArgs args);
  // The same, but it saves, as step 0, what it has read, before it goes on.
  static EpochArgs ReadBack(const EpochOutcome& from, EpochArgs args);

 private:
  const std::string folder_;
  int64_t epoch_ = 0;
};

// Expects every rank to succeed, and every save to be committed.
EpochOutcome RunWell(const EpochArgs& args);
ckpt::Manifest ManifestOf(const std::string& step_directory);
// Expects every block, digest and header of a committed step to be good.
void ExpectVerifies(const std::string& step_directory);
// Expects the last three losses, and the state at the end, of the uninterrupted run, in every bit;
// that includes the codes and scales of quantized weights.
void ExpectSameEnd(const EpochOutcome& resumed, const EpochOutcome& whole);
// The same of the state that was read back.
void ExpectSameStart(const EpochOutcome& read, const EpochOutcome& whole);

}  // namespace ravel::trainer
