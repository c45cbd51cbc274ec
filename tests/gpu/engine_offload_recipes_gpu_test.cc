// Quantized matrices whose optimizer's state and main weights are in memory of the device's host,
// which makes their codes: the bits of a run that keeps all on the device.

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/trace.h"
#include "tests/gpu/engine_device.h"
#include "tests/gpu/offload_runs.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/resume_runs.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;

struct RecipeStates {
  const char* name;
  Recipe recipe;
  plan::StateTypes states;
};
// Every recipe, and every type of state.
constexpr RecipeStates kRecipes[] = {{"delayed", Recipe::kDelayed, plan::kBf16States},
                                     {"current", Recipe::kCurrent, {DType::kF8E4M3, DType::kBF16}},
                                     {"fp8_block", Recipe::kFloat8Block, plan::kF32States},
                                     {"mxfp8", Recipe::kMxFp8, plan::kFp8States},
                                     {"nvfp4", Recipe::kNvFp4, plan::kF32States}};

void UseRecipe(const RecipeStates& of, double fraction, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kBF16;
  spec.recipe = {.recipe = of.recipe, .keep_bf16 = {}, .emulation = {plan::GemmPath::kDequantBf16}};
  spec.optimizer.state_types = of.states;
  spec.optimizer.offload.fraction = fraction;
}

RecordArgs Steps(const RecipeStates& of, double fraction, const StrategyCase& tested = {}) {
  RecordArgs args = DeviceSteps(tested, "recipes");
  UseRecipe(of, fraction, args.spec);
  args.evaluate_every_step = false;
  args.last_step = 4;
  args.spec.steps = 6;
  return args;
}

class GpuOffloadRecipes : public GpuEngine, public ::testing::WithParamInterface<RecipeStates> {
 protected:
  static const Recording& Whole() {
    return RecordedOnce(gpu(), absl::StrCat("recipes/", GetParam().name), Steps(GetParam(), 0));
  }
  static int64_t Turn() {
    return std::find_if(std::begin(kRecipes),
                        std::end(kRecipes),
                        [](const RecipeStates& of) { return of.recipe == GetParam().recipe; }) -
           kRecipes;
  }
};

class GpuOffloadBlocks : public GpuEngine {};

INSTANTIATE_TEST_SUITE_P(Recipes,
                         GpuOffloadRecipes,
                         ::testing::ValuesIn(kRecipes),
                         [](const auto& tested) { return std::string(tested.param.name); });

// Whole groups in a chunk; chunks that end within blocks and rows; few slots, so that chunks and
// what is made after the reduction of amaxes take turns in them; matrices and blocks that ranks
// share, by rows, by columns and in copies; and ranks without a row.
TEST_P(GpuOffloadRecipes, EveryCutGivesTheSameBits) {
  struct Case {
    double fraction;
    StrategyCase strategy;
    int64_t chunk_elements;
    int64_t slots = 0;
    bool overlap = true;
  };
  const Case cases[] = {{.fraction = 1, .strategy = {}, .chunk_elements = 0},
                        {.fraction = 0.37,
                         .strategy = {.strategy = "ZeRO3", .width = 2},
                         .chunk_elements = kChunkElements,
                         .slots = 3},
                        {.fraction = 1,
                         .strategy = {.strategy = "ZeRO1", .width = 3},
                         .chunk_elements = 3 * kChunkElements,
                         .slots = 1},
                        {.fraction = 1,
                         .strategy = {.strategy = "ZeRO3", .width = 8},
                         .chunk_elements = 2 * kChunkElements,
                         .overlap = false},
                        {.fraction = 1,
                         .strategy = {.strategy = "HFSDP", .width = 2},
                         .chunk_elements = kChunkElements}};
  for (const Case& tested : cases) {
    if (!EveryCase() && (&tested - cases) % 2 != Turn() % 2) {
      continue;
    }
    RecordArgs args = Steps(GetParam(), tested.fraction, tested.strategy);
    args.options.offload_chunk_elements = tested.chunk_elements;
    args.options.offload_slots = tested.slots;
    args.spec.optimizer.offload.overlap = tested.overlap;
    args.ahead = true;
    EXPECT_EQ(FirstDifference(Whole(), RecordOn(gpu(), args)), "")
        << tested.strategy.name() << ", chunks of " << tested.chunk_elements;
  }
}

