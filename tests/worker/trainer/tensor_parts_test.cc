// Jobs with determinism.tensorParts: the bits of one rank on any number of them, with every
// strategy, whether or not ranks share layers, and losses close to those of one part.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/golden_curves.h"
#include "tests/testing/strategy_cases.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

// More of them in the slow label.
int64_t Steps() {
  return std::getenv("RAVEL_EVERY_CASE") != nullptr ? 20 : 4;
}

// Four query heads; Llama and Qwen have two key heads.
plan::JobSpec PartsJob(const StrategyCase& tested, const std::string& model, int64_t parts) {
  const std::string base = model == "gpt2" ? "recipes_gpt2" : "bundled_rope_scaling";
  plan::JobSpec spec = JobOf(tested, base, OwnFolder("ravel_tensor_parts"));
  if (model == "qwen2") {
    spec.model->architecture = plan::ArchitectureKind::kQwen2;
    spec.model->rope_scaling_factor = 1.0;
  } else if (model == "qwen3") {
    spec.model->architecture = plan::ArchitectureKind::kQwen3;
    spec.model->rope_scaling_factor = 1.0;
    spec.model->tie_word_embeddings = true;
  }
  spec.tensor_parts = parts;
  return spec;
}

Recording RecordParts(const StrategyCase& tested, const std::string& model, int64_t parts) {
  RecordArgs args = ArgsOf(tested, PartsJob(tested, model, parts));
  args.last_step = Steps();
  args.evaluate_every_step = true;
  return Record(args);
}

const Recording& OneRank(const std::string& model, int64_t micro_batches) {
  static std::map<std::pair<std::string, int64_t>, Recording> known;
  const auto [at, fresh] = known.try_emplace({model, micro_batches});
  if (fresh) {
    at->second = RecordParts({.strategy = "ZeRO0", .micro_batches = micro_batches}, model, 4);
  }
  return at->second;
}

// 64-bit FNV-1a of the bits of losses, weights and moments.
uint64_t DigestOf(const Recording& run) {
  uint64_t digest = 0xCBF29CE484222325;
  const auto add = [&](float value) {
    digest = (digest ^ std::bit_cast<uint32_t>(value)) * 0x100000001B3;
  };
  for (const StepResult& step : run.steps) {
    add(static_cast<float>(step.loss));
  }
  for (const auto* state : {&run.weights, &run.exp_avg, &run.exp_avg_sq}) {
    for (const auto& [name, values] : *state) {
      std::for_each(values.begin(), values.end(), add);
    }
  }
  return digest;
}

class TensorPartsOf : public ::testing::TestWithParam<std::tuple<StrategyCase, const char*>> {};

TEST_P(TensorPartsOf, GiveTheBitsOfOneRank) {
  const auto& [tested, model] = GetParam();
  const Recording run = RecordParts(tested, model, 4);
  EXPECT_EQ(FirstDifference(OneRank(model, tested.micro_batches), run), "");
  if (std::getenv("RAVEL_DIGESTS") != nullptr) {  // for a table
    std::printf("digest %016llx %s\n",
                static_cast<unsigned long long>(DigestOf(run)),
                tested.name().c_str());
  }
}

std::vector<StrategyCase> Covering() {
  using plan::RecomputePolicy;
  return {
      {.strategy = "ZeRO3", .width = 3, .micro_batches = 3, .small_windows = true},
      {.strategy = "ZeRO1", .width = 2, .micro_batches = 1, .in_place = true},
      {.strategy = "HFSDP", .width = 2, .micro_batches = 3, .recompute = RecomputePolicy::kBlock}};
}

std::string NameOfParts(
    const ::testing::TestParamInfo<std::tuple<StrategyCase, const char*>>& tested) {
  return absl::StrCat(std::get<0>(tested.param).name(), "_", std::get<1>(tested.param));
}

INSTANTIATE_TEST_SUITE_P(Sample,
                         TensorPartsOf,
                         ::testing::Combine(::testing::ValuesIn(Covering()),
                                            ::testing::Values("llama", "qwen3")),
                         NameOfParts);
INSTANTIATE_TEST_SUITE_P(Biased,
                         TensorPartsOf,
                         ::testing::Combine(::testing::Values(Covering().front()),
                                            ::testing::Values("qwen2", "gpt2")),
                         NameOfParts);

// Ranks of the tensor axis share the four parts: one, two or four each.
std::vector<StrategyCase> OnTensorRanks() {
  using plan::RecomputePolicy;
  return {{.strategy = "ZeRO0", .width = 1, .micro_batches = 1, .tensor = 2},
          {.strategy = "ZeRO3",
           .width = 2,
           .micro_batches = 3,
           .recompute = RecomputePolicy::kBlock,
           .small_windows = true,
           .tensor = 2},
          {.strategy = "ZeRO2", .width = 1, .micro_batches = 3, .tensor = 4, .sequence = true},
          {.strategy = "ZeRO1", .width = 2, .micro_batches = 1, .tensor = 4},
          {.strategy = "ZeRO3",
           .width = 3,
           .micro_batches = 3,
           .recompute = RecomputePolicy::kMlp,
           .tensor = 2,
           .sequence = true}};
}
INSTANTIATE_TEST_SUITE_P(TensorRanks,
                         TensorPartsOf,
                         ::testing::Combine(::testing::ValuesIn(OnTensorRanks()),
                                            ::testing::Values("llama", "qwen2", "qwen3", "gpt2")),
                         NameOfParts);

