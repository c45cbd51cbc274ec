// State of the optimizer on a disk: the bits of a run that keeps all in memory, in every type of
// state, on any number of ranks and under every strategy; saves that go on with another fraction;
// steps that are skipped; folders that cannot be used.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/fault_point.h"
#include "common/model/recipes.h"
#include "common/trace.h"
#include "tests/testing/resume_runs.h"
#include "tests/testing/strategy_cases.h"
#include "worker/trainer/exit_code.h"
#include "worker/trainer/local_ranks.h"
#include "worker/trainer/memory_report.h"

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;

// As few as blocks have: several chunks of the larger groups.
constexpr int64_t kChunkElements = 4096;
constexpr char kOffloadModel[] = "bundled_rope_scaling";
constexpr int64_t kOffloadSteps = 4;

struct StateForm {
  std::string name;
  plan::StateTypes states = plan::kF32States;
  plan::ComputeType compute = plan::ComputeType::kF32;
  plan::MainWeightForm main_weights = plan::MainWeightForm::kF32;
};

class Offload : public ::testing::Test {
 protected:
  explicit Offload(const std::string& root = ::testing::TempDir())
      : folder_(absl::StrCat(root,
                             "/ravel_offload_",
                             ::getpid(),
                             ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(disk());
  }
  ~Offload() override { std::filesystem::remove_all(folder_); }

  std::string disk() const { return folder_ + "/disk"; }
  plan::JobSpec Job(double fraction, const StateForm& form = {}) const {
    plan::JobSpec spec = CaseJob(kOffloadModel, folder_);
    Use(fraction, form, spec);
    return spec;
  }
  void Use(double fraction, const StateForm& form, plan::JobSpec& spec) const {
    spec.compute = form.compute;
    spec.optimizer.state_types = form.states;
    spec.optimizer.main_weights = form.main_weights;
    spec.optimizer.offload = {.fraction = fraction, .path = disk()};
  }
  static RecordArgs Run(const plan::JobSpec& spec, int ranks) {
    return {.spec = spec,
            .ranks = ranks,
            .last_step = kOffloadSteps,
            .options = {.poison = true, .offload_chunk_elements = kChunkElements}};
  }
  // Nothing with a name is left there, nor was ever.
  void ExpectNoFiles() const { EXPECT_TRUE(std::filesystem::is_empty(disk())); }

  const std::string folder_;
};

// The file tier lies in memory, where the machine has such a file system: a busy disk makes a
// release wait for what it writes.
class OffloadInMemory : public Offload {
 protected:
  OffloadInMemory()
      : Offload(std::filesystem::exists("/dev/shm") ? "/dev/shm" : ::testing::TempDir()) {}
};

class OffloadForms : public Offload, public ::testing::WithParamInterface<StateForm> {};
INSTANTIATE_TEST_SUITE_P(
    Forms,
    OffloadForms,
    ::testing::Values(StateForm{.name = "fp32"},
                      StateForm{.name = "bf16", .states = plan::kBf16States},
                      StateForm{.name = "fp8", .states = plan::kFp8States},
                      StateForm{.name = "fp8_bf16", .states = {DType::kF8E4M3, DType::kBF16}},
                      StateForm{.name = "compute_bf16", .compute = plan::ComputeType::kBF16},
                      StateForm{.name = "remainder",
                                .compute = plan::ComputeType::kBF16,
                                .main_weights = plan::MainWeightForm::kBF16Remainder},
                      StateForm{.name = "remainder_fp8",
                                .states = plan::kFp8States,
                                .compute = plan::ComputeType::kBF16,
                                .main_weights = plan::MainWeightForm::kBF16Remainder}),
    [](const auto& tested) { return tested.param.name; });

TEST_P(OffloadForms, EveryFractionGivesTheSameBits) {
  const Recording whole = Record(Run(Job(0, GetParam()), 1));
  for (const double fraction : {0.37, 1.0}) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const bool overlap : {true, false}) {
        plan::JobSpec spec = Job(fraction, GetParam());
        spec.optimizer.offload.overlap = overlap;
        EXPECT_EQ(FirstDifference(whole, Record(Run(spec, ranks))), "")
            << fraction << " on " << ranks << " ranks, overlap " << overlap;
      }
    }
  }
  ExpectNoFiles();
}

constexpr plan::Recipe kEveryRecipe[] = {plan::Recipe::kDelayed,
                                         plan::Recipe::kCurrent,
                                         plan::Recipe::kFloat8Block,
                                         plan::Recipe::kMxFp8,
                                         plan::Recipe::kNvFp4};

