#pragma once

// The life of one rank: communicator, state, steps, saves, end.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "worker/comm/communicator.h"
#include "worker/trainer/command_box.h"
#include "worker/trainer/position.h"
#include "worker/trainer/rank_engine.h"
#include "worker/trainer/saver.h"
#include "worker/trainer/step_diagnostics.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// More skipped steps in a row than this end the job: it diverged. Steps that lower a loss scale do
// not count.
inline constexpr int64_t kMostSkippedInARow = 10;

// Used only from the step thread.
class Trainer {
 public:
  // All outlive the trainer.
  struct Parts {
    const Assignment& assignment;
    Reporter& reporter;
    CommandBox& box;
    Position& position;
    const Clock& clock;
    // Told of the communicator when it exists, and nullptr before it goes.
    std::function<void(comm::Communicator*)> communicator_changed;
    // Called after each step.
    std::function<void()> beat;
    // Ends the process for an error of issued work of the device; without it a CHECK does.
    std::function<void(const absl::Status&)> device_failed = nullptr;
  };
  explicit Trainer(Parts parts) : parts_(std::move(parts)) {}

  // OK: all steps are done and reported. Errors are marked with the exit code (exit_code.h);
  // kStopped is one of them.
  absl::Status Run();

 private:
  // The GPU of the assignment; nullptr for a job on CPUs.
  absl::StatusOr<std::unique_ptr<kernels::CudaGpu>> OpenGpu();
  absl::StatusOr<std::unique_ptr<comm::Communicator>> Connect(kernels::CudaGpu* gpu);
  // The choice of a device's gemms; nothing for a job on CPUs.
  absl::StatusOr<std::optional<GemmOptions>> Gemms() const;
  absl::Status RunWith(comm::Communicator& communicator, kernels::CudaGpu* gpu);
  absl::Status TrainAll(RankEngine& engine, Saver& saver, StepDiagnostics& diagnostics);
  // A step whose result is known.
  struct Finished {
    StepResult result;
    std::string skip_reason;  // what was not finite
  };
  // Reads results, oldest first, until `unread` are left: evaluation and report of each.
  absl::Status ReadSteps(RankEngine& engine,
                         StepDiagnostics& diagnostics,
                         int64_t unread,
                         std::vector<Finished>& finished);
  absl::Status FinishStep(RankEngine& engine, const StepResult& result, double seconds);
  bool EvaluationDue(const RankEngine& engine, int64_t finished_steps) const;
  // Returns the agreement that takes effect after `finished_steps`: that of the last of these
  // steps, or of one step earlier where results lag, so that ranks act alike whenever they read.
  optim::ControlWord AgreedFor(const RankEngine& engine, int64_t finished_steps);
  absl::Status Stop(Saver& saver, StepDiagnostics& diagnostics);
  absl::Status Report(const RankEngine& engine, StepReport record);
  // `reason`: what was not finite.
  absl::Status CountSkips(const StepResult& result, const std::string& reason);

  const Parts parts_;
  int64_t skipped_in_a_row_ = 0;
  std::chrono::steady_clock::time_point step_began_;  // or the result before it was known
  std::map<int64_t, optim::ControlWord> agreed_;      // by finished steps
};

}  // namespace ravel::trainer
