// The whole training step on a device whose ranks are threads of this process: every strategy and
// width has the same bits, losses are PyTorch's, saves go on elsewhere, memory is the plan's.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/logits_chunk.h"
#include "tests/gpu/engine_device.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "tests/testing/golden_curves.h"

namespace ravel::trainer {
namespace {

using kernels::CudaGpu;

// -- bits

// One rank, by number of micro-batches.
const Recording& OneRank(CudaGpu& gpu, int64_t micro_batches) {
  return RecordedOnce(gpu,
                      absl::StrCat("fp32, ", micro_batches),
                      DeviceSteps({.micro_batches = micro_batches, .in_place = true}));
}

class GpuStrategies : public GpuEngine, public ::testing::WithParamInterface<StrategyCase> {};

TEST_P(GpuStrategies, GiveTheBitsOfOneRank) {
  const Recording run = RecordOn(gpu(), DeviceSteps(GetParam()));
  ExpectEqualRuns(OneRank(gpu(), GetParam().micro_batches), run, GetParam().name());
}

INSTANTIATE_TEST_SUITE_P(Few,
                         GpuStrategies,
                         ::testing::ValuesIn(DeviceCases()),
                         [](const auto& tested) { return tested.param.name(); });

// Needs no device.
TEST(GpuStrategyPlans, EveryCaseIsAPlanOfItsOwn) {
  std::map<std::string, std::string> names;
  for (const StrategyCase& tested : DeviceCases()) {
    const std::string hash = PlanHash(tested, DeviceSteps(tested).spec);
    const auto [known, fresh] = names.emplace(hash, tested.name());
    EXPECT_TRUE(fresh) << tested.name() << " runs the plan of " << known->second;
  }
}

TEST_F(GpuEngine, Bf16WireHasTheSameBitsOnAnyNumberOfRanks) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3"});
  args.spec.gradient_wire = plan::WireType::kBF16;
  const Recording expected = RecordOn(gpu(), args);
  EXPECT_NE(FirstDifference(expected, OneRank(gpu(), 1)), "");
  for (const int64_t width : {2, 3}) {
    args = DeviceSteps({.strategy = "ZeRO3", .width = width});
    args.spec.gradient_wire = plan::WireType::kBF16;
    ExpectEqualRuns(expected, RecordOn(gpu(), args), absl::StrCat(width, " ranks"));
  }
}

// Two sequences of 200 tokens to a micro-batch: as planned for a GPU, at once; or in chunks.
TEST_F(GpuEngine, TheHeadsChunkIsThePlansOnAnyNumberOfRanks) {
  const auto steps_by = [&](int64_t chunk_tokens, int64_t width) {
    RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = width});
    args.spec.cpu_devices = false;
    args.spec.model->max_position_embeddings = 256;
    args.spec.data.sequence_length = 200;
    args.spec.global_batch = 2 * args.spec.virtual_ranks;
    args.spec.micro_batch = 2;
    args.evaluate_every_step = false;
    args.adjust = [chunk_tokens](plan::ShardingPlan& plan) -> absl::Status {
      EXPECT_EQ(plan.options.logits_chunk_tokens, plan::kMostLogitsTokens);
      plan.options.logits_chunk_tokens = chunk_tokens;
      plan::ReserveLogits(chunk_tokens, plan.micro_batch, plan.inventory);
      return plan::PlanPrograms(plan);
    };
    return RecordOn(gpu(), args);
  };
  const Recording whole = steps_by(plan::kMostLogitsTokens, 1);
  EXPECT_EQ(FirstDifference(whole, steps_by(plan::kMostLogitsTokens, 2)), "");
  EXPECT_EQ(FirstDifference(whole, steps_by(400, 1)), "");
  for (const int64_t chunk : {256, 130}) {
    const Recording parts = steps_by(chunk, 1);
    EXPECT_EQ(FirstDifference(parts, steps_by(chunk, 2)), "") << chunk;
    EXPECT_NE(FirstDifference(parts, whole), "") << chunk;
    EXPECT_EQ(parts.steps.front().loss, whole.steps.front().loss);
    EXPECT_LT(RelativeDifference(whole.exp_avg, parts.exp_avg), 1e-5) << chunk;
  }
}

TEST_F(GpuEngine, MeasuringNormsChangesNoBit) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO2", .width = 2});
  args.spec.norms_every = 2;
  ExpectEqualRuns(OneRank(gpu(), 1), RecordOn(gpu(), args), "norms");
}

