#include "tests/gpu/offload_runs.h"

#include <cstdlib>
#include <optional>

#include <gtest/gtest.h>

#include "common/mutex.h"

namespace ravel::trainer {
namespace {

// Makes the loss of one step NaN, on the rank that holds the first weight.
class PoisonedWeight {
 public:
  static absl::StatusOr<PoisonedWeight> Put(RankEngine& engine) {
    PoisonedWeight poisoned(engine);
    const shard::ParameterGroup& embed = engine.groups()[plan::GroupId(0)];
    if (!embed.pieces().empty() && embed.pieces()[0].range.begin == 0) {
      poisoned.at_ = embed.model_weight();
      poisoned.kept_.resize(64 * sizeof(float));
      RETURN_IF_ERROR(engine.memory().Read(poisoned.at_, poisoned.kept_));
      const std::vector<std::byte> nan(poisoned.kept_.size(), std::byte{0xff});
      RETURN_IF_ERROR(engine.memory().Write(nan, poisoned.at_));
    }
    return poisoned;
  }
  absl::Status Undo() {
    return at_ == nullptr ? absl::OkStatus() : engine_->memory().Write(kept_, at_);
  }

 private:
  explicit PoisonedWeight(RankEngine& engine) : engine_(&engine) {}

  RankEngine* engine_;
  std::byte* at_ = nullptr;
  std::vector<std::byte> kept_;
};

}  // namespace

bool EveryCase() {
  return std::getenv("RAVEL_EVERY_CASE") != nullptr;
}

CountedRun RunCounted(kernels::CudaGpu& gpu, const RecordArgs& args) {
  CountedRun run;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    run.chunks = engine.host_updater() == nullptr ? 0 : engine.host_updater()->chunk_count();
    for (int64_t step = 0; step < args.last_step; ++step) {
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
      run.recording.steps.push_back(result);
      if (engine.host_updater() != nullptr) {
        std::byte one = {};  // read when all is done
        RETURN_IF_ERROR(engine.memory().Read(engine.offloaded().data(), {&one, 1}));
        run.counts.push_back(engine.host_updater()->TakeCounts());
      }
    }
    run.recording.updates = engine.updates();
    return AddState(engine, run.recording);
  };
  EXPECT_EQ(RunLocalRanks({.spec = args.spec,
                           .ranks = args.ranks,
                           .body = body,
                           .adjust = args.adjust,
                           .options = args.options,
                           .gpu = &gpu}),
            absl::OkStatus());
  return run;
}

Recording WithASkippedStep(kernels::CudaGpu& gpu, const RecordArgs& args) {
  Recording recording;
  Mutex mutex;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 5; ++step) {
      std::vector<std::byte> before(engine.offloaded().size());
      std::optional<PoisonedWeight> poison;
      if (step == 3) {
        ASSIGN_OR_RETURN(poison, PoisonedWeight::Put(engine));
        RETURN_IF_ERROR(engine.memory().Read(engine.offloaded().data(), before));
      }
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
      EXPECT_EQ(result.skipped, step == 3);
      if (step == 3) {
        std::vector<std::byte> after(before.size());
        RETURN_IF_ERROR(engine.memory().Read(engine.offloaded().data(), after));
        EXPECT_EQ(before, after);
        RETURN_IF_ERROR(poison->Undo());
      } else if (rank == 0) {
        recording.steps.push_back(result);
      }
    }
    EXPECT_EQ(engine.updates(), 4);
    MutexLock lock(mutex);
    return AddState(engine, recording);
  };
  EXPECT_EQ(RunOn(gpu, args, body), absl::OkStatus());
  return recording;
}

}  // namespace ravel::trainer
