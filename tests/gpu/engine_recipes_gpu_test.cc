// Quantized training on a device by the path dequant_bf16 and by those of codes: the same bits on
// any number of ranks and under every strategy, codes and scales of the CPU, steps that are skipped
// without a trace, graphs, and checkpoints that cross between CPU and device.

#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/gemm_paths.h"
#include "common/model/recipes.h"
#include "common/mutex.h"
#include "common/signed_size.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "worker/optim/stored_state.h"
#include "worker/shard/step_graphs.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;
using plan::StateRole;

struct RecipeForm {
  const char* name;
  Recipe recipe;
  bool of_codes = false;  // gemms read codes; else operands are decoded
  bool as_mxfp8 = false;  // codes of the recipe by gemms of mxfp8

  plan::GemmPath path() const {
    return as_mxfp8 ? plan::GemmPath::kBlockAsMxFp8 : plan::PathOfCodes(recipe);
  }
};
constexpr RecipeForm kRecipes[] = {{"delayed", Recipe::kDelayed},
                                   {"current", Recipe::kCurrent},
                                   {"fp8_block", Recipe::kFloat8Block},
                                   {"mxfp8", Recipe::kMxFp8},
                                   {"nvfp4", Recipe::kNvFp4},
                                   {"delayed_codes", Recipe::kDelayed, true},
                                   {"current_codes", Recipe::kCurrent, true},
                                   {"fp8_block_codes", Recipe::kFloat8Block, true},
                                   {"mxfp8_codes", Recipe::kMxFp8, true},
                                   {"nvfp4_codes", Recipe::kNvFp4, true},
                                   {"fp8_block_as_mxfp8", Recipe::kFloat8Block, true, true}};
constexpr int64_t kHistory = 3;  // as long as the runs

void UseRecipe(const RecipeForm& form, plan::JobSpec& spec) {
  spec.compute = plan::ComputeType::kBF16;
  spec.recipe = {.recipe = form.recipe, .keep_bf16 = {}, .history = kHistory};
}

// The same job on the other kind of devices.
void UseDevices(const RecipeForm& form, bool on_device, plan::JobSpec& spec) {
  spec.cpu_devices = !on_device;
  spec.recipe.emulation.clear();
  if (on_device && !form.of_codes) {
    spec.recipe.emulation = {plan::GemmPath::kDequantBf16};
  }
  if (on_device && form.as_mxfp8) {
    spec.recipe.emulation = {plan::GemmPath::kBlockAsMxFp8};
  }
}

// Amaxes, delayed scales and codes of all matrices, joined over ranks; what is equal on all ranks
// is that of the last one.
struct QuantRecord {
  std::vector<uint32_t> amaxes;
  std::vector<float> scales;
  std::vector<float> histories;
  std::map<std::string, std::vector<uint8_t>> codes;
  bool operator==(const QuantRecord&) const = default;
};

absl::Status AddQuantState(RankEngine& engine, QuantRecord& to) {
  const plan::QuantLayout& layout = engine.quant()->layout();
  const kernels::WeightScales first =
      engine.quant()->ScalesOf(layout.tensors[0].tensor, false).weight;
  to.amaxes.resize(Size(layout.weight_words));
  RETURN_IF_ERROR(engine.memory().Read(first.amax.As<uint32_t>() - layout.tensors[0].grid,
                                       std::as_writable_bytes(std::span(to.amaxes))));
  to.scales.resize(Size(layout.slots));
  to.histories.resize(Size(layout.slots * kHistory));
  if (layout.slots > 0) {
    RETURN_IF_ERROR(
        optim::ReadScales(engine.memory(), *engine.quant(), StateRole::kCastScale, 0, to.scales));
    RETURN_IF_ERROR(optim::ReadScales(
        engine.memory(), *engine.quant(), StateRole::kAmaxHistory, 0, to.histories));
  }
  for (const shard::ParameterGroup& group : engine.groups()) {
    for (const quant::QuantPiece& piece : group.quant_pieces()) {
      const plan::TensorSpec& tensor = engine.tensor(piece.tensor);
      const int64_t row = piece.codes.size[1];
      std::vector<uint8_t>& all = to.codes[tensor.name];
      all.resize(Size(tensor.shape[0] * row));
      RETURN_IF_ERROR(
          engine.memory().Read(piece.codes.data,
                               std::as_writable_bytes(std::span(all).subspan(
                                   Size(piece.first_row * row), Size(piece.codes.size[0] * row)))));
    }
  }
  return absl::OkStatus();
}

