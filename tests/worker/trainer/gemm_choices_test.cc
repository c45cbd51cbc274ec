#include "worker/trainer/gemm_choices.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/mutex.h"
#include "common/store/committed_step.h"
#include "common/store/file_store.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/fake_supervisor.h"
#include "worker/comm/communicator_factory.h"

namespace ravel::trainer {
namespace {

using kernels::cuda::GemmAlgorithms;
using kernels::cuda::GemmChoice;
using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr char kCudaLibrarySetting[] = "RAVEL_CUDA_LIBRARY";
constexpr char kMixed[] = "RAVEL_EMULATED_MIXED";
constexpr uint64_t kOtherWorkspace = 1 << 16;  // of one of the emulated algorithms; the other's: 0

// Before anything opens the emulated devices.
const bool kTwoDevices = setenv("RAVEL_EMULATED_DEVICES", "2", 1) == 0;

std::unique_ptr<kernels::CudaGpu> NewGpu(int index = 0) {
  CHECK(kTwoDevices);
  setenv(kCudaLibrarySetting, RAVEL_EMULATED_CUDA_LIBRARY, 1);
  const auto library = kernels::CudaLibrary::Open(kernels::DefaultCudaLibraryPath());
  CHECK_MSG(library.ok(), std::string(library.status().message()).c_str());
  auto gpu = kernels::CudaGpu::Open(*library, index);
  CHECK_MSG(gpu.ok(), std::string(gpu.status().message()).c_str());
  return *std::move(gpu);
}

std::string EmptyFolder(const std::string& name) {
  std::string folder = OwnFolder(absl::StrCat("ravel_gemm_choices_", name));
  std::filesystem::remove_all(folder);
  return folder;
}

RecordArgs Case(int width, GemmOptions options) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = width});
  args.gemms = std::move(options);
  return args;
}