class OffloadRecipes : public Offload {
 protected:
  plan::JobSpec RecipeJob(plan::Recipe recipe, double fraction) const {
    plan::JobSpec spec = CaseJob("recipes", folder_);
    Use(fraction, {.name = "codes", .compute = plan::ComputeType::kBF16}, spec);
    spec.model->num_hidden_layers = 4;  // of which one leaves with 0.37
    spec.recipe.recipe = recipe;
    spec.recipe.history = 3;
    return spec;
  }
};

// Main weights of codes lie outside, too; parts of them are fetched for amaxes and for codes.
TEST_F(OffloadRecipes, EveryFractionGivesTheSameBits) {
  for (const plan::Recipe recipe : kEveryRecipe) {
    const Recording whole = Record(Run(RecipeJob(recipe, 0), 1));
    for (const double fraction : {0.37, 1.0}) {
      for (const int ranks : {1, 3}) {
        EXPECT_EQ(FirstDifference(whole, Record(Run(RecipeJob(recipe, fraction), ranks))), "")
            << plan::RecipeName(recipe) << ", " << fraction << " on " << ranks << " ranks";
      }
    }
    plan::JobSpec in_turn = RecipeJob(recipe, 1);
    in_turn.optimizer.offload.overlap = false;
    EXPECT_EQ(FirstDifference(whole, Record(Run(in_turn, 2))), "") << plan::RecipeName(recipe);
  }
  ExpectNoFiles();
}

int64_t FetchedBytes(const RankEngine& engine) {
  MappedPlaces places;
  places.offloaded = engine.offloaded();
  const absl::StatusOr<std::vector<MemoryLine>> lines = MemoryOfProcess(places);
  EXPECT_TRUE(lines.ok()) << lines.status();
  if (!lines.ok()) {
    return -1;
  }
  for (const MemoryLine& line : *lines) {
    if (line.what == "offloaded state") {
      return line.measured_bytes;
    }
  }
  return -1;
}

// The file has the planned bytes; of main weights one part at a time is in memory, and nothing of
// them after a step.
TEST_F(OffloadRecipes, MainWeightsAreInMemoryWhileTheyAreRead) {
  constexpr int64_t kPartElements = 16384;
  constexpr int64_t kMappedAround = 2 * (64 << 10);  // by the kernel, at both ends
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.offload()->Drain());
    EXPECT_EQ(FetchedBytes(engine), 0);
    int parts = 0;
    for (const shard::ParameterGroup& group : engine.groups()) {
      const auto visit = [&](std::span<const quant::QuantPiece> pieces) {
        ASSERT_EQ(pieces.size(), 1u);
        const int64_t bytes = pieces[0].main_weight.elements() * 4;
        EXPECT_LE(bytes, kPartElements * 4);
        EXPECT_GE(FetchedBytes(engine), bytes);
        EXPECT_LE(FetchedBytes(engine), bytes + kMappedAround);
        ++parts;
      };
      RETURN_IF_ERROR(
          engine.offload()->ReadMainWeights(group.index(), group.quant_pieces(), visit));
    }
    EXPECT_GT(parts, 28) << "some of the 28 matrices have more than a part";
    EXPECT_EQ(FetchedBytes(engine), 0);
    return absl::OkStatus();
  };
  const LocalRun run = {.spec = RecipeJob(plan::Recipe::kMxFp8, 1),
                        .body = body,
                        .options = {.offload_chunk_elements = kPartElements}};
  const absl::StatusOr<plan::ShardingPlan> plan = PlanLocalRanks(run);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const plan::OffloadFacts facts = plan::OffloadOf(plan->buffers, plan->groups, plan->options);
  int64_t elements = 0;
  for (const plan::GroupLayout& group : plan->groups) {
    elements += group.layout.shard_elements;
  }
  EXPECT_EQ(facts.offloaded_bytes, elements * 12);  // main weights and two moments
  EXPECT_GE(plan->memory.offload_bytes, facts.offloaded_bytes);
  const auto offloaded = std::count_if(
      plan->buffers.begin(), plan->buffers.end(), [](const plan::ProgramBuffer& buffer) {
        return buffer.memory == plan::MemoryKind::kOffload;
      });
  EXPECT_LT(plan->memory.offload_bytes - facts.offloaded_bytes, 4096 * offloaded);  // whole pages
  const absl::Status status = RunLocalRanks(run);
  EXPECT_TRUE(status.ok()) << status;
}