class GpuRecipes : public GpuEngine, public ::testing::WithParamInterface<RecipeForm> {
 protected:
  GpuRecipes() { std::filesystem::remove_all(folder_); }
  // Of codes, each kind of devices has some.
  void SetUp() override {
    GpuEngine::SetUp();
    if (IsSkipped() || !GetParam().of_codes) {
      return;
    }
    const absl::Status checked = CheckPath(GetParam().path());
    if (!checked.ok()) {
      GTEST_SKIP() << checked;
    }
  }
  ~GpuRecipes() override { std::filesystem::remove_all(folder_); }

  static RecordArgs Steps(const StrategyCase& tested = {}, const std::string& model = "recipes") {
    RecordArgs args = DeviceSteps(tested, model);
    UseRecipe(GetParam(), args.spec);
    UseDevices(GetParam(), true, args.spec);
    return args;
  }
  static const Recording& One() {
    return RecordedOnce(gpu(), absl::StrCat("recipes/", GetParam().name), Steps());
  }
  // Codes and scales of a run's ranks after so many steps; on the CPU with `on_device` false.
  static QuantRecord QuantAfter(RecordArgs args, int64_t steps, bool on_device) {
    UseDevices(GetParam(), on_device, args.spec);
    args.last_step = steps;
    args.evaluate_every_step = false;
    QuantRecord record;
    Mutex mutex;
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      Recording unused;
      RETURN_IF_ERROR(RunRank(args, engine, rank, unused));
      MutexLock lock(mutex);
      return AddQuantState(engine, record);
    };
    EXPECT_EQ(RunLocalRanks({.spec = args.spec,
                             .ranks = args.ranks,
                             .body = body,
                             .adjust = args.adjust,
                             .gpu = on_device ? &gpu() : nullptr}),
              absl::OkStatus());
    return record;
  }

  // Runs the steps on a device and makes all codes once more; returns them.
  static QuantRecord ExpectCodesOfARefresh(const RecordArgs& args) {
    QuantRecord left;
    QuantRecord made;
    Mutex mutex;
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      Recording unused;
      RETURN_IF_ERROR(RunRank(args, engine, rank, unused));
      MutexLock lock(mutex);
      RETURN_IF_ERROR(AddQuantState(engine, left));
      ASSIGN_OR_RETURN(const kernels::CudaMemory scratch,
                       gpu().AllocateDevice(kernels::cuda::kScratchBytes));
      ASSIGN_OR_RETURN(const auto stream,
                       gpu().MakeStream(kernels::CudaGpu::Priority::kNormal, scratch.data()));
      for (const shard::ParameterGroup& group : engine.groups()) {
        engine.quant()->Quantize(*stream, group.quant_pieces());
      }
      RETURN_IF_ERROR(stream->Synchronize());
      return AddQuantState(engine, made);
    };
    EXPECT_EQ(RunLocalRanks({.spec = args.spec, .ranks = args.ranks, .body = body, .gpu = &gpu()}),
              absl::OkStatus());
    EXPECT_GT(left.codes.size(), 0u);
    EXPECT_EQ(left, made);
    return left;
  }

  EpochArgs Epoch(int ranks, bool on_device) {
    EpochArgs args;
    args.spec = CaseJob("recipes", folder_);
    UseRecipe(GetParam(), args.spec);
    UseDevices(GetParam(), on_device, args.spec);
    args.spec.steps = 4;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 2;
    args.ranks = ranks;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }
  static EpochArgs From(const EpochOutcome& whole, EpochArgs args) {
    args.restore_path = whole.committed.at(2);
    args.first_step = 2;
    return args;
  }
  static EpochOutcome RunWell(const EpochArgs& args) {
    EpochOutcome outcome = RunEpoch(args);
    for (const absl::Status& result : outcome.results) {
      EXPECT_TRUE(result.ok()) << result;
    }
    EXPECT_TRUE(outcome.commit_errors.empty());
    return outcome;
  }
  static Sha256Digest DigestOf(const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    return store::CommittedStep::Open(&store, path.filename().string())
        .value()
        .manifest()
        .state_digest;
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/ravel_gpu_recipes_", GetParam().name);
  int64_t epoch_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Five, GpuRecipes, ::testing::ValuesIn(kRecipes), [](const auto& tested) {
  return std::string(tested.param.name);
});