std::vector<StrategyCase> AllOfThem() {
  std::vector<StrategyCase> cases;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {1, 2, 3}) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const int64_t tensor : {1, 2, 4}) {
          for (const bool sequence : {false, true}) {
            if (tensor == 1 ? !sequence : micro_batches == 3) {
              cases.push_back({.strategy = strategy.name,
                               .width = width,
                               .micro_batches = micro_batches,
                               .tensor = tensor,
                               .sequence = sequence});
            }
          }
        }
      }
    }
  }
  return cases;
}
INSTANTIATE_TEST_SUITE_P(All,
                         TensorPartsOf,
                         ::testing::Combine(::testing::ValuesIn(AllOfThem()),
                                            ::testing::Values("llama", "qwen2", "qwen3", "gpt2")),
                         NameOfParts);

// 50 steps that PyTorch made, on ranks that share each layer; with sums in four parts all of them
// have the same bits.
class TensorLossParity : public ::testing::TestWithParam<std::string> {};

TEST_P(TensorLossParity, EveryStepEqualsPyTorchToOneInTenThousand) {
  const std::vector<GoldenStep> golden = GoldenCurve(GetParam());
  const plan::JobSpec job = CaseJob(GetParam(), OwnFolder("ravel_tensor_curves"));
  std::optional<Recording> first;
  for (const int64_t tensor : {1, 2, 4}) {
    for (const bool sequence : {false, true}) {
      if (sequence && tensor == 1) {
        continue;
      }
      RecordArgs args = {.spec = job, .ranks = static_cast<int>(tensor), .last_step = kGoldenSteps};
      args.spec.allow_padding = true;
      args.spec.tensor = tensor;
      args.spec.tensor_parts = 4;
      args.spec.sequence_parallel = sequence;
      args.spec.tensor_chunks = tensor == 1 ? 1 : sequence ? 4 : 2;
      const Recording run = Record(args);
      const CurveDistance worst = DistanceToGolden(golden, run);
      EXPECT_LE(worst.loss, 1e-4) << tensor << (sequence ? " own tokens" : "");
      EXPECT_LE(worst.grad_norm, 1e-3) << tensor << (sequence ? " own tokens" : "");
      if (!first.has_value()) {
        std::printf(
            "%s: worst relative difference of the loss %.3g\n", GetParam().c_str(), worst.loss);
        first = run;
      } else {
        EXPECT_EQ(FirstDifference(*first, run), "") << tensor << (sequence ? " own tokens" : "");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sample,
                         TensorLossParity,
                         ::testing::Values("cut_qwen3_tied"),
                         [](const auto& tested) { return tested.param; });
INSTANTIATE_TEST_SUITE_P(All,
                         TensorLossParity,
                         ::testing::ValuesIn(CutCaseNames()),
                         [](const auto& tested) { return tested.param; });

// Ranks of a tensor axis, with all tokens or their own, beside what a job may have with them.
void ExpectRanksHaveTheBitsOfOne(const std::string& model,
                                 const std::function<void(plan::JobSpec&)>& change) {
  const auto record = [&](const StrategyCase& tested) {
    RecordArgs args = ArgsOf(tested, PartsJob(tested, model, 4));
    change(args.spec);
    args.last_step = Steps();
    args.evaluate_every_step = true;
    return Record(args);
  };
  const Recording one = record({.strategy = "ZeRO0"});
  EXPECT_EQ(FirstDifference(one, record({.strategy = "ZeRO3", .width = 2, .tensor = 2})), "");
  EXPECT_EQ(FirstDifference(one, record({.strategy = "ZeRO1", .tensor = 4, .sequence = true})), "");
}

TEST(TensorParts, RanksHaveTheBitsOfOneInFp16) {
  for (const char* model : {"llama", "gpt2"}) {
    ExpectRanksHaveTheBitsOfOne(
        model, [](plan::JobSpec& spec) { spec.compute = plan::ComputeType::kF16; });
  }
}

TEST(TensorParts, RanksHaveTheBitsOfOneWithStateInFiles) {
  const std::string folder = OwnFolder("ravel_tensor_offload");
  std::filesystem::create_directories(folder);
  for (const char* model : {"llama", "qwen3"}) {
    ExpectRanksHaveTheBitsOfOne(model, [&](plan::JobSpec& spec) {
      spec.optimizer.offload = {.fraction = 1, .path = folder};
    });
  }
  std::filesystem::remove_all(folder);
}

TEST(TensorParts, RanksHaveTheBitsOfOneWithNarrowStates) {
  ExpectRanksHaveTheBitsOfOne("qwen3", [](plan::JobSpec& spec) {
    spec.compute = plan::ComputeType::kBF16;
    spec.optimizer.main_weights = plan::MainWeightForm::kBF16Remainder;
    spec.optimizer.state_types = {DType::kBF16, DType::kBF16};
  });
}

// Groups of 128 elements of a row share a scale; parts are whole groups.
TEST(TensorParts, RanksHaveTheBitsOfOneWithStatesOfFp8) {
  for (const char* model : {"llama", "gpt2"}) {
    ExpectRanksHaveTheBitsOfOne(model, [](plan::JobSpec& spec) {
      spec.optimizer.state_types = plan::kFp8States;
      spec.model->hidden_size = 512;
      spec.model->head_dim = 128;
      spec.model->intermediate_size = 512;
    });
  }
}

TEST(TensorParts, AreAnotherOrderOfTheSameSums) {
  for (const char* model : {"llama", "gpt2"}) {
    const StrategyCase tested = {.strategy = "ZeRO0"};
    const Recording one = RecordParts(tested, model, 1);
    const Recording& four = OneRank(model, 1);
    EXPECT_NE(FirstDifference(one, four), "") << model;
    ASSERT_EQ(one.steps.size(), four.steps.size());
    for (size_t step = 0; step < one.steps.size(); ++step) {
      EXPECT_NEAR(four.steps[step].loss / one.steps[step].loss, 1.0, 1e-4) << model << step;
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