// The update has taken the amaxes, and made codes where it knew the scales: else main weights come
// back once.
TEST_F(OffloadRecipes, MainWeightsComeBackForScalesOfTheWholeAlone) {
  bool comes_back = false;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    int64_t parts = 0;
    for (const shard::ParameterGroup& group : engine.groups()) {
      RETURN_IF_ERROR(engine.offload()->ReadMainWeights(
          group.index(), group.quant_pieces(), [&](std::span<const quant::QuantPiece>) {
            ++parts;
          }));
    }
    EXPECT_GT(parts, 0);
    trace::Recorder recorder;
    engine.offload()->set_recorder(&recorder);
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.offload()->Drain());
    engine.offload()->set_recorder(nullptr);
    const std::vector<trace::Event> events = recorder.Take();
    EXPECT_EQ(
        std::count_if(events.begin(),
                      events.end(),
                      [](const trace::Event& event) { return event.op == "OffloadReadFetch"; }),
        comes_back ? parts : 0);
    return absl::OkStatus();
  };
  for (const plan::Recipe recipe : kEveryRecipe) {
    comes_back = recipe == plan::Recipe::kCurrent || recipe == plan::Recipe::kNvFp4;
    const absl::Status status = RunLocalRanks({.spec = RecipeJob(recipe, 1), .body = body});
    EXPECT_TRUE(status.ok()) << plan::RecipeName(recipe) << ": " << status;
  }
}

TEST_P(OffloadForms, EveryStrategyGivesTheSameBits) {
  const auto run = [&](const StrategyCase& tested, double fraction) {
    plan::JobSpec spec = JobOf(tested, kOffloadModel, folder_);
    Use(fraction, GetParam(), spec);
    RecordArgs args = ArgsOf(tested, spec);
    args.last_step = 3;
    args.options.offload_chunk_elements = kChunkElements;
    return Record(args);
  };
  const Recording whole = run({.width = 1}, 0);
  for (const char* strategy : {"ZeRO1", "ZeRO3", "HSDP", "HFSDP"}) {
    for (const bool in_place : {true, false}) {
      const StrategyCase tested = {.strategy = strategy, .width = 2, .in_place = in_place};
      EXPECT_EQ(FirstDifference(whole, run(tested, 0.37)), "") << tested.name();
      EXPECT_EQ(FirstDifference(whole, run(tested, 1.0)), "") << tested.name();
    }
  }
}

// State that leaves is updated from there: fails when everything stays.
TEST_F(Offload, UpdatesRunOverTheFile) {
  for (const double fraction : {0.37, 1.0}) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      EXPECT_NE(engine.offload(), nullptr);
      EXPECT_GE(engine.offload()->chunk_count(), fraction == 1.0 ? 6u : 2u);
      for (int64_t step = 0; step < 2; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
        RETURN_IF_ERROR(engine.offload()->Drain());
        const optim::OffloadTimes times = engine.offload()->TakeTimes();
        EXPECT_GT(times.moving, 0);
        EXPECT_GT(times.updating, 0);
      }
      const std::span<const std::byte> moments = engine.offloaded();
      EXPECT_TRUE(std::any_of(
          moments.begin(), moments.end(), [](std::byte byte) { return byte != std::byte{}; }));
      return absl::OkStatus();
    };
    const absl::Status status =
        RunLocalRanks({.spec = Job(fraction),
                       .ranks = 2,
                       .body = body,
                       .options = {.offload_chunk_elements = kChunkElements}});
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Fails, as it never ends, where the update waits for threads that have no core.
TEST_F(Offload, UpdatesGoOnWithoutTheirThreads) {
  const Recording whole = Record(Run(Job(0), 1));
  const std::string hold = folder_ + "/thread";
  const auto held = [&](int thread) { return absl::StrCat(hold, ".", thread); };
  for (const int thread : {1, 2}) {
    std::ofstream(held(thread)) << "";
  }
  ASSERT_TRUE(fault::Configure(absl::StrCat("offload.thread@*:hold=", hold)).ok());
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (const StepResult& expected : whole.steps) {
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(expected.step - 1));
      EXPECT_EQ(std::bit_cast<uint32_t>(result.loss), std::bit_cast<uint32_t>(expected.loss));
    }
    for (const int thread : {1, 2}) {
      std::filesystem::remove(held(thread));
    }
    return absl::OkStatus();
  };
  const absl::Status status = RunLocalRanks(
      {.spec = Job(1), .body = body, .options = {.offload_chunk_elements = kChunkElements}});
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(fault::Configure("").ok());
}