TEST_F(GpuEngine, EvaluationChangesNoBit) {
  for (const char* strategy : {"ZeRO1", "ZeRO3", "HFSDP"}) {
    RecordArgs args = DeviceSteps({.strategy = strategy, .width = 2, .micro_batches = 3});
    const Recording with = RecordOn(gpu(), args);
    ASSERT_EQ(with.validation.size(), static_cast<size_t>(kDeviceSteps));
    EXPECT_LT(with.validation.back(), with.validation.front());
    args.evaluate_every_step = false;
    EXPECT_EQ(FirstDifference(with, RecordOn(gpu(), args)), "") << strategy;
  }
}

TEST_F(GpuEngine, AnyStepGoesOnWithAnotherWidthAndStrategyInTheSameBits) {
  const std::vector<StrategyCase> turns = {
      {.strategy = "ZeRO3", .width = 4, .in_place = true},
      {.strategy = "ZeRO0", .width = 2},
      {.strategy = "HFSDP", .width = 2, .recompute = plan::RecomputePolicy::kBlock}};
  Recording state;
  std::vector<StepResult> steps;
  std::vector<float> validation;
  for (int64_t step = 0; step < kDeviceSteps; ++step) {
    RecordArgs args = DeviceSteps(turns[static_cast<size_t>(step)]);
    args.first_step = step;
    args.last_step = step + 1;
    args.start = step == 0 ? nullptr : &state;
    Recording next = RecordOn(gpu(), args);
    steps.insert(steps.end(), next.steps.begin(), next.steps.end());
    validation.insert(validation.end(), next.validation.begin(), next.validation.end());
    state = std::move(next);
  }
  state.steps = steps;
  state.validation = validation;
  ExpectEqualRuns(OneRank(gpu(), 1), state, "turns");
}

// -- losses

class GpuLossParity : public GpuEngine, public ::testing::WithParamInterface<std::string> {};