// Emulated devices run our own gemm thread by thread, and decode codes of blocks one by one: three
// of them have to do there.
TEST_P(GpuRecipes, WidthsAndStrategiesHaveTheSameBits) {
  const bool own_gemm = !GetParam().of_codes && (plan::BlockEdge(GetParam().recipe) == 0 ||
                                                 GetParam().recipe == Recipe::kNvFp4);
  const bool of_blocks = GetParam().of_codes && plan::BlockEdge(GetParam().recipe) != 0;
  size_t left = emulated() && (own_gemm || of_blocks) ? 3 : 7;
  for (const StrategyCase& tested :
       {StrategyCase{.strategy = "ZeRO3", .width = 3},
        StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
        StrategyCase{.strategy = "HFSDP", .width = 1, .small_windows = true, .in_place = true},
        StrategyCase{.strategy = "ZeRO3", .width = 2, .recompute = plan::RecomputePolicy::kBlock},
        StrategyCase{.strategy = "ZeRO0", .width = 2},
        StrategyCase{.strategy = "ZeRO2", .width = 3},
        StrategyCase{.strategy = "HSDP", .width = 1}}) {
    if (left-- == 0) {
      break;
    }
    ExpectEqualRuns(One(), RecordOn(gpu(), Steps(tested)), tested.name());
  }
}

TEST_P(GpuRecipes, MatricesOfInputsByOutputsTrain) {
  const Recording one = RecordOn(gpu(), Steps({}, "recipes_gpt2"));
  ExpectEqualRuns(one, RecordOn(gpu(), Steps({.width = 2}, "recipes_gpt2")), "gpt2");
}

// What the path promises: only sums of gemms differ from the reference on a CPU.
TEST_P(GpuRecipes, LossesAreThoseOfTheReferenceButForTheOrderOfSums) {
  RecordArgs args = Steps();
  UseDevices(GetParam(), false, args.spec);
  const Recording cpu = Record(args);
  args.spec.recipe = {};
  const Recording wide = Record(args);
  ASSERT_EQ(cpu.steps.size(), One().steps.size());
  for (size_t i = 0; i < cpu.steps.size(); ++i) {
    EXPECT_NEAR(One().steps[i].loss, cpu.steps[i].loss, 5e-3f * cpu.steps[i].loss) << i;
  }
  EXPECT_NE(FirstDifference(wide, One()), "");
}

// Equal main weights give the codes, amaxes and scales of the CPU, to the bit.
TEST_P(GpuRecipes, CodesAmaxesAndScalesAreThoseOfTheCpu) {
  RecordArgs begin = Steps();
  UseDevices(GetParam(), false, begin.spec);
  begin.last_step = 2;
  const Recording state = Record(begin);
  RecordArgs rest = Steps({.width = 2});
  rest.start = &state;
  rest.first_step = 2;
  const QuantRecord cpu = QuantAfter(rest, 2, false);
  EXPECT_GT(cpu.codes.size(), 0u);
  EXPECT_EQ(cpu, QuantAfter(rest, 2, true));
  RecordArgs alone = Steps();
  alone.start = &state;
  alone.first_step = 2;
  EXPECT_EQ(cpu, QuantAfter(alone, 2, true));
}

