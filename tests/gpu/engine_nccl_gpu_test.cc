// The whole training step between processes that share device 0, through NCCL: the bits of one
// rank, and what survivors of a lost rank do.

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/clock.h"
#include "kernels/cuda_host/nccl_group.h"
#include "tests/gpu/rank_processes.h"
#include "tests/testing/device_runs.h"
#include "tests/testing/recording_bytes.h"
#include "tests/worker/comm/nccl_testing.h"
#include "worker/comm/nccl_communicator.h"
#include "worker/shard/step_graphs.h"
#include "worker/trainer/watchdog.h"

namespace ravel::trainer {
namespace {

using std::chrono::steady_clock;
using testing::RankProcesses;
using testing::RankRole;

constexpr char kEngineRankTest[] = "NcclEngineRank.DoesItsTask";
constexpr char kTrain[] = "train ";  // and the index of the case
constexpr char kLosePeer[] = "lose";
constexpr char kLosePeerInGraphs[] = "lose, in graphs";
constexpr char kDisagree[] = "disagree about graphs";
// Collectives are captured where each rank has a device of its own, which ranks of emulated ones
// say they have.
constexpr bool kEmulated = sizeof(RAVEL_TEST_NCCL_LIBRARY) > 1;
constexpr char kNoGraphs[] = "ranks that share a device have no graphs";
constexpr char kRecording[] = "recording:";
constexpr char kLost[] = "rank 0 is lost";
constexpr std::chrono::seconds kJoining{120};  // contexts of one device are made in turns
constexpr int64_t kEndless = 1000000;          // steps
// From the word that a rank is lost: until the step thread is back, and until the process is gone.
constexpr int kMostMsToReturn = 2000;
constexpr std::chrono::seconds kMostToEnd{20};

struct NcclCase {
  StrategyCase strategy;
  plan::ComputeType compute = plan::ComputeType::kF32;
  bool graphs = false;
  int64_t norms_every = 0;
  bool parts = false;  // sums in four, of a model that a tensor axis can cut