// Chunks that moved while the program computed or updated something else.
struct Moves {
  int64_t chunks = 0;
  int64_t fetched = 0;   // before the update before them ended; the first one, before backward did
  int64_t released = 0;  // before the update after them ended
};

Moves MovesOf(const std::vector<trace::Event>& events, int64_t step) {
  int64_t backward_ns = 0;
  std::vector<trace::Event> fetches;
  std::vector<trace::Event> updates;
  std::vector<trace::Event> releases;
  for (const trace::Event& event : events) {
    if (event.step == step) {
      backward_ns = std::max(backward_ns, event.op == "Backward" ? event.end_ns : 0);
      if (event.op == "OffloadFetch") {
        fetches.push_back(event);
      } else if (event.op == "OffloadUpdate") {
        updates.push_back(event);
      } else if (event.op == "OffloadRelease") {
        releases.push_back(event);
      }
    }
  }
  Moves moves = {.chunks = std::ssize(updates)};
  if (fetches.size() != updates.size() || releases.size() != updates.size()) {
    return {};
  }
  for (size_t i = 0; i < updates.size(); ++i) {
    moves.fetched += fetches[i].end_ns <= (i == 0 ? backward_ns : updates[i - 1].end_ns) ? 1 : 0;
    moves.released += i + 1 < updates.size() && releases[i].end_ns <= updates[i + 1].end_ns ? 1 : 0;
  }
  return moves;
}

// Nothing waits for moves that are faster than updates, here of 20 ms, but for the last release; in
// one of the steps at least, as a busy host may be late with one.
TEST_F(OffloadInMemory, OffloadOverlapPays) {
  plan::JobSpec spec = CaseJob("recipes_wide", folder_);
  Use(1, {.name = "fp8", .states = plan::kFp8States}, spec);
  trace::Recorder recorder;
  std::vector<trace::Event> events;
  ASSERT_TRUE(fault::Configure("offload.chunk@*:stall=20ms").ok());
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    engine.executor().set_recorder(&recorder);
    engine.offload()->set_recorder(&recorder);
    for (int64_t step = 0; step < kOffloadSteps; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      RETURN_IF_ERROR(engine.offload()->Drain());
    }
    events = recorder.Take();
    EXPECT_GT(engine.offload()->chunk_count(), 8u);
    return absl::OkStatus();
  };
  const absl::Status status =
      RunLocalRanks({.spec = spec, .body = body, .options = {.offload_chunk_elements = 1 << 18}});
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(fault::Configure("").ok());
  int64_t waited = std::numeric_limits<int64_t>::max();
  for (int64_t step = 1; step <= kOffloadSteps; ++step) {
    const Moves moves = MovesOf(events, step);
    std::printf("step %d: %d chunks, %d fetched and %d released beside other work\n",
                static_cast<int>(step),
                static_cast<int>(moves.chunks),
                static_cast<int>(moves.fetched),
                static_cast<int>(moves.released));
    if (moves.chunks > 0) {
      waited = std::min(waited, 2 * moves.chunks - moves.fetched - moves.released);
    }
  }
  EXPECT_EQ(waited, 1);
}

// Norms of tensors are measured around the update, and evaluations run between steps.
TEST_F(Offload, NormsAndEvaluationsChangeNothing) {
  plan::JobSpec spec = Job(0);
  RecordArgs plain = Run(spec, 2);
  const Recording whole = Record(plain);
  spec = Job(1);
  spec.norms_every = 2;
  RecordArgs args = Run(spec, 2);
  args.evaluate_every_step = true;
  EXPECT_EQ(FirstDifference(whole, Record(args)), "");
}

// Makes every lane's loss of one step NaN, on the rank that owns the first weight.
class Poison {
 public:
  explicit Poison(RankEngine& engine) {
    const shard::ParameterGroup& embed = engine.groups()[0];
    if (!embed.pieces().empty() && embed.pieces()[0].range.begin == 0) {
      at_ = embed.main_weight() + embed.pieces()[0].shard_offset;
      kept_.assign(at_, at_ + embed.runs()[0].elements);
      std::fill_n(at_, kept_.size(), std::numeric_limits<float>::quiet_NaN());
    }
  }
  void Undo() { std::copy(kept_.begin(), kept_.end(), at_); }

 private:
  float* at_ = nullptr;
  std::vector<float> kept_;
};