// Codes that an update makes in its own kernel are those that QuantizeWeight makes of the new
// weights.
TEST_P(GpuRecipes, CodesOfAStepAreThoseOfARefresh) {
  RecordArgs args = Steps({.width = 2});
  args.last_step = 3;
  const QuantRecord record = ExpectCodesOfARefresh(args);
  args.last_step = 1;
  EXPECT_NE(record.codes, ExpectCodesOfARefresh(args).codes);
}

class GpuHistories : public GpuRecipes {};
INSTANTIATE_TEST_SUITE_P(Delayed,
                         GpuHistories,
                         ::testing::Values(kRecipes[0], kRecipes[5]),
                         [](const auto& tested) { return std::string(tested.param.name); });

// A matrix of zeros has no delayed scale: its update makes no codes, the refresh does.
TEST_P(GpuHistories, CodesAfterZerosAreThoseOfARefresh) {
  ASSERT_EQ(GetParam().recipe, Recipe::kDelayed);
  RecordArgs args = Steps();
  args.last_step = 1;
  Recording zeros = RecordOn(gpu(), args);
  int64_t changed = 0;
  for (auto& [name, values] : zeros.weights) {
    if (name.find("o_proj") != std::string::npos) {
      std::fill(values.begin(), values.end(), 0.0f);
      ++changed;
    }
  }
  ASSERT_GT(changed, 0);
  args.start = &zeros;
  args.first_step = 1;
  args.last_step = 2;
  ExpectCodesOfARefresh(args);
}

class GpuAnyShapes : public GpuRecipes {};
INSTANTIATE_TEST_SUITE_P(Decoded,
                         GpuAnyShapes,
                         ::testing::Values(kRecipes[0], kRecipes[1]),
                         [](const auto& tested) { return std::string(tested.param.name); });

// Rows that are no multiple of four do without the kernel.
TEST_P(GpuAnyShapes, CodesOfOddRowsAreThoseOfARefresh) {
  RecordArgs args = Steps({.width = 2}, "odd_tied");
  args.last_step = 2;
  ExpectCodesOfARefresh(args);
}

// Also after steps of their own, on any number of ranks.
TEST_P(GpuRecipes, CodesAndScalesDoNotDependOnTheNumberOfRanks) {
  const QuantRecord one = QuantAfter(Steps(), 3, true);
  EXPECT_EQ(one, QuantAfter(Steps({.width = 3}), 3, true));
  if (GetParam().recipe == Recipe::kDelayed) {
    for (const float entry : one.histories) {
      EXPECT_GT(entry, 0.0f);
    }
  }
}

// What a graph has captured reads the step of the draws, and whether to apply, from memory.
TEST_P(GpuRecipes, GraphsChangeNoBit) {
  RecordArgs args = Steps();
  args.evaluate_every_step = false;
  args.ahead = true;
  args.last_step = 5;
  args.options.graphs = false;
  const Recording without = RecordOn(gpu(), args);
  args.options.graphs = true;
  EXPECT_EQ(FirstDifference(without, RecordOn(gpu(), args)), "");
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 5; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
    }
    EXPECT_GE(engine.graphs()->captured(), 3);
    EXPECT_EQ(engine.graphs()->launches(), 3 * engine.graphs()->captured());
    EXPECT_THAT(engine.graphs()->notes(), ::testing::IsEmpty());
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks({.spec = args.spec, .body = body, .adjust = args.adjust, .gpu = &gpu()}),
            absl::OkStatus());
}