  std::string name() const {
    return strategy.name() + (compute == plan::ComputeType::kBF16 ? "_bf16" : "") +
           (graphs ? "_graphs" : "") + (norms_every > 0 ? "_norms" : "");
  }
  RecordArgs steps() const {
    RecordArgs args = DeviceSteps(strategy, parts ? "bundled_rope_scaling" : "odd_tied");
    args.spec.tensor_parts = parts ? 4 : 1;
    args.spec.compute = compute;
    args.options.exchanging_graphs = graphs;
    args.spec.norms_every = norms_every;
    args.last_step += norms_every > 0 ? 2 : 0;
    return args;
  }
  // Of each program: not in its first two runs, nor in steps that measure.
  int64_t launches() const {
    const int64_t steps_run = steps().last_step;
    return steps_run - 2 - (norms_every > 0 ? steps_run / norms_every : 0);
  }
};

std::vector<NcclCase> NcclCases() {
  std::vector<NcclCase> cases;
  for (const int64_t ranks : {2, 4}) {
    for (const char* strategy : {"ZeRO0", "ZeRO1", "ZeRO2", "ZeRO3"}) {
      cases.push_back({.strategy = {.strategy = strategy, .width = ranks}});
    }
    for (const char* strategy : {"HSDP", "HFSDP"}) {
      cases.push_back({.strategy = {.strategy = strategy, .width = ranks / 2}});
    }
  }
  for (const StrategyCase& strategy : {StrategyCase{.strategy = "ZeRO1", .width = 2},
                                       StrategyCase{.strategy = "ZeRO3", .width = 4},
                                       StrategyCase{.strategy = "HFSDP", .width = 2}}) {
    cases.push_back({.strategy = strategy, .compute = plan::ComputeType::kBF16});
  }
  for (const StrategyCase& strategy :
       {StrategyCase{.strategy = "ZeRO0", .width = 2},
        StrategyCase{.strategy = "ZeRO1", .width = 3, .micro_batches = 1},
        StrategyCase{.strategy = "ZeRO2", .width = 4},
        StrategyCase{.strategy = "ZeRO3", .width = 4},
        StrategyCase{.strategy = "HSDP", .width = 2},
        StrategyCase{.strategy = "HFSDP", .width = 2}}) {
    cases.push_back({.strategy = strategy, .graphs = true});
  }
  cases.push_back({.strategy = {.strategy = "ZeRO3", .width = 2},
                   .compute = plan::ComputeType::kBF16,
                   .graphs = true});
  cases.push_back(
      {.strategy = {.strategy = "ZeRO2", .width = 2}, .graphs = true, .norms_every = 3});
  for (const bool graphs : {false, true}) {
    cases.push_back({.strategy = {.strategy = "ZeRO3", .width = 2, .tensor = 2, .sequence = true},
                     .graphs = graphs,
                     .parts = true});
    cases.push_back({.strategy = {.strategy = "ZeRO1", .tensor = 4, .chunks = 2},
                     .graphs = graphs,
                     .parts = true});
  }
  return cases;
}

// -- what a rank does

// A rank's engine over NCCL and all that it stands on.
struct NcclRank {
  plan::JobSpec spec;
  plan::ShardingPlan plan;
  std::unique_ptr<kernels::CudaGpu> gpu;
  std::unique_ptr<comm::Communicator> communicator;
  std::unique_ptr<RankEngine> engine;
};

absl::Status MakeNcclRank(const RankRole& role, const RecordArgs& args, NcclRank& made) {
  ASSIGN_OR_RETURN(made.spec, plan::ResolveBatch(args.spec));
  ASSIGN_OR_RETURN(
      made.plan,
      PlanLocalRanks(
          {.spec = args.spec, .ranks = role.size, .shared_memory = false, .adjust = args.adjust}));
  ASSIGN_OR_RETURN(made.gpu, OpenDevice());
  ASSIGN_OR_RETURN(
      made.communicator,
      comm::CreateNcclCommunicator({.rank = role.rank,
                                    .size = role.size,
                                    .rendezvous = testing::TestRendezvous(),
                                    .gpu = made.gpu.get(),
                                    .setup_timeout = kJoining,
                                    .check_collectives = !args.options.exchanging_graphs}));
  ASSIGN_OR_RETURN(made.engine,
                   RankEngine::Create({.plan = made.plan,
                                       .settings = SettingsOf(made.spec),
                                       .communicator = *made.communicator,
                                       .control = nullptr,
                                       .options = args.options,
                                       .gpu = made.gpu.get()}));
  return absl::OkStatus();
}

// Every program but evaluation's was captured, and launched as often as it ran afterwards.
absl::Status CheckGraphs(const NcclCase& tested, RankEngine& engine) {
  const shard::StepGraphs* graphs = engine.graphs();
  if (graphs == nullptr || graphs->captured() == 0 || !graphs->notes().empty() ||
      graphs->launches() != tested.launches() * graphs->captured()) {
    return absl::InternalError(
        graphs == nullptr ? "no graphs"
                          : absl::StrCat(graphs->captured(),
                                         " graphs, ",
                                         graphs->launches(),
                                         " launches: ",
                                         graphs->notes().empty() ? "" : graphs->notes().front()));
  }
  const kernels::cuda::emulated::EmulatedNcclCounts counts = comm::CountsOfNccl();
  return counts.captured > 0 && counts.replayed >= counts.captured
             ? absl::OkStatus()
             : absl::InternalError("no collective was launched with a graph");
}

absl::StatusOr<Recording> TrainCase(const RankRole& role, const NcclCase& tested) {
  RecordArgs args = tested.steps();
  args.options.poison = true;
  NcclRank rank;
  RETURN_IF_ERROR(MakeNcclRank(role, args, rank));
  Recording recording;
  RETURN_IF_ERROR(RunRank(args, *rank.engine, role.rank, recording));
  RETURN_IF_ERROR(AddState(*rank.engine, recording));
  if (tested.graphs) {
    RETURN_IF_ERROR(CheckGraphs(tested, *rank.engine));
  }
  return recording;
}

// One rank does not want graphs: nobody has any, and all go on.
std::string Disagree(const RankRole& role) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = role.size});
  args.options.exchanging_graphs = true;
  NcclRank rank;
  // The communicators are alike: what differs is the engine's own.
  args.options.graphs = role.rank != 1;
  absl::Status status = MakeNcclRank(role, args, rank);
  if (status.ok()) {
    EXPECT_EQ(rank.engine->graphs(), nullptr);
    Recording recording;
    status = RunRank(args, *rank.engine, role.rank, recording);
  }
  return status.ok() && rank.engine->graphs() == nullptr
             ? "no graphs"
             : absl::StrCat("graphs, or: ", status.ToString());
}