// Steps in fp32 against curves that PyTorch made on a CPU.
TEST_P(GpuLossParity, EveryStepEqualsPyTorchToOneInTenThousand) {
  std::vector<GoldenStep> golden = GoldenCurve(GetParam());
  ASSERT_EQ(static_cast<int64_t>(golden.size()), kGoldenSteps);
  golden.resize(static_cast<size_t>(ComparedSteps(kGoldenSteps)));
  Recording first;
  for (const int ranks : {1, 2}) {
    const Recording run =
        Record({.spec = CaseJob(GetParam(), absl::StrCat(::testing::TempDir(), "/ravel_gpu_loss")),
                .ranks = ranks,
                .last_step = ComparedSteps(kGoldenSteps),
                .gpu = &gpu()});
    const CurveDistance worst = DistanceToGolden(golden, run);
    EXPECT_LE(worst.loss, 1e-4) << ranks << " ranks";
    EXPECT_LE(worst.grad_norm, 1e-3) << ranks << " ranks";
    std::printf("%s on %d ranks: worst relative difference of the loss %.3g, of the norm %.3g\n",
                GetParam().c_str(),
                ranks,
                worst.loss,
                worst.grad_norm);
    if (ranks == 1) {
      first = run;
    } else {
      EXPECT_EQ(FirstDifference(first, run), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases,
                         GpuLossParity,
                         ::testing::ValuesIn(CaseNames()),
                         [](const auto& tested) { return tested.param; });

// -- what a step without finite gradients says

TEST_F(GpuEngine, AStepWithoutFiniteGradientsIsSkippedAndExplained) {
  ExpectANanIsSkippedAndExplained(gpu(), DeviceSteps({.strategy = "ZeRO3", .width = 2}));
}

// -- memory

// Of all ranks of one run.
struct MeasuredMemory {
  std::atomic<int64_t> arenas = 0;  // as planned
  std::atomic<int64_t> beside = 0;  // as engines report it
  std::atomic<int64_t> before_steps = 0;
  std::atomic<int64_t> allocations = 0;
  std::atomic<int64_t> least_free = std::numeric_limits<int64_t>::max();
};

absl::Status TrainAndMeasure(CudaGpu& gpu, const RecordArgs& args, MeasuredMemory& measured) {
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    measured.arenas += engine.planned_bytes();
    measured.beside += engine.device_bytes();
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.Evaluate().status());  // all ranks have allocated what they will
    measured.before_steps = gpu.memory_use().bytes;
    measured.allocations = gpu.memory_use().allocations;
    for (int64_t step = 0; step < 2; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      RETURN_IF_ERROR(engine.Evaluate().status());
      ASSIGN_OR_RETURN(const int64_t free_bytes, gpu.FreeBytes());
      measured.least_free = std::min<int64_t>(measured.least_free, free_bytes);
    }
    return engine.Evaluate().status();  // nobody has gone before all have looked
  };
  return RunOn(gpu, args, body);
}

// Counted: what this process allocates on the device at its peak, against arenas as planned and the
// memory beside them that engines report (scratch of gemms, statistics). The driver's own
// figure comes in blocks, some of which it keeps, and holds its context, code and what cuBLASLt and
// cuDNN keep: its growth over a run that comes after another of the same kind may differ from the
// count by a block for each allocation, and no more.
TEST_F(GpuEngine, PeakMemoryIsThePlan) {
  constexpr int64_t kMebibyte = int64_t{1} << 20;
  constexpr int64_t kDriverBlock = 2 * kMebibyte;
  for (const char* strategy : {"ZeRO0", "ZeRO3", "HFSDP"}) {
    const StrategyCase tested = {.strategy = strategy, .width = 2, .in_place = true};
    const RecordArgs args = DeviceSteps(tested);
    MeasuredMemory warm_up;
    ASSERT_EQ(TrainAndMeasure(gpu(), args, warm_up), absl::OkStatus());
    const CudaGpu::MemoryUse before = gpu().memory_use();
    const int64_t free_before = *gpu().FreeBytes();
    gpu().ForgetMostBytes();
    MeasuredMemory measured;
    ASSERT_EQ(TrainAndMeasure(gpu(), args, measured), absl::OkStatus());
    const int64_t planned = measured.arenas + measured.beside;
    const int64_t peak = gpu().memory_use().most_bytes - before.bytes;
    const int64_t driver = free_before - measured.least_free;
    std::printf(
        "%s: planned %lld (arenas %lld, beside them %lld), peak %lld, driver's figure %lld\n",
        tested.name().c_str(),
        static_cast<long long>(planned),
        static_cast<long long>(measured.arenas),
        static_cast<long long>(measured.beside),
        static_cast<long long>(peak),
        static_cast<long long>(driver));
    EXPECT_LE(std::abs(peak - planned), kMebibyte);
    EXPECT_EQ(measured.before_steps - before.bytes, peak) << "steps allocate nothing";
    EXPECT_EQ(gpu().memory_use().bytes, before.bytes);
    EXPECT_EQ(gpu().memory_use().allocations, before.allocations);
    const int64_t allocations = measured.allocations - before.allocations;
    EXPECT_LE(std::abs(driver - peak), kDriverBlock * allocations) << allocations << " allocations";
  }
}

// -- saves

class GpuSaves : public GpuEngine {
 protected:
  GpuSaves() { std::filesystem::remove_all(folder_); }
  ~GpuSaves() override { std::filesystem::remove_all(folder_); }

  EpochArgs Epoch(bool on_device, int ranks) {
    EpochArgs args;
    args.spec = CaseJob("odd_tied", folder_);
    args.spec.steps = 5;
    args.spec.checkpoint.every_steps = 2;
    args.spec.evaluation_every = 0;
    args.spec.cpu_devices = !on_device;
    args.ranks = ranks;
    args.epoch = ++epoch_;
    args.checkpoint_root = absl::StrCat(folder_, "/store-", epoch_);
    return args;
  }

  // It is expected to succeed.
  static EpochOutcome RunWell(const EpochArgs& args) {
    EpochOutcome outcome = RunEpoch(args);
    for (const absl::Status& result : outcome.results) {
      EXPECT_TRUE(result.ok()) << result;
    }
    EXPECT_TRUE(outcome.commit_errors.empty());
    return outcome;
  }

 private:
  const std::string folder_ = absl::StrCat(::testing::TempDir(), "/ravel_gpu_saves");
  int64_t epoch_ = 0;
};

// From the device to the device, to hosts of other widths, and back. Where it was saved it goes on
// with the same bits; elsewhere sums have other orders.
TEST_F(GpuSaves, AStateGoesOnWhereverItWasSaved) {
  constexpr size_t kSavedStep = 2;
  struct Side {
    bool device;
    int ranks;
  };
  for (const Side saved : {Side{true, 1}, Side{false, 2}}) {
    const EpochOutcome whole = RunWell(Epoch(saved.device, saved.ranks));
    ASSERT_TRUE(whole.committed.contains(kSavedStep));
    for (const Side goes_on : {Side{true, 1}, Side{false, 1}, Side{false, 3}}) {
      EpochArgs args = Epoch(goes_on.device, goes_on.ranks);
      args.restore_path = whole.committed.at(kSavedStep);
      args.first_step = kSavedStep;
      const EpochOutcome resumed = RunWell(args);
      ASSERT_EQ(resumed.steps.size(), whole.steps.size() - kSavedStep);
      for (size_t i = 0; i < resumed.steps.size(); ++i) {
        const float expected = whole.steps[kSavedStep + i].loss;
        const float other_side = (i == 0 ? 1e-5f : 1e-4f) * expected;
        EXPECT_NEAR(
            resumed.steps[i].loss, expected, goes_on.device == saved.device ? 0 : other_side)
            << (saved.device ? "device" : "host") << " to " << (goes_on.device ? "device" : "host")
            << " on " << goes_on.ranks << ", step " << i;
      }
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