// An infinity in the embedding reaches every gemm; codes saturate it, the step is not applied.
TEST_P(GpuRecipes, ASkippedStepChangesNothing) {
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    const shard::ParameterGroup& group = engine.groups().front();
    const auto set = [&](float value) -> absl::Status {
      if (rank == 0) {
        RETURN_IF_ERROR(
            engine.memory().Write(std::as_bytes(std::span(&value, 1)),
                                  group.main_weight() + group.pieces()[0].shard_offset));
      }
      return engine.RefreshWeights(shard::UnitExecutor::Refresh::kLoaded);
    };
    float kept = 0;
    RETURN_IF_ERROR(engine.memory().Read(group.main_weight() + group.pieces()[0].shard_offset,
                                         std::as_writable_bytes(std::span(&kept, 1))));
    RETURN_IF_ERROR(set(std::numeric_limits<float>::infinity()));
    QuantRecord before;
    RETURN_IF_ERROR(AddQuantState(engine, before));
    ASSIGN_OR_RETURN(const StepResult skipped, engine.TrainStep(1));
    EXPECT_TRUE(skipped.skipped);
    EXPECT_GT(skipped.non_finite, 0);
    EXPECT_EQ(engine.updates(), 1);
    QuantRecord after;
    RETURN_IF_ERROR(AddQuantState(engine, after));
    EXPECT_EQ(before, after);
    RETURN_IF_ERROR(set(kept));
    ASSIGN_OR_RETURN(const StepResult next, engine.TrainStep(2));
    EXPECT_FALSE(next.skipped);
    EXPECT_EQ(next.non_finite, 0);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), Steps({.width = 2}), body), absl::OkStatus());
}

// A word of the scales that differs on one rank is found in the step that uses it.
TEST_P(GpuRecipes, RanksCompareTheirScalesOnceAStep) {
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    const plan::QuantTensor& tensor = engine.quant()->layout().tensors[0];
    const uint32_t* amax =
        engine.quant()->weight_amaxes().data() + engine.quant()->layout().domain(tensor).amax;
    if (plan::BlockEdge(tensor.recipe) != 0) {
      amax = engine.quant()->weight_amaxes().data() + tensor.grid;
    }
    if (rank == 1) {
      uint32_t word = 0;
      RETURN_IF_ERROR(engine.memory().Read(amax, std::as_writable_bytes(std::span(&word, 1))));
      ++word;
      RETURN_IF_ERROR(
          engine.memory().Write(std::as_bytes(std::span(&word, 1)), const_cast<uint32_t*>(amax)));
    }
    const absl::Status compared = engine.TrainStep(1).status();
    EXPECT_THAT(std::string(compared.message()),
                ::testing::HasSubstr("rank 1 has other scales of quantized weights than rank 0"));
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), Steps({.width = 2}), body), absl::OkStatus());
}

TEST_P(GpuRecipes, WhatIsAllocatedIsWhatIsPlanned) {
  for (const int64_t width : {1, 2}) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      EXPECT_EQ(engine.measured_bytes(), engine.planned_bytes());
      return engine.InitializeWeights();
    };
    EXPECT_EQ(RunOn(gpu(), Steps({.width = width}), body), absl::OkStatus());
  }
}

// State digests cover main weights, moments, delayed scales and histories.
TEST_P(GpuRecipes, ASaveGoesOnWithTheSameBits) {
  const EpochOutcome whole = RunWell(Epoch(1, true));
  ASSERT_EQ(whole.steps.size(), 4u);
  const EpochOutcome resumed = RunWell(From(whole, Epoch(1, true)));
  EXPECT_EQ(DigestOf(resumed.committed.at(4)), DigestOf(whole.committed.at(4)));
  ASSERT_EQ(resumed.steps.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(resumed.steps[i].loss),
              std::bit_cast<uint32_t>(whole.steps[i + 2].loss));
  }
}

// A step of one kind of devices is read by the other as it is, and goes on close by.
TEST_P(GpuRecipes, ASaveCrossesBetweenCpuAndDevice) {
  for (const bool on_device : {true, false}) {
    const int others = on_device ? 2 : 1;
    const EpochOutcome whole = RunWell(Epoch(3 - others, on_device));
    EpochArgs read = From(whole, Epoch(others, !on_device));
    read.first_step = 0;
    read.save_at_start = true;
    EXPECT_EQ(DigestOf(RunWell(read).committed.at(0)), DigestOf(whole.committed.at(2)));
    const EpochOutcome resumed = RunWell(From(whole, Epoch(others, !on_device)));
    ASSERT_EQ(resumed.steps.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      const float expected = whole.steps[i + 2].loss;
      EXPECT_NEAR(resumed.steps[i].loss, expected, 1e-2f * expected);
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