class SilentReporter final : public Reporter {
 public:
  absl::Status Publish(const std::string&, const std::string&) override { return {}; }
  absl::Status Ready(const TrainerReady&) override { return {}; }
  absl::Status Step(const StepReport&) override { return {}; }
  absl::Status Progress(const ProgressReport&) override { return {}; }
  absl::Status Ledger(const LedgerReport&) override { return {}; }
  absl::Status SaveStarted(int64_t, int64_t, int64_t) override { return {}; }
  absl::Status SaveFailed(const ravel::SaveFailed&) override { return {}; }
  absl::Status Sealed(const ckpt::Seal&) override { return {}; }
  absl::Status Failed(const absl::Status&) override { return {}; }
  absl::Status Done(int64_t) override { return {}; }
};

// Trains until its watchdog hears that a peer is lost, or NCCL says so: how long after that word
// the step came back, and with what.
std::string LosePeer(const RankRole& role) {
  RecordArgs args = DeviceSteps({.strategy = "ZeRO3", .width = role.size});
  args.options.exchanging_graphs = role.task == kLosePeerInGraphs;
  const int64_t running_step = args.options.exchanging_graphs ? 3 : 1;
  args.spec.steps = kEndless;
  NcclRank rank;
  if (const absl::Status made = MakeNcclRank(role, args, rank); !made.ok()) {
    return made.ToString();
  }
  SilentReporter reporter;
  CommandBox box;
  Position position(SystemClock::Get());
  steady_clock::time_point told;
  ExitCode code = ExitCode::kDone;
  absl::Status status = rank.engine->InitializeWeights();
  steady_clock::time_point back;
  {
    Watchdog watchdog({.reporter = reporter,
                       .box = box,
                       .position = position,
                       .epoch = 1,
                       .receive = [&]() -> absl::StatusOr<Command> {
                         testing::HearFromTest();
                         told = steady_clock::now();
                         return Stop{.code = ExitCode::kCommunicator, .reason = kLost};
                       },
                       .interrupt = testing::StopHearing,
                       .exit = [&](ExitCode of) { code = of; }});
    watchdog.SetCommunicator(rank.communicator.get());
    watchdog.Start();
    for (int64_t step = 0; status.ok() && step < kEndless; ++step) {
      status = rank.engine->TrainStep(step).status();
      if (step == running_step) {
        testing::TellTest("running");
      }
    }
    back = steady_clock::now();
    // What comes from NCCL may come before the word does.
    status.Update(box.WaitForStep(kEndless));
    watchdog.SetCommunicator(nullptr);
  }
  const auto late = std::chrono::duration_cast<std::chrono::milliseconds>(back - told);
  return absl::StrCat(
      late.count(), " ms, exit code ", static_cast<int>(code), ": ", status.ToString());
}

TEST(NcclEngineRank, DoesItsTask) {
  if (!testing::IsRankProcess()) {
    GTEST_SKIP() << "is run by the other tests, as a process of its own";
  }
  const RankRole role = testing::TheRankRole();
  if (role.task == kLosePeer || role.task == kLosePeerInGraphs) {
    testing::TellTest(LosePeer(role));
    return;
  }
  if (role.task == kDisagree) {
    testing::TellTest(Disagree(role));
    return;
  }
  size_t index = 0;
  ASSERT_TRUE(absl::SimpleAtoi(absl::StripPrefix(role.task, kTrain), &index)) << role.task;
  const auto recording = TrainCase(role, NcclCases().at(index));
  testing::TellTest(recording.ok() ? absl::StrCat(kRecording, RecordingBytes(*recording))
                                   : recording.status().ToString());
}

// -- the processes

class NcclEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    comm::UseTestLibraries();
    auto gpu = OpenDevice();
    if (!gpu.ok()) {
      GTEST_SKIP() << gpu.status();
    }
    const auto version = kernels::NcclVersion((*gpu)->library());
    if (!version.ok()) {
      GTEST_SKIP() << version.status();
    }
    gpu_ = *std::move(gpu);
  }
  std::unique_ptr<kernels::CudaGpu> gpu_;
};

class NcclStrategies : public NcclEngine, public ::testing::WithParamInterface<size_t> {};

absl::StatusOr<Recording> JoinRecordings(RankProcesses& processes, int ranks) {
  Recording joined;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string text = processes.Hear(rank);
    if (!text.starts_with(kRecording)) {
      return absl::InternalError(absl::StrCat("rank ", rank, ": ", text));
    }
    ASSIGN_OR_RETURN(const Recording of_rank,
                     RecordingOfBytes(text.substr(std::string(kRecording).size())));
    if (rank == 0) {
      joined.steps = of_rank.steps;
      joined.validation = of_rank.validation;
    }
    RETURN_IF_ERROR(MergeState(of_rank, joined));
  }
  return joined;
}

