// The engine in bf16 on an emulated CUDA device: weights that modules read and activations are
// bf16, main weights, gradients, moments and statistics fp32. Any number of ranks and any strategy
// must give the same bits.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/scalar/bfloat16.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/golden_curves.h"

namespace ravel::trainer {
namespace {

using kernels::CudaGpu;

class GpuBf16 : public GpuEngine {};

RecordArgs Bf16Steps(const StrategyCase& tested, const std::string& model = "odd_tied") {
  RecordArgs args = DeviceSteps(tested, model);
  args.spec.compute = plan::ComputeType::kBF16;
  return args;
}

// One rank, by number of micro-batches.
const Recording& Bf16Reference(CudaGpu& gpu, int64_t micro_batches) {
  return RecordedOnce(gpu,
                      absl::StrCat("bf16, ", micro_batches),
                      Bf16Steps({.micro_batches = micro_batches, .in_place = true}));
}

class GpuBf16Strategies : public GpuBf16, public ::testing::WithParamInterface<StrategyCase> {};

TEST_P(GpuBf16Strategies, GiveTheBitsOfOneRank) {
  const Recording run = RecordOn(gpu(), Bf16Steps(GetParam()));
  ExpectEqualRuns(Bf16Reference(gpu(), GetParam().micro_batches), run, GetParam().name());
}

std::vector<StrategyCase> Bf16Cases() {
  std::vector<StrategyCase> cases = DeviceCases();
  cases.push_back({.strategy = "ZeRO2", .width = 2, .recompute = plan::RecomputePolicy::kMlp});
  cases.push_back({.strategy = "ZeRO1", .width = 2, .recompute = plan::RecomputePolicy::kNorm});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Few,
                         GpuBf16Strategies,
                         ::testing::ValuesIn(Bf16Cases()),
                         [](const auto& tested) { return tested.param.name(); });

TEST_F(GpuBf16, EveryModelTrainsAndDiffersFromFp32AsFarAsBf16Does) {
  for (const std::string& model : CaseNames()) {
    RecordArgs narrow = Bf16Steps({.strategy = "ZeRO3"}, model);
    const Recording one = RecordOn(gpu(), narrow);
    RecordArgs wide = narrow;
    wide.spec.compute = plan::ComputeType::kF32;
    const Recording fp32 = RecordOn(gpu(), wide);
    ASSERT_EQ(one.steps.size(), fp32.steps.size()) << model;
    EXPECT_NE(one.steps.front().loss, fp32.steps.front().loss) << model;
    for (size_t i = 0; i < one.steps.size(); ++i) {
      EXPECT_NEAR(one.steps[i].loss, fp32.steps[i].loss, 5e-3 * fp32.steps[i].loss) << model;
      EXPECT_NEAR(one.steps[i].grad_norm / fp32.steps[i].grad_norm, 1, 0.03) << model;
      EXPECT_NEAR(one.validation[i], fp32.validation[i], 5e-3 * fp32.validation[i]) << model;
    }
    EXPECT_LT(RelativeDifference(fp32.exp_avg, one.exp_avg), 0.05) << model;
    const RecordArgs two = Bf16Steps({.strategy = "ZeRO3", .width = 2}, model);
    ExpectEqualRuns(one, RecordOn(gpu(), two), model);
  }
}

class GpuBf16LossParity : public GpuBf16, public ::testing::WithParamInterface<std::string> {};

// Steps against curves that PyTorch made in bf16 over fp32 weights; both round, elsewhere.
TEST_P(GpuBf16LossParity, EveryStepIsNearPyTorchs) {
  std::vector<GoldenStep> golden = GoldenCurve(GetParam() + "_bf16");
  golden.resize(static_cast<size_t>(ComparedSteps(kGoldenSteps)));
  RecordArgs args = {.spec = CaseJob(GetParam(), ::testing::TempDir() + "/ravel_gpu_loss_bf16"),
                     .last_step = ComparedSteps(kGoldenSteps),
                     .gpu = &gpu()};
  args.spec.cpu_devices = false;
  args.spec.compute = plan::ComputeType::kBF16;
  const Recording one = Record(args);
  const CurveDistance worst = DistanceToGolden(golden, one);
  std::printf("%s in bf16: worst relative difference of the loss %.3g, of the norm %.3g\n",
              GetParam().c_str(),
              worst.loss,
              worst.grad_norm);
  EXPECT_LE(worst.loss, 5e-3);
  EXPECT_LE(worst.grad_norm, 0.05);
  args.ranks = 2;
  EXPECT_EQ(FirstDifference(one, Record(args)), "");
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         GpuBf16LossParity,
                         ::testing::ValuesIn(CaseNames()),
                         [](const auto& tested) { return tested.param; });

// Both passes, with the workspace that the plan gives them, and nothing new later.
TEST_F(GpuBf16, AttentionIsChosenBeforeTheFirstStep) {
  const RecordArgs args = Bf16Steps({.strategy = "ZeRO3"}, "bundled_rope_scaling");
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    const std::string before = engine.AttentionReport();
    EXPECT_THAT(before, ::testing::HasSubstr("fwd-"));
    EXPECT_THAT(before, ::testing::HasSubstr("bwd-det-"));
    EXPECT_THAT(before, ::testing::Not(::testing::HasSubstr("in parts")));
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.Evaluate().status());
    EXPECT_EQ(engine.AttentionReport(), before);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
}

TEST_F(GpuBf16, AStateGoesOnAtAnotherWidthAndStrategyWithTheSameBits) {
  RecordArgs first = Bf16Steps({.strategy = "ZeRO3", .width = 4});
  first.last_step = 2;
  const Recording saved = RecordOn(gpu(), first);
  const Recording& whole = Bf16Reference(gpu(), 1);
  for (const StrategyCase& tested :
       {StrategyCase{.strategy = "ZeRO1", .width = 2, .in_place = true},
        StrategyCase{.strategy = "ZeRO0", .width = 1},
        StrategyCase{.strategy = "HFSDP", .width = 2}}) {
    RecordArgs args = Bf16Steps(tested);
    args.first_step = 2;
    args.start = &saved;
    Recording resumed = RecordOn(gpu(), args);
    PutBefore(saved, resumed);
    ExpectEqualRuns(whole, resumed, tested.name());
  }
}

TEST_F(GpuBf16, ModelWeightsAreTheMainWeightsRoundedHalfAway) {
  for (const char* strategy : {"ZeRO3", "HFSDP", "ZeRO0"}) {
    const StrategyCase tested = {.strategy = strategy, .width = 2};
    RecordArgs args = Bf16Steps(tested);
    args.spec.freeze = {"*layers.1.*"};  // of frozen tensors, too
    std::atomic<int64_t> rounded = 0;
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 2; ++step) {
        for (const shard::ParameterGroup& group : engine.groups()) {
          std::vector<float> main(static_cast<size_t>(group.shard_elements()));
          std::vector<uint16_t> model(main.size());
          RETURN_IF_ERROR(
              engine.memory().Read(group.main_weight(), std::as_writable_bytes(std::span(main))));
          RETURN_IF_ERROR(engine.memory().Read(group.stored_model_weight(),
                                               std::as_writable_bytes(std::span(model))));
          for (const plan::OwnedPiece& piece : group.pieces()) {
            for (int64_t i = 0; i < piece.elements(); ++i) {
              const auto at = static_cast<size_t>(piece.shard_offset + i);
              EXPECT_EQ(model[at], kernels::scalar::Bf16HalfAway(main[at]));
              rounded += kernels::scalar::Bf16Value(model[at]) != main[at] ? 1 : 0;
            }
          }
        }
        RETURN_IF_ERROR(engine.TrainStep(step).status());
      }
      return absl::OkStatus();
    };
    EXPECT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
    EXPECT_GT(rounded, 1000) << strategy;
  }
}

