// What only an emulated device shows (tests/testing/emulated_cuda): waits that are missing, and
// bits that are the host's. No device code runs: what computes are the host's ops, with the partial
// sums of the device's kernels. So runs on the device have the bits of the host up to the order of
// a sum. What holds on any device lies in tests/gpu/engine_gpu_test.cc.

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/emulated_nccl/emulated_nccl.h"
#include "tests/testing/fake_supervisor.h"

namespace ravel::trainer {
namespace {

constexpr char kUnordered[] = "no event orders stream";
constexpr char kLibrary[] = "RAVEL_CUDA_LIBRARY";

Recording RecordOnEmulated(RecordArgs args) {
  setenv(kLibrary, RAVEL_EMULATED_CUDA_LIBRARY, 1);
  const auto gpu = OpenDevice();
  CHECK_MSG(gpu.ok(), std::string(gpu.status().message()).c_str());
  return RecordOn(**gpu, std::move(args));
}

void ExpectNearHost(const Recording& host, const Recording& device, const std::string& name) {
  ASSERT_EQ(device.steps.size(), host.steps.size()) << name;
  EXPECT_EQ(device.steps.front().loss, host.steps.front().loss) << name;
  for (size_t i = 0; i < host.steps.size(); ++i) {
    EXPECT_NEAR(device.steps[i].loss, host.steps[i].loss, 1e-5 * host.steps[i].loss) << name;
    EXPECT_NEAR(device.steps[i].grad_norm, host.steps[i].grad_norm, 1e-5) << name;
    EXPECT_NEAR(device.validation[i], host.validation[i], 1e-5 * host.validation[i]) << name;
  }
  EXPECT_LT(RelativeDifference(host.exp_avg, device.exp_avg), 1e-5) << name;
  EXPECT_LT(RelativeDifference(host.exp_avg_sq, device.exp_avg_sq), 1e-5) << name;
  EXPECT_EQ(device.updates, host.updates) << name;
}

TEST(DeviceEngine, EveryModelTrainsAsOnTheHost) {
  for (const char* model : {"odd_tied",
                            "odd_untied",
                            "qwen2_tied",
                            "qwen3_untied",
                            "gpt2_tied",
                            "shared_layers",
                            "layer_drop"}) {
    const RecordArgs one = DeviceSteps({.strategy = "ZeRO3"}, model);
    const Recording device = RecordOnEmulated(one);
    ExpectNearHost(Record(one), device, model);
    const RecordArgs two = DeviceSteps({.strategy = "ZeRO3", .width = 2}, model);
    ExpectEqualRuns(device, RecordOnEmulated(two), model);
  }
}

// What is pushed by one rank while it trains, each name indented by the ranges around it.
std::string RangesOf(const RecordArgs& args) {
  void* library = dlopen(RAVEL_EMULATED_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  const auto record =
      reinterpret_cast<void (*)(std::string*)>(dlsym(library, "ravel_emulated_ranges"));
  CHECK(record != nullptr);
  std::string ranges;
  record(&ranges);
  RecordOnEmulated(args);
  record(nullptr);
  return ranges;
}

TEST(DeviceEngine, ProfilersSeeProgramsAndTheirInstructionsByName) {
  const std::string ranges = RangesOf(DeviceSteps({.strategy = "ZeRO3"}));
  for (const char* text : {"\nprogram middle, whole\n",
                           "\nprogram last, whole\n",
                           "\n  Forward embed\n",
                           "\n  Backward layers.0\n",
                           "\n  OptimizerStep "}) {
    EXPECT_THAT(ranges, ::testing::HasSubstr(text));
  }
  EXPECT_EQ(ranges.find("program first, whole\n"), 0u);
  EXPECT_EQ(ranges.find("\n    "), std::string::npos);  // each range ends before the next begins
}

TEST(DeviceTrainer, WithoutTheLibraryAJobForGpusEndsWithDeviceError) {
  setenv(kLibrary, "/nonexistent/libravel_cuda.so", 1);
  EpochArgs args;
  args.spec = DeviceSteps({}).spec;
  args.spec.cpu_devices = false;
  const EpochOutcome outcome = RunEpoch(args);
  ASSERT_EQ(outcome.results.size(), 1u);
  EXPECT_EQ(CodeOf(outcome.results[0]), ExitCode::kDevice);
  EXPECT_EQ(ReasonOf(outcome.results[0]), "DeviceError");
  EXPECT_THAT(std::string(outcome.results[0].message()),
              ::testing::HasSubstr("/nonexistent/libravel_cuda.so not found"));
}

// Of the emulated NCCL in this process.
kernels::cuda::emulated::EmulatedNcclCounts NcclCounts() {
  void* library = dlopen(RAVEL_EMULATED_NCCL_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  void* symbol = dlsym(library, kernels::cuda::emulated::kEmulatedNcclCounts);
  CHECK(symbol != nullptr);
  kernels::cuda::emulated::EmulatedNcclCounts counts = {};
  reinterpret_cast<kernels::cuda::emulated::EmulatedNcclCountsFunction>(symbol)(&counts);
  return counts;
}

std::vector<float> LossesOf(const EpochOutcome& outcome) {
  std::vector<float> losses;
  for (const StepReport& step : outcome.steps) {
    losses.push_back(step.loss);
  }
  return losses;
}

// Trainers over NCCL, here threads of one process: with the blocks that the plan gives collectives,
// and a checkpoint that goes on at other widths.
TEST(DeviceTrainer, TrainersOverNcclGoOnAtAnotherWidth) {
  setenv(kLibrary, RAVEL_EMULATED_CUDA_LIBRARY, 1);
  setenv("RAVEL_NCCL_LIBRARY", RAVEL_EMULATED_NCCL_LIBRARY, 1);
  const std::string folder = OwnFolder("ravel_device_nccl");
  std::filesystem::remove_all(folder);
  EpochArgs args;
  args.spec = CaseJob("odd_tied", folder);
  args.spec.cpu_devices = false;
  args.spec.steps = 6;
  args.spec.evaluation_every = 0;
  args.spec.checkpoint.every_steps = 2;
  args.spec.communication_blocks = 3;
  args.transport = "nccl";
  args.checkpoint_root = folder + "/store-1";
  args.ranks = 4;
  const EpochOutcome whole = RunEpoch(args);
  for (const absl::Status& result : whole.results) {
    ASSERT_TRUE(result.ok()) << result;
  }
  EXPECT_EQ(NcclCounts().max_ctas, 3);
  ASSERT_EQ(whole.steps.size(), 6u);
  ASSERT_TRUE(whole.committed.contains(2));
  args.restore_path = whole.committed.at(2);
  args.first_step = 2;
  const std::vector<float> losses = LossesOf(whole);
  for (const int ranks : {3, 2, 1}) {
    args.ranks = ranks;
    args.epoch += 1;
    args.checkpoint_root = absl::StrCat(folder, "/store-", args.epoch);
    const EpochOutcome resumed = RunEpoch(args);
    EXPECT_THAT(resumed.results, ::testing::Each(absl::OkStatus()));
    EXPECT_EQ(LossesOf(resumed), std::vector<float>(losses.begin() + 2, losses.end())) << ranks;
  }
  std::filesystem::remove_all(folder);
}

// Moments that live and are saved as bf16: the same state at the end, whoever went on with whose
// save.
TEST(DeviceTrainer, Bf16MomentsGoOnAtAnotherWidthUnderAnotherStrategy) {
  setenv(kLibrary, RAVEL_EMULATED_CUDA_LIBRARY, 1);
  setenv("RAVEL_NCCL_LIBRARY", RAVEL_EMULATED_NCCL_LIBRARY, 1);
  const std::string folder = OwnFolder("ravel_device_bf16_moments");
  std::filesystem::remove_all(folder);
  int64_t epoch = 0;
  const auto run = [&](const StrategyCase& tested, plan::MainWeightForm form, std::string from) {
    EpochArgs args;
    args.spec = JobOf(tested, "odd_tied", folder);
    args.spec.cpu_devices = false;
    args.spec.compute = plan::ComputeType::kBF16;
    args.spec.optimizer.main_weights = form;
    args.spec.optimizer.state_types = plan::kBf16States;
    args.spec.steps = 4;
    args.spec.evaluation_every = 0;
    args.spec.checkpoint.every_steps = 2;
    args.transport = "nccl";
    args.ranks = tested.ranks();
    args.epoch = ++epoch;
    args.checkpoint_root = absl::StrCat(folder, "/store-", epoch);
    args.first_step = from.empty() ? 0 : 2;
    args.restore_path = std::move(from);
    const EpochOutcome outcome = RunEpoch(args);
    EXPECT_THAT(outcome.results, ::testing::Each(absl::OkStatus())) << tested.name();
    EXPECT_THAT(outcome.commit_errors, ::testing::IsEmpty()) << tested.name();
    return outcome.committed;
  };
  const auto digest_of = [](const std::string& directory) {
    const std::filesystem::path path(directory);
    const store::FileStore store(path.parent_path().string());
    const auto step = store::CommittedStep::Open(&store, path.filename().string());
    CHECK_MSG(step.ok(), std::string(step.status().message()).c_str());
    const ckpt::TensorRecord* moment =
        step->manifest().FindTensor("state.model.embed_tokens.weight.exp_avg");
    EXPECT_EQ(moment->stored_dtype, DType::kBF16) << directory;
    return step->manifest().state_digest;
  };
  constexpr auto kWide = plan::MainWeightForm::kF32;
  constexpr auto kSplit = plan::MainWeightForm::kBF16Remainder;
  const auto whole = run({.strategy = "ZeRO3", .width = 3}, kSplit, "");
  const auto other = run({.strategy = "HFSDP", .width = 2}, kWide, "");
  for (const int64_t step : {2, 4}) {
    EXPECT_EQ(digest_of(other.at(step)), digest_of(whole.at(step)));
  }
  for (const StrategyCase& next : {StrategyCase{.strategy = "ZeRO3", .width = 1},
                                   StrategyCase{.strategy = "ZeRO1", .width = 2},
                                   StrategyCase{.strategy = "HSDP", .width = 2},
                                   StrategyCase{.strategy = "ZeRO0", .width = 3}}) {
    const auto& from = epoch % 2 == 0 ? whole : other;
    const auto rest = run(next, epoch % 2 == 0 ? kWide : kSplit, from.at(2));
    EXPECT_EQ(digest_of(rest.at(4)), digest_of(whole.at(4))) << next.name();
  }
  std::filesystem::remove_all(folder);
}

// A wait of the plan between streams that nothing else implies: of a Forward for its Gather.
TEST(DeviceEngineDeathTest, AWaitThatIsDroppedIsFound) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const StrategyCase tested = {.strategy = "ZeRO3", .width = 2, .small_windows = true};
  RecordArgs args = DeviceSteps(tested);
  const auto adjust = args.adjust;
  const auto drop = [&](plan::OpCode waiter, plan::OpCode awaited) {
    args.adjust = [=](plan::ShardingPlan& plan) -> absl::Status {
      RETURN_IF_ERROR(adjust(plan));
      int dropped = 0;
      for (plan::StepProgram& program : plan.programs) {
        for (plan::Instruction& instruction : program.instructions) {
          if (instruction.op == waiter) {
            dropped +=
                static_cast<int>(std::erase_if(instruction.waits, [&](plan::InstructionId wait) {
                  return program.instructions[wait].op == awaited;
                }));
          }
        }
      }
      CHECK_MSG(dropped > 0, "the plan has no such wait");
      return absl::OkStatus();
    };
  };
  drop(plan::OpCode::kForward, plan::OpCode::kGather);
  EXPECT_DEATH(RecordOnEmulated(args), kUnordered);
  drop(plan::OpCode::kReduce, plan::OpCode::kBackward);
  EXPECT_DEATH(RecordOnEmulated(args), kUnordered);
}

}  // namespace
}  // namespace ravel::trainer