// A cut by columns has its own bits, whatever its degree.
TEST_P(GpuOffloadRecipes, TheTensorAxisGivesTheSameBits) {
  const auto steps = [](double fraction) {
    RecordArgs args = Steps(GetParam(), fraction, {.strategy = "ZeRO3", .tensor = 2});
    args.spec.model->num_key_value_heads = 4;  // halves of keys are whole blocks of fp8_block
    args.options.offload_chunk_elements = kChunkElements;
    return args;
  };
  EXPECT_EQ(FirstDifference(RecordOn(gpu(), steps(0)), RecordOn(gpu(), steps(1))), "");
}

// Amaxes and codes of an update that is undone go with it.
TEST_P(GpuOffloadRecipes, WrongGuessesAreUndone) {
  const auto steps = [](double fraction, double clip_norm) {
    RecordArgs args = Steps(GetParam(), fraction);
    args.options.offload_chunk_elements = 1 << 20;
    args.spec.optimizer.clip_norm = clip_norm;
    return args;
  };
  std::vector<double> norms;
  for (const StepResult& step : Whole().steps) {
    norms.push_back(step.grad_norm);
  }
  std::nth_element(norms.begin(), norms.begin() + 1, norms.end());
  const double clip_norm = norms[1] * 1.0001;
  const CountedRun run = RunCounted(gpu(), steps(1, clip_norm));
  EXPECT_EQ(FirstDifference(RunCounted(gpu(), steps(0, clip_norm)).recording, run.recording), "");
  int64_t redone = 0;
  for (const optim::HostUpdateCounts& counts : run.counts) {
    redone += counts.redone;
  }
  EXPECT_GT(redone, 0);
}

// Amaxes fall with the weights of early updates: none is left from the step before.
TEST_P(GpuOffloadRecipes, AmaxesOfWeightsThatShrinkFall) {
  const auto steps = [](double fraction) {
    RecordArgs args = Steps(GetParam(), fraction);
    args.options.offload_chunk_elements = 1 << 20;
    args.spec.optimizer.clip_norm = 0;
    args.spec.optimizer.weight_decay = 20;  // a fifth less per step
    return args;
  };
  const CountedRun run = RunCounted(gpu(), steps(1));
  EXPECT_EQ(FirstDifference(RunCounted(gpu(), steps(0)).recording, run.recording), "");
  for (const optim::HostUpdateCounts& counts : run.counts) {
    EXPECT_EQ(counts.early, run.chunks);
  }
}

TEST_P(GpuOffloadRecipes, ASkippedStepLeavesNoTrace) {
  const Recording whole = WithASkippedStep(gpu(), Steps(GetParam(), 0));
  EXPECT_EQ(whole.updates, 4);
  RecordArgs args = Steps(GetParam(), 1, {.strategy = "ZeRO3", .width = 2});
  args.options.offload_chunk_elements = 2 * kChunkElements;
  EXPECT_EQ(FirstDifference(whole, WithASkippedStep(gpu(), args)), "");
}

// Through the files of checkpoints, which compare codes and scales, to the device's memory and back
// to that of its host.
TEST_P(GpuOffloadRecipes, ASaveGoesOnAtAnotherFraction) {
  const std::string folder = absl::StrCat(::testing::TempDir(), "/ravel_gpu_offload_recipes");
  std::filesystem::remove_all(folder);
  ResumeRuns runs(folder);
  const auto epoch = [&](double fraction) {
    plan::JobSpec spec = CaseJob("recipes", folder);
    spec.cpu_devices = false;
    UseRecipe(GetParam(), fraction, spec);
    return runs.Whole(spec, 1);
  };
  const EpochOutcome device = RunWell(epoch(0));
  const EpochOutcome host = RunWell(epoch(1));
  ExpectSameStart(RunWell(ResumeRuns::ReadBack(host, epoch(0))), device);
  ExpectSameEnd(RunWell(ResumeRuns::From(host, epoch(0))), device);
  ExpectSameEnd(RunWell(ResumeRuns::From(device, epoch(1))), device);
  std::filesystem::remove_all(folder);
}

// -- memory, and what is made twice