// What rank 0 has chosen, on a device that knows nothing yet.
GemmChoices ChooseOnce(const RecordArgs& args, kernels::CudaGpu* on = nullptr) {
  const std::unique_ptr<kernels::CudaGpu> fresh = on == nullptr ? NewGpu() : nullptr;
  GemmChoices choices;
  const absl::Status status =
      RunOn(on == nullptr ? *fresh : *on, args, [&](RankEngine& engine, int rank) {
        if (rank == 0) {
          choices = engine.gemm_choices();
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return choices;
}

std::map<std::string, GemmChoice> Parsed(const std::string& table) {
  GemmAlgorithms parsed(NewGpu()->algorithms().identity());
  const absl::Status read = parsed.AddText(table, "table");
  EXPECT_TRUE(read.ok()) << read;
  return parsed.choices();
}

// A table with the emulated algorithm of so much workspace for every gemm.
std::unique_ptr<GemmAlgorithms> WithWorkspace(const std::string& table, uint64_t workspace_bytes) {
  auto changed = std::make_unique<GemmAlgorithms>(NewGpu()->algorithms().identity());
  for (auto [key, choice] : Parsed(table)) {
    choice.algorithm.words[1] = workspace_bytes;
    choice.algorithm.workspace_bytes = workspace_bytes;
    changed->Put(key, choice);
  }
  return changed;
}

void ExpectAllHave(const std::string& table, uint64_t workspace_bytes) {
  const auto choices = Parsed(table);
  EXPECT_FALSE(choices.empty());
  for (const auto& [key, choice] : choices) {
    EXPECT_EQ(choice.algorithm.workspace_bytes, workspace_bytes) << key;
  }
}

TEST(GemmChoices, EachGemmIsMeasuredOnceBeforeTheFirstStepAndNoneLater) {
  const std::unique_ptr<kernels::CudaGpu> gpu = NewGpu();
  const RecordArgs args = Case(2, {});
  std::string before;
  std::vector<GemmChoices> choices(2);
  Recording unused;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    choices[static_cast<size_t>(rank)] = engine.gemm_choices();
    if (rank == 0) {
      before = gpu->algorithms().ToText();
    }
    Recording recording;
    return RunRank(args, engine, rank, recording);
  };
  const absl::Status run = RunOn(*gpu, args, body);
  ASSERT_TRUE(run.ok()) << run;
  EXPECT_GT(choices[0].gemms, 10);
  EXPECT_EQ(choices[0].measured, choices[0].gemms);
  EXPECT_EQ(choices[1].measured, 0);
  EXPECT_EQ(choices[1].gemms, choices[0].gemms);
  EXPECT_EQ(choices[1].table, choices[0].table);
  EXPECT_EQ(gpu->algorithms().ToText(), before);
  EXPECT_EQ(before, choices[0].table);
  for (const auto& [key, choice] : Parsed(before)) {
    EXPECT_GT(choice.microseconds, 0.0) << key;
  }
}

TEST(GemmChoices, MeasuringChangesNeitherBitsNorMemory) {
  for (const bool recomputes : {false, true}) {
    StrategyCase tested = {.strategy = "ZeRO3", .width = 2, .micro_batches = 3};
    tested.recompute = recomputes ? plan::RecomputePolicy::kBlock : plan::RecomputePolicy::kNone;
    RecordArgs args = DeviceSteps(tested);
    const std::unique_ptr<kernels::CudaGpu> plain = NewGpu();
    const Recording expected = RecordOn(*plain, args);
    const std::unique_ptr<kernels::CudaGpu> measured = NewGpu();
    args.gemms = GemmOptions();
    ExpectEqualRuns(expected, RecordOn(*measured, args), tested.name());
    EXPECT_EQ(measured->memory_use().most_bytes, plain->memory_use().most_bytes);
    // Nothing came up that was not rehearsed, and nothing was rehearsed in vain.
    EXPECT_EQ(measured->algorithms().size(), plain->algorithms().size());
  }
}

TEST(GemmChoices, TheSecondStartReadsTheDiskAndMeasuresNothing) {
  RecordArgs args = Case(1, {.cache_folder = EmptyFolder("disk")});
  const GemmChoices first = ChooseOnce(args);
  EXPECT_EQ(first.measured, first.gemms);
  const GemmChoices second = ChooseOnce(args);
  EXPECT_EQ(second.measured, 0);
  EXPECT_EQ(second.cached, first.gemms);
  EXPECT_EQ(second.table, first.table);
  args.gemms->measure = false;
  const GemmChoices proposed = ChooseOnce(args);
  EXPECT_EQ(proposed.proposed, first.gemms);
  ExpectAllHave(proposed.table, kOtherWorkspace);  // the first that is proposed
  std::filesystem::remove_all(args.gemms->cache_folder);
}

TEST(GemmChoices, TheCheckpointComesBeforeTheDisk) {
  RecordArgs args = Case(2, {.cache_folder = EmptyFolder("before")});
  const std::string measured = ChooseOnce(args).table;
  const std::unique_ptr<GemmAlgorithms> cached = WithWorkspace(measured, kOtherWorkspace);
  ASSERT_TRUE(cached->Save(absl::StrCat(args.gemms->cache_folder, "/", cached->FileName())).ok());
  ExpectAllHave(ChooseOnce(args).table, kOtherWorkspace);
  args.gemms->saved = WithWorkspace(measured, 0)->ToText();
  // What the device's table holds already does not count.
  const std::unique_ptr<kernels::CudaGpu> gpu = NewGpu();
  ASSERT_TRUE(gpu->algorithms().AddText(cached->ToText(), "cached").ok());
  const GemmChoices resumed = ChooseOnce(args, gpu.get());
  EXPECT_EQ(resumed.saved, resumed.gemms);
  EXPECT_EQ(resumed.cached + resumed.measured, 0);
  ExpectAllHave(resumed.table, 0);
  ExpectAllHave(gpu->algorithms().ToText(), 0);
  std::filesystem::remove_all(args.gemms->cache_folder);
}

TEST(GemmChoices, WhatOnlyAnEarlierSizeNeededStaysInTheTable) {
  RecordArgs args = Case(1, {});
  GemmAlgorithms saved(NewGpu()->algorithms().identity());
  saved.Put("of-an-earlier-size", {.algorithm = {}, .microseconds = 1.0});
  args.gemms->saved = saved.ToText();
  const GemmChoices choices = ChooseOnce(args);
  EXPECT_EQ(choices.measured, choices.gemms);
  EXPECT_TRUE(Parsed(choices.table).contains("of-an-earlier-size"));
}

TEST(GemmChoices, ABadFileIsMeasuredAgainAndReplaced) {
  RecordArgs args = Case(1, {.cache_folder = EmptyFolder("bad")});
  const GemmChoices first = ChooseOnce(args);
  const std::string path =
      absl::StrCat(args.gemms->cache_folder, "/", NewGpu()->algorithms().FileName());
  const std::string cut = first.table.substr(0, first.table.size() / 2);
  std::string flipped = first.table;
  flipped[flipped.size() / 2] ^= 1;
  for (const std::string& bad : {cut, flipped, std::string(), std::string("?\n")}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bad;
    EXPECT_EQ(ChooseOnce(args).measured, first.gemms);
    EXPECT_EQ(ChooseOnce(args).cached, first.gemms);
  }
  // A line that can be read and does not run.
  const std::unique_ptr<GemmAlgorithms> wrong = WithWorkspace(first.table, 0);
  auto [key, choice] = std::pair(*wrong->choices().begin());
  choice.algorithm.words[0] = 1;
  wrong->Put(key, choice);
  ASSERT_TRUE(wrong->Save(path).ok());
  const GemmChoices again = ChooseOnce(args);
  EXPECT_EQ(again.measured, 1);
  EXPECT_EQ(again.cached, first.gemms - 1);
  EXPECT_EQ(ChooseOnce(args).cached, first.gemms);
  std::filesystem::remove_all(args.gemms->cache_folder);
}

TEST(GemmChoices, ACheckpointsTableThatDoesNotFitIsLeftOut) {
  RecordArgs args = Case(1, {});
  const GemmChoices first = ChooseOnce(args);
  std::string damaged = first.table;
  damaged[damaged.size() - 5] ^= 1;
  GemmAlgorithms elsewhere("another device");
  for (const std::string& saved : {damaged, elsewhere.ToText(), std::string("\0\xFF", 2)}) {
    args.gemms->saved = saved;
    const GemmChoices choices = ChooseOnce(args);
    EXPECT_EQ(choices.saved, 0);
    EXPECT_EQ(choices.measured, first.gemms);
    EXPECT_THAT(choices.chosen_again, HasSubstr("bits may differ from those before: "));
  }
  EXPECT_EQ(first.chosen_again, "");
}

TEST(GemmChoices, ACheckpointsChoiceThatDoesNotRunIsMadeAgainAndTold) {
  RecordArgs args = Case(1, {});
  const GemmChoices first = ChooseOnce(args);
  const std::unique_ptr<GemmAlgorithms> wrong = WithWorkspace(first.table, 0);
  auto [key, choice] = std::pair(*wrong->choices().begin());
  choice.algorithm.words[0] = 1;
  wrong->Put(key, choice);
  args.gemms->saved = wrong->ToText();
  const GemmChoices again = ChooseOnce(args);
  EXPECT_EQ(again.measured, 1);
  EXPECT_EQ(again.saved, first.gemms - 1);
  EXPECT_THAT(again.chosen_again, HasSubstr(key));
}

TEST(GemmChoices, AFolderThatCannotBeWrittenIsNoError) {
  const std::string file = EmptyFolder("file");
  std::ofstream(file) << "not a folder";
  const GemmChoices choices = ChooseOnce(Case(1, {.cache_folder = file}));
  EXPECT_EQ(choices.measured, choices.gemms);
  std::filesystem::remove(file);
}

TEST(GemmChoices, CollectivesLeaveTheirBlocksToNoGemm) {
  RecordArgs args = Case(2, {});
  args.spec.communication_blocks = 20;
  for (const auto& [key, choice] : Parsed(ChooseOnce(args).table)) {
    EXPECT_THAT(key, EndsWith("-m112"));
  }
}

// Ranks as threads, each on a device of its own and with nothing in common but NCCL.
class NcclRanks {
 public:
  using Body = std::function<void(RankEngine& engine, int rank)>;
  static std::vector<absl::Status> Run(const RecordArgs& args, const Body& body) {
    setenv("RAVEL_NCCL_LIBRARY", RAVEL_EMULATED_NCCL_LIBRARY, 1);
    NcclRanks ranks(args);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < args.ranks; ++rank) {
      threads.emplace_back(
          [&, rank] { ranks.results_[static_cast<size_t>(rank)] = ranks.RunRank(rank, body); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    return ranks.results_;
  }

 private:
  explicit NcclRanks(const RecordArgs& args)
      : args_(args),
        spec_(*plan::ResolveBatch(args.spec)),
        plan_(
            *plan::BuildShardingPlan({.spec = spec_, .ranks = args.ranks, .shared_memory = false})),
        results_(static_cast<size_t>(args.ranks)) {}

  absl::Status RunRank(int rank, const Body& body) {
    const std::unique_ptr<kernels::CudaGpu> gpu = NewGpu(rank % 2);
    const auto rendezvous = [&](std::string_view group, std::string record) {
      return Meet(std::string(group), rank, std::move(record));
    };
    ASSIGN_OR_RETURN(const std::unique_ptr<comm::Communicator> communicator,
                     comm::CreateCommunicator({.transport = "nccl",
                                               .rank = rank,
                                               .size = args_.ranks,
                                               .rendezvous = rendezvous,
                                               .host_address = "127.0.0.1",
                                               .timeout = std::chrono::seconds(30),
                                               .gpu = gpu.get()}));
    ASSIGN_OR_RETURN(const std::unique_ptr<RankEngine> engine,
                     RankEngine::Create({.plan = plan_,
                                         .settings = SettingsOf(spec_),
                                         .communicator = *communicator,
                                         .control = nullptr,
                                         .gpu = gpu.get(),
                                         .gemms = args_.gemms}));
    RETURN_IF_ERROR(engine->InitializeWeights());
    RETURN_IF_ERROR(engine->TrainStep(0).status());
    body(*engine, rank);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> Meet(const std::string& group,
                                                int rank,
                                                std::string record) {
    MutexLock lock(mutex_);
    std::map<int, std::string>& records = records_[group];
    records[rank] = std::move(record);
    changed_.NotifyAll();
    while (records.size() < static_cast<size_t>(args_.ranks)) {
      changed_.Wait(mutex_);
    }
    std::vector<std::string> all;
    for (const auto& [of_rank, text] : records) {
      all.push_back(text);
    }
    return all;
  }

  const RecordArgs& args_;
  const plan::JobSpec spec_;
  const plan::ShardingPlan plan_;
  std::vector<absl::Status> results_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::map<int, std::string>> records_ ABSL_GUARDED_BY(mutex_);
};

TEST(GemmChoices, RanksOverNcclHaveTheTableOfRankZero) {
  const RecordArgs args = Case(3, {});
  std::vector<GemmChoices> choices(3);
  const auto results = NcclRanks::Run(args, [&](RankEngine& engine, int rank) {
    choices[static_cast<size_t>(rank)] = engine.gemm_choices();
  });
  ASSERT_THAT(results, Each(absl::OkStatus()));
  EXPECT_EQ(choices[0].measured, choices[0].gemms);
  for (const GemmChoices& other : choices) {
    EXPECT_EQ(other.table, choices[0].table);
    EXPECT_EQ(other.gemms, choices[0].gemms);
  }
  EXPECT_EQ(choices[1].measured + choices[2].measured, 0);
}

TEST(GemmChoices, UnlikeDevicesAreRefusedInExactModeOnly) {
  RecordArgs args = Case(3, {});
  setenv(kMixed, "1", 1);
  std::vector<GemmChoices> choices(3);
  const auto body = [&](RankEngine& engine, int rank) {
    choices[static_cast<size_t>(rank)] = engine.gemm_choices();
  };
  for (const absl::Status& result : NcclRanks::Run(args, body)) {
    EXPECT_EQ(CodeOf(result), ExitCode::kPlanMismatch);
    EXPECT_THAT(std::string(result.message()),
                HasSubstr("rank 0 computes gemms on 'Emulated_device_0"));
    EXPECT_THAT(std::string(result.message()), HasSubstr("rank 1 on 'Emulated_device_1"));
  }
  args.spec.determinism = plan::DeterminismMode::kFast;
  ASSERT_THAT(NcclRanks::Run(args, body), Each(absl::OkStatus()));
  EXPECT_EQ(choices[0].measured, choices[0].gemms);
  EXPECT_EQ(choices[1].measured, choices[1].gemms);
  EXPECT_EQ(choices[2].measured, 0);
  EXPECT_EQ(choices[2].table, choices[0].table);
  EXPECT_THAT(choices[1].table, HasSubstr("Emulated_device_1"));
  unsetenv(kMixed);
}

std::string SavedTable(const EpochOutcome& outcome, int64_t step) {
  const std::string path = outcome.committed.at(step);
  const size_t slash = path.rfind('/');
  const store::FileStore files(path.substr(0, slash));
  const auto opened = store::CommittedStep::Open(&files, path.substr(slash + 1));
  CHECK_MSG(opened.ok(), std::string(opened.status().message()).c_str());
  const ckpt::Blob* blob = opened->manifest().FindBlob(kGemmsBlob);
  return blob == nullptr ? "" : blob->content;
}

TEST(GemmChoices, ATrainerSavesItsTableAndGoesOnWithIt) {
  setenv(kCudaLibrarySetting, RAVEL_EMULATED_CUDA_LIBRARY, 1);
  setenv("RAVEL_NCCL_LIBRARY", RAVEL_EMULATED_NCCL_LIBRARY, 1);
  const std::string folder = EmptyFolder("trainer");
  setenv("RAVEL_GEMM_CACHE", (folder + "/cache").c_str(), 1);
  EpochArgs args;
  args.spec = CaseJob("odd_tied", folder);
  args.spec.cpu_devices = false;
  args.spec.steps = 2;
  args.spec.evaluation_every = 0;
  args.spec.checkpoint.every_steps = 1;
  args.transport = "nccl";
  args.checkpoint_root = folder + "/store-1";
  args.ranks = 2;
  const EpochOutcome first = RunEpoch(args);
  ASSERT_THAT(first.results, Each(absl::OkStatus()));
  const std::string table = SavedTable(first, 1);
  EXPECT_THAT(table, StartsWith("ravel-gemm-algorithms-2 Emulated_device_0 "));
  EXPECT_EQ(SavedTable(first, 2), table);
  // What the disk says by now is not asked.
  const uint64_t other =
      Parsed(table).begin()->second.algorithm.workspace_bytes == 0 ? kOtherWorkspace : 0;
  const std::unique_ptr<GemmAlgorithms> cached = WithWorkspace(table, other);
  ASSERT_TRUE(cached->Save(absl::StrCat(folder, "/cache/", cached->FileName())).ok());
  args.restore_path = first.committed.at(1);
  args.first_step = 1;
  args.epoch = 2;
  args.ranks = 1;
  args.checkpoint_root = folder + "/store-2";
  const EpochOutcome resumed = RunEpoch(args);
  ASSERT_THAT(resumed.results, Each(absl::OkStatus()));
  EXPECT_EQ(SavedTable(resumed, 2), table);
  EXPECT_EQ(resumed.steps.back().loss, first.steps.back().loss);
  EXPECT_THAT(resumed.ready.at(0).remarks, IsEmpty());
  // On another kind of device an exact job goes on only if it allows that, and says what it means.
  setenv("RAVEL_EMULATED_DEVICES", "2", 1);
  setenv("RAVEL_EMULATED_MIXED", "1", 1);
  args.gpu = 1;
  args.epoch = 3;
  args.checkpoint_root = folder + "/store-other";
  const EpochOutcome refused = RunEpoch(args);
  args.spec.checkpoint.allow_numerics_change = true;
  args.epoch = 4;
  const EpochOutcome elsewhere = RunEpoch(args);
  unsetenv("RAVEL_EMULATED_MIXED");
  unsetenv("RAVEL_EMULATED_DEVICES");
  EXPECT_THAT(std::string(refused.results.at(0).message()),
              HasSubstr("checkpoint.allowNumericsChange"));
  EXPECT_TRUE(refused.committed.empty());
  ASSERT_THAT(elsewhere.results, Each(absl::OkStatus()));
  EXPECT_NE(SavedTable(elsewhere, 2), table);
  ASSERT_THAT(elsewhere.ready.at(0).remarks, SizeIs(1));
  EXPECT_EQ(elsewhere.ready.at(0).remarks[0].reason, "GemmsChosenAgain");
  EXPECT_THAT(elsewhere.ready.at(0).remarks[0].message, HasSubstr("bits may differ"));
  args.spec.cpu_devices = true;
  args.gpu = 0;
  args.transport = "shm";
  args.epoch = 5;
  args.checkpoint_root = folder + "/store-3";
  const EpochOutcome host = RunEpoch(args);
  ASSERT_THAT(host.results, Each(absl::OkStatus()));
  EXPECT_EQ(SavedTable(host, 2), "");
  unsetenv("RAVEL_GEMM_CACHE");
  std::filesystem::remove_all(folder);
}

// One, two and four ranks of a tensor axis on devices of their own, whose library lets the size of
// a gemm decide on its bits: through what it proposes, or through what it does.
struct OrderCase {
  const char* order;
  const char* model;
  plan::ComputeType compute = plan::ComputeType::kF32;
};

RecordArgs OrderSteps(const OrderCase& tested, int tensor) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .tensor = tensor}, tested.model);
  args.spec.tensor_parts = 4;
  args.spec.compute = tested.compute;
  args.gemms = GemmOptions{.measure = false};
  return args;
}

Recording RunOfParts(const OrderCase& tested, int tensor) {
  return RecordOn(*NewGpu(), OrderSteps(tested, tensor));
}

class GemmOrder : public ::testing::TestWithParam<OrderCase> {};

TEST_P(GemmOrder, IsThatOfOnePartWhateverARankHas) {
  const OrderCase& tested = GetParam();
  setenv("RAVEL_EMULATED_GEMM_ORDER", tested.order, 1);
  const bool by_size = std::string(tested.order) == "2";
  EXPECT_EQ(ChooseOnce(OrderSteps(tested, 1)).in_parts > 0, by_size);
  EXPECT_EQ(ChooseOnce(OrderSteps(tested, 2)).in_parts > 0, by_size);
  EXPECT_EQ(ChooseOnce(OrderSteps(tested, 4)).in_parts, 0) << "each gemm is of one part";
  const Recording one = RunOfParts(tested, 1);
  ExpectEqualRuns(one, RunOfParts(tested, 2), "two ranks");
  ExpectEqualRuns(one, RunOfParts(tested, 4), "four ranks");
  unsetenv("RAVEL_EMULATED_GEMM_ORDER");
  EXPECT_NE(FirstDifference(one, RunOfParts(tested, 1)), "") << "the order changes nothing here";
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    GemmOrder,
    ::testing::Values(OrderCase{"1", "bundled_rope_scaling"},
                      OrderCase{"2", "bundled_rope_scaling"},
                      OrderCase{"1", "recipes_gpt2"},
                      OrderCase{"2", "recipes_gpt2"},
                      OrderCase{"2", "bundled_rope_scaling", plan::ComputeType::kBF16}),
    [](const auto& row) {
      return absl::StrCat("order_", row.param.order, "_", row.param.model, "_", row.index);
    });

TEST(LongestGap, IsWhatOperandsLeave) {
  std::vector<std::byte> memory(100);
  const std::span<std::byte> all = memory;
  const auto at = [&](std::span<std::byte> part) {
    return std::pair(part.data() - memory.data(), part.size());
  };
  EXPECT_EQ(at(LongestGap(all, {})), std::pair(std::ptrdiff_t{0}, size_t{100}));
  EXPECT_EQ(at(LongestGap(all, {all.subspan(40, 10), all.subspan(0, 5)})),
            std::pair(std::ptrdiff_t{50}, size_t{50}));
  EXPECT_EQ(at(LongestGap(all, {all.subspan(60, 40), all.subspan(10, 30), all.subspan(20, 5)})),
            std::pair(std::ptrdiff_t{40}, size_t{20}));
  EXPECT_EQ(LongestGap(all.subspan(10, 20), {all}).size(), 0u);
  EXPECT_EQ(LongestGap(all.subspan(10, 20), {all.subspan(0, 15)}).size(), 15u);
}

}  // namespace
}  // namespace ravel::trainer