TEST_F(GpuBf16, FrozenWeightsKeepTheirFp32Bits) {
  RecordArgs args = Bf16Steps({.strategy = "ZeRO3", .width = 2});
  args.spec.freeze = {"*mlp*"};
  const Recording two = RecordOn(gpu(), args);
  RecordArgs wide = args;
  wide.spec.compute = plan::ComputeType::kF32;
  const Recording fp32 = RecordOn(gpu(), wide);
  int64_t frozen = 0;
  for (const auto& [name, values] : two.weights) {
    if (name.find("mlp") != std::string::npos) {
      EXPECT_EQ(values, fp32.weights.at(name)) << name;
      ++frozen;
    }
  }
  EXPECT_GT(frozen, 0);
  RecordArgs one = Bf16Steps({.strategy = "ZeRO1"});
  one.spec.freeze = args.spec.freeze;
  ExpectEqualRuns(RecordOn(gpu(), one), two, "frozen");
}

TEST_F(GpuBf16, ABf16WireAndNormsHaveTheSameBitsOnAnyNumberOfRanks) {
  RecordArgs args = Bf16Steps({.strategy = "ZeRO3"});
  args.spec.gradient_wire = plan::WireType::kBF16;
  const Recording expected = RecordOn(gpu(), args);
  EXPECT_NE(FirstDifference(expected, Bf16Reference(gpu(), 1)), "");
  for (const int64_t width : {2, 3}) {
    args = Bf16Steps({.strategy = "ZeRO3", .width = width});
    args.spec.gradient_wire = plan::WireType::kBF16;
    args.spec.norms_every = 2;
    ExpectEqualRuns(expected, RecordOn(gpu(), args), absl::StrCat(width, " ranks"));
  }
}