TEST_P(NcclStrategies, GiveTheBitsOfOneRank) {
  using Reference = std::pair<plan::ComputeType, bool>;
  static std::map<Reference, Recording>& references = *new std::map<Reference, Recording>;
  const NcclCase tested = NcclCases()[GetParam()];
  if (tested.graphs && !kEmulated) {
    GTEST_SKIP() << kNoGraphs;
  }
  Recording& one = references[{tested.compute, tested.parts}];
  if (one.steps.empty()) {
    const NcclCase alone = {.strategy = {}, .compute = tested.compute, .parts = tested.parts};
    one = RecordOn(*gpu_, alone.steps());
  }
  const int ranks = tested.strategy.ranks();
  RankProcesses processes(kEngineRankTest, absl::StrCat(kTrain, GetParam()), ranks);
  const auto joined = JoinRecordings(processes, ranks);
  ASSERT_TRUE(joined.ok()) << joined.status();
  if (tested.norms_every > 0) {
    const NcclCase alone = {.strategy = {}, .norms_every = tested.norms_every};
    EXPECT_EQ(FirstDifference(RecordOn(*gpu_, alone.steps()), *joined), "");
    return;
  }
  ExpectEqualRuns(one, *joined, tested.name());
}

std::vector<size_t> NcclCaseIndices() {
  std::vector<size_t> indices;
  for (size_t i = 0; i < NcclCases().size(); ++i) {
    indices.push_back(i);
  }
  return indices;
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         NcclStrategies,
                         ::testing::ValuesIn(NcclCaseIndices()),
                         [](const auto& tested) { return NcclCases()[tested.param].name(); });

TEST_F(NcclEngine, OneRankWithoutGraphsIsAllRanksWithoutGraphs) {
  if (!kEmulated) {
    GTEST_SKIP() << kNoGraphs;
  }
  RankProcesses processes(kEngineRankTest, kDisagree, 3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(processes.Hear(rank), "no graphs") << rank;
  }
}

class NcclSurvivors : public NcclEngine,
                      public ::testing::WithParamInterface<std::pair<int, const char*>> {};

TEST_P(NcclSurvivors, OfAKilledRankLeaveWithANamedError) {
  const auto [ranks, task] = GetParam();
  if (task == std::string(kLosePeerInGraphs) && !kEmulated) {
    GTEST_SKIP() << kNoGraphs;
  }
  RankProcesses processes(kEngineRankTest, task, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_EQ(processes.Hear(rank), "running") << "rank " << rank;
  }
  processes.Kill(0);
  const auto killed = steady_clock::now();
  for (int rank = 1; rank < ranks; ++rank) {
    processes.Tell(rank, kLost);
  }
  for (int rank = 1; rank < ranks; ++rank) {
    const std::string report = processes.Hear(rank);
    int milliseconds = kMostMsToReturn;
    ASSERT_EQ(std::sscanf(report.c_str(), "%d ms", &milliseconds), 1) << report;
    EXPECT_LT(milliseconds, kMostMsToReturn) << report;
    EXPECT_THAT(
        report,
        ::testing::HasSubstr(absl::StrCat("exit code ", static_cast<int>(ExitCode::kCommunicator))))
        << report;
    EXPECT_THAT(report,
                ::testing::AnyOf(::testing::HasSubstr(kLost), ::testing::HasSubstr("NCCL")));
    EXPECT_EQ(processes.ExitCodeOf(rank), 0) << "rank " << rank;
    std::printf("[ rank %d: %s ]\n", rank, report.c_str());
  }
  EXPECT_LT(steady_clock::now() - killed, kMostToEnd);
}

INSTANTIATE_TEST_SUITE_P(Ranks,
                         NcclSurvivors,
                         ::testing::Values(std::pair(2, kLosePeer),
                                           std::pair(4, kLosePeer),
                                           std::pair(2, kLosePeerInGraphs),
                                           std::pair(4, kLosePeerInGraphs)),
                         [](const auto& tested) {
                           return absl::StrCat(
                               tested.param.first,
                               tested.param.second == std::string(kLosePeer) ? "" : "_graphs");
                         });

}  // namespace
}  // namespace ravel::trainer