// Three steps, one that is skipped, and one after it.
Recording WithASkippedStep(const plan::JobSpec& spec, int ranks) {
  Recording recording;
  Mutex mutex;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 5; ++step) {
      std::vector<std::byte> before;
      std::optional<Poison> poison;
      if (step == 3) {
        poison.emplace(engine);
        if (engine.offload() != nullptr) {
          RETURN_IF_ERROR(engine.offload()->Drain());
          engine.offload()->TakeTimes();
        }
        before.assign(engine.offloaded().begin(), engine.offloaded().end());
      }
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
      EXPECT_EQ(result.skipped, step == 3);
      if (step == 3) {
        poison->Undo();
        const auto now = engine.offloaded();
        EXPECT_TRUE(std::equal(now.begin(), now.end(), before.begin(), before.end()));
        if (engine.offload() != nullptr) {
          EXPECT_EQ(engine.offload()->TakeTimes().updating, 0);
        }
      } else if (rank == 0) {
        recording.steps.push_back(result);
      }
    }
    EXPECT_EQ(engine.updates(), 4);
    MutexLock lock(mutex);
    return AddState(engine, recording);
  };
  const absl::Status status = RunLocalRanks(
      {.spec = spec, .ranks = ranks, .body = body, .options = {.offload_chunk_elements = 4096}});
  EXPECT_TRUE(status.ok()) << status;
  return recording;
}

// A skipped step updates nothing of what is offloaded, also where chunks were fetched for it.
TEST_F(Offload, OffloadSkip) {
  for (const int ranks : {1, 3}) {
    const Recording offloaded = WithASkippedStep(Job(1), ranks);
    EXPECT_EQ(offloaded.updates, 4);
  }
}

// After a step without an update the next one takes its own gradient: fails when chunks are updated
// with what was left of an earlier step.
TEST_F(Offload, OffloadNoStaleGradient) {
  const Recording whole = WithASkippedStep(Job(0), 1);
  for (const double fraction : {0.37, 1.0}) {
    for (const int ranks : {1, 3}) {
      EXPECT_EQ(FirstDifference(whole, WithASkippedStep(Job(fraction), ranks)), "");
    }
  }
}

class OffloadSaves : public OffloadForms {
 protected:
  EpochArgs Epoch(double fraction, int ranks) {
    return runs_.Whole(Job(fraction, GetParam()), ranks);
  }

  ResumeRuns runs_{folder_};
};
INSTANTIATE_TEST_SUITE_P(
    Forms,
    OffloadSaves,
    ::testing::Values(StateForm{.name = "fp32"},
                      StateForm{.name = "fp8", .states = plan::kFp8States},
                      StateForm{.name = "remainder_bf16",
                                .states = plan::kBf16States,
                                .compute = plan::ComputeType::kBF16,
                                .main_weights = plan::MainWeightForm::kBF16Remainder}),
    [](const auto& tested) { return tested.param.name; });

// All state on disks of four ranks, then all in memory of two, and back.
TEST_P(OffloadSaves, GoOnAtAnotherFractionOnAnotherNumberOfRanks) {
  const EpochOutcome memory = RunWell(Epoch(0, 4));
  const EpochOutcome disk = RunWell(Epoch(1, 4));
  ExpectSameStart(RunWell(ResumeRuns::ReadBack(disk, Epoch(0, 1))), memory);
  ExpectSameEnd(RunWell(ResumeRuns::From(disk, Epoch(0, 2))), memory);
  ExpectSameEnd(RunWell(ResumeRuns::From(memory, Epoch(1, 2))), memory);
  ExpectSameEnd(RunWell(ResumeRuns::From(RunWell(Epoch(0, 2)), Epoch(1, 4))), memory);
  ExpectSameEnd(RunWell(ResumeRuns::From(RunWell(Epoch(0.37, 2)), Epoch(1, 4))), memory);
  ExpectNoFiles();
}

TEST_F(Offload, AFolderThatCannotBeUsedIsAnErrorOfItsField) {
  std::ofstream(folder_ + "/file") << "no folder";
  for (const std::string& path : {folder_ + "/missing", folder_ + "/file"}) {
    plan::JobSpec spec = Job(1);
    spec.optimizer.offload.path = path;
    RecordArgs args = Run(spec, 2);
    const absl::Status status = TryRecord(args).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("training.optimizer.offload.path: " + path));
    EXPECT_EQ(ReasonOf(status), "DataError");
  }
}

}  // namespace
}  // namespace ravel::trainer