// Steps whose layers stage their gradients in bf16.
RecordArgs NarrowSteps(const StrategyCase& tested, const std::string& model = "odd_tied") {
  RecordArgs args = Bf16Steps(tested, model);
  args.spec.gradient_wire = plan::WireType::kBF16;
  args.evaluate_every_step = false;
  return args;
}

// The same that are staged in fp32, and rounded for the wire.
RecordArgs RoundedSteps(const StrategyCase& tested, const std::string& model = "odd_tied") {
  RecordArgs args = NarrowSteps(tested, model);
  args.adjust = [in_place = tested.in_place](plan::ShardingPlan& plan) -> absl::Status {
    EXPECT_EQ(plan.options.staged_type, DType::kBF16);
    plan.options.gather_in_place = plan.options.gather_in_place && in_place;
    plan.options.staged_type = DType::kF32;
    return plan::PlanPrograms(plan);
  };
  return args;
}

TEST_F(GpuBf16, StagingInBf16HasTheBitsOfRoundingForTheWire) {
  const Recording expected = RecordOn(gpu(), RoundedSteps({.strategy = "ZeRO3"}));
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    for (const int64_t width : {1, 2, 3}) {
      const StrategyCase tested = {
          .strategy = strategy.name, .width = width, .in_place = width == 2};
      EXPECT_EQ(FirstDifference(expected, RecordOn(gpu(), NarrowSteps(tested))), "")
          << tested.name();
    }
  }
}

// Biases, LayerNorm, norms of heads, bundles, layers that are called twice or left out.
TEST_F(GpuBf16, StagingInBf16HasThoseBitsForEveryModel) {
  for (const std::string& model : CaseNames()) {
    const StrategyCase tested = {.strategy = "ZeRO2", .width = 2};
    EXPECT_EQ(FirstDifference(RecordOn(gpu(), RoundedSteps(tested, model)),
                              RecordOn(gpu(), NarrowSteps(tested, model))),
              "")
        << model;
  }
}

TEST_F(GpuBf16, PeakMemoryIsThePlan) {
  const int64_t before = gpu().memory_use().bytes;
  gpu().ForgetMostBytes();
  const RecordArgs args = Bf16Steps({.strategy = "ZeRO3", .width = 2, .in_place = true});
  std::atomic<int64_t> planned = 0;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.measured_bytes(), engine.planned_bytes());
    planned += engine.planned_bytes() + engine.device_bytes();
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    return engine.Evaluate().status();
  };
  ASSERT_EQ(RunOn(gpu(), args, body), absl::OkStatus());
  constexpr int64_t kSlack = 8192;
  EXPECT_LE(std::abs(gpu().memory_use().most_bytes - before - planned), kSlack);
}

TEST_F(GpuBf16, ANanIsSkippedAndExplained) {
  ExpectANanIsSkippedAndExplained(gpu(), Bf16Steps({.strategy = "ZeRO3", .width = 2}));
}

}  // namespace
}  // namespace ravel::trainer