// Returns how often in a step the host makes codes beside its updates.
std::vector<int64_t> EncodedAfterUpdates(kernels::CudaGpu& gpu, const RecordArgs& args) {
  trace::Recorder recorder;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    engine.host_updater()->set_recorder(&recorder);
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < args.last_step; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      std::byte one = {};  // read when all is done
      RETURN_IF_ERROR(engine.memory().Read(engine.offloaded().data(), {&one, 1}));
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu, args, body), absl::OkStatus());
  std::vector<int64_t> encoded(static_cast<size_t>(args.last_step) + 1);
  for (const trace::Event& event : recorder.Take()) {
    encoded[static_cast<size_t>(event.step)] += event.op == "HostEncode" ? 1 : 0;
  }
  return encoded;
}

// Once per step: all at the beginning, then those whose scales an update does not know. Delayed
// scales have histories from the first step on, which the third one builds on.
TEST_P(GpuOffloadRecipes, CodesOfAnUpdateAreNotMadeAgain) {
  const std::vector<int64_t> encoded = EncodedAfterUpdates(gpu(), Steps(GetParam(), 1));
  EXPECT_GT(encoded[0], 0);
  const bool knows = plan::EncodesInUpdate(GetParam().recipe);
  EXPECT_EQ(encoded[3], knows ? 0 : encoded[0]);
  EXPECT_EQ(encoded[4], encoded[3]);
  EXPECT_EQ(encoded[1], knows && GetParam().recipe != Recipe::kDelayed ? 0 : encoded[0]);
}

// A row of blocks that is too long for one thread's caches is encoded when all of it is updated.
TEST_F(GpuOffloadBlocks, LongOnesAreEncodedAfterTheirParts) {
  const auto steps = [](double fraction) {
    RecordArgs args = Steps({"fp8_block", Recipe::kFloat8Block, plan::kF32States}, fraction);
    args.spec.model->num_hidden_layers = 1;
    args.spec.model->intermediate_size = 2176;  // 128 of such rows are more than 2^18 elements
    args.last_step = 2;
    return args;
  };
  EXPECT_EQ(FirstDifference(RecordOn(gpu(), steps(0)), RecordOn(gpu(), steps(1))), "");
  const std::vector<int64_t> encoded = EncodedAfterUpdates(gpu(), steps(1));
  EXPECT_GT(encoded[0], 0);
  EXPECT_EQ(encoded[1], 0);
  EXPECT_EQ(encoded[2], 0);
}

// Main weights are the host's: what the device has less is all that the plan says, and the host has
// that, pinned memory, and what a guess keeps.
TEST_P(GpuOffloadRecipes, MainWeightsLeaveTheDevice) {
  std::vector<int64_t> planned;
  for (const double fraction : {0.0, 1.0}) {
    const RecordArgs args = Steps(GetParam(), fraction);
    const plan::ShardingPlan plan = *PlanLocalRanks({.spec = args.spec});
    const plan::OffloadFacts facts = plan::OffloadOf(plan.buffers, plan.groups, plan.options);
    for (const plan::ProgramBuffer& buffer : plan.buffers) {
      if (buffer.kind == plan::BufferKind::kMainWeight && buffer.inside < 0) {
        EXPECT_EQ(buffer.memory == plan::MemoryKind::kOffload, fraction > 0) << buffer.name;
      }
    }
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      gpu().ForgetMostBytes();
      RETURN_IF_ERROR(engine.InitializeWeights());
      RETURN_IF_ERROR(engine.TrainStep(0).status());
      EXPECT_EQ(engine.measured_bytes(), engine.planned_bytes());
      EXPECT_EQ(gpu().memory_use().most_bytes, engine.planned_bytes() + engine.device_bytes());
      planned.push_back(engine.planned_bytes());
      if (fraction > 0) {
        EXPECT_EQ(engine.host_updater()->pinned_bytes(), facts.pinned_bytes + 256);  // decision
        EXPECT_EQ(engine.host_updater()->kept_bytes(), facts.kept_bytes);
        const auto left = static_cast<double>(facts.offloaded_bytes);
        EXPECT_NEAR(static_cast<double>(planned[0] - planned[1]), left, 0.01 * left);  // packing
      }
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
  }
}

}  // namespace
}  // namespace ravel::trainer
