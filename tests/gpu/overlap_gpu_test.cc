// Counts what of a step's communication runs beside its computation, from the device's own times:
// all gathers but the first of the step, all reduces but the last.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/trace.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"

namespace ravel::trainer {
namespace {

constexpr int kOverlapRanks = 2;
constexpr int64_t kTracedSteps = 4;
constexpr char kPace[] = "RAVEL_EMULATED_PACE_MICROSECONDS";

// One lane per rank, one micro-batch. Units of an emulated device are small, and take the time that
// it is told to take; those of a real one are large enough that their gemms take longer than
// their gathers.
plan::JobSpec OverlapJob(bool emulated) {
  plan::JobSpec spec = JobOf(
      {.strategy = "ZeRO3"}, "odd_untied", absl::StrCat(::testing::TempDir(), "/ravel_overlap"));
  spec.determinism = plan::DeterminismMode::kFast;
  spec.virtual_ranks = kOverlapRanks;
  spec.global_batch = kOverlapRanks;
  spec.model->num_hidden_layers = 6;
  if (!emulated) {
    spec.model->hidden_size = 1024;
    spec.model->intermediate_size = 2816;
    spec.model->num_attention_heads = 8;
    spec.model->num_key_value_heads = 8;
    spec.model->head_dim = 128;
    spec.model->max_position_embeddings = 1024;
    spec.data.sequence_length = 1024;
  }
  return spec;
}

absl::Status CopyGathers(plan::ShardingPlan& plan) {
  plan.options.gather_in_place = false;
  return plan::PlanPrograms(plan);
}

// By step of kTracedSteps, and rank.
using Overlaps = std::vector<std::vector<trace::StepOverlap>>;

absl::StatusOr<Overlaps> TraceSteps(kernels::CudaGpu& gpu, const plan::JobSpec& spec) {
  std::vector<trace::Recorder> recorders(kOverlapRanks);
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    trace::Recorder& recorder = recorders[static_cast<size_t>(rank)];
    engine.executor().set_recorder(&recorder);
    for (int64_t step = 1; step <= kTracedSteps; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      RETURN_IF_ERROR(engine.executor().CollectTrace(recorder));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(RunLocalRanks(
      {.spec = spec, .ranks = kOverlapRanks, .body = body, .adjust = CopyGathers, .gpu = &gpu}));
  Overlaps overlaps(kTracedSteps);
  for (int rank = 0; rank < kOverlapRanks; ++rank) {
    const json::Value document =
        trace::ToChromeTrace({.rank = rank}, recorders[static_cast<size_t>(rank)].Take());
    if (const auto gantt = trace::TextGantt(document, -1, 150); gantt.ok()) {
      std::printf("%s", gantt->c_str());
    }
    for (int64_t step = 0; step < kTracedSteps; ++step) {
      for (const trace::StepOverlap& of_rank : trace::CountOverlaps(document, step + 2)) {
        overlaps[static_cast<size_t>(step)].push_back(of_rank);
      }
    }
  }
  return overlaps;
}

void Print(const trace::StepOverlap& overlap) {
  std::printf(
      "rank %d: %d of %d gathers and %d of %d reduces hidden, %.3f ms (%.1f%%) exposed, "
      "at most %.1f us to issue a pass\n",
      static_cast<int>(overlap.rank),
      static_cast<int>(overlap.hidden_gathers),
      static_cast<int>(overlap.gathers),
      static_cast<int>(overlap.hidden_reduces),
      static_cast<int>(overlap.reduces),
      overlap.exposed_seconds * 1e3,
      overlap.exposed_share * 100,
      overlap.longest_issue_seconds * 1e6);
}

// In one of the traced steps at least: a busy host may be late with a gather.
// `turns`: reduces that may be exposed, the last one of each.
void ExpectAllHidden(const Overlaps& overlaps, int64_t least_gathers, int64_t turns = 1) {
  std::vector<bool> all_hidden(kOverlapRanks, false);
  for (const std::vector<trace::StepOverlap>& ranks : overlaps) {
    ASSERT_EQ(ranks.size(), all_hidden.size());
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const trace::StepOverlap& overlap = ranks[rank];
      EXPECT_GT(overlap.gathers, least_gathers);
      EXPECT_GE(overlap.reduces, 8);
      Print(overlap);
      all_hidden[rank] = all_hidden[rank] || (overlap.hidden_gathers == overlap.gathers - 1 &&
                                              overlap.hidden_reduces >= overlap.reduces - turns);
    }
  }
  EXPECT_THAT(all_hidden, ::testing::Each(true));
}

class GpuOverlap : public GpuEngine {
 protected:
  void SetUp() override {
    GpuEngine::SetUp();
    if (!IsSkipped() && emulated() && std::getenv(kPace) == nullptr) {
      GTEST_SKIP() << "an emulated device without " << kPace << " has no times to compare";
    }
  }
  Overlaps Trace(const plan::JobSpec& spec) {
    auto overlaps = TraceSteps(gpu(), spec);
    EXPECT_TRUE(overlaps.ok()) << overlaps.status();
    return overlaps.ok() ? *std::move(overlaps) : Overlaps(kTracedSteps);
  }
};

TEST_F(GpuOverlap, AllGathersButTheFirstAndAllReducesButTheLastAreHidden) {
  ExpectAllHidden(Trace(OverlapJob(emulated())), 8);
}

// The first gather of a later turn is hidden. The last reduce of a turn runs beside the next one's
// embedding, but its memory is that of the first layer's activations, which therefore waits.
TEST_F(GpuOverlap, LaterTurnsExposeNoGather) {
  plan::JobSpec spec = OverlapJob(emulated());
  spec.virtual_ranks = 2 * kOverlapRanks;
  spec.global_batch = spec.virtual_ranks;
  ExpectAllHidden(Trace(spec), 16, 2);
}

// Each rank's step begins its first gather before the step ahead of it has updated all units.
TEST_F(GpuOverlap, TheFirstGatherOfAStepRunsBesideUpdates) {
  std::vector<trace::Recorder> recorders(kOverlapRanks);
  std::vector<int64_t> early(kOverlapRanks, 0);  // nanoseconds
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    trace::Recorder& recorder = recorders[static_cast<size_t>(rank)];
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    engine.executor().set_recorder(&recorder);
    RETURN_IF_ERROR(engine.IssueStep(1));
    RETURN_IF_ERROR(engine.IssueStep(2));
    RETURN_IF_ERROR(engine.ReadStep().status());
    RETURN_IF_ERROR(engine.ReadStep().status());
    RETURN_IF_ERROR(engine.executor().CollectTrace(recorder));
    int64_t gather = std::numeric_limits<int64_t>::max();
    int64_t update = 0;
    for (const trace::Event& event : recorder.Take()) {
      if (event.op == "Gather" && event.step == 3) {
        gather = std::min(gather, event.begin_ns);
      } else if (event.op == "OptimizerStep" && event.step == 2) {
        update = std::max(update, event.end_ns);
      }
    }
    early[static_cast<size_t>(rank)] = update - gather;
    return absl::OkStatus();
  };
  ASSERT_EQ(RunLocalRanks({.spec = OverlapJob(emulated()),
                           .ranks = kOverlapRanks,
                           .body = body,
                           .adjust = CopyGathers,
                           .gpu = &gpu()}),
            absl::OkStatus());
  EXPECT_THAT(early, ::testing::Each(::testing::Gt(0)));
}

// With room for one unit nothing can be fetched ahead.
TEST_F(GpuOverlap, WindowsOfOneUnitHideNoGather) {
  plan::JobSpec spec = OverlapJob(emulated());
  spec.gather_window_bytes = 1;
  for (const std::vector<trace::StepOverlap>& ranks : Trace(spec)) {
    ASSERT_EQ(ranks.size(), static_cast<size_t>(kOverlapRanks));
    for (const trace::StepOverlap& overlap : ranks) {
      EXPECT_GT(overlap.gathers, 8);
      EXPECT_EQ(overlap.hidden_gathers, 0);
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
