// Regressions of the engine, and its diagnostics. Each test says
// without which guard or step it fails.

#include <bit>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/json.h"
#include "common/mutex.h"
#include "common/trace.h"
#include "tests/testing/heap_bytes.h"
#include "tests/testing/queued_replay.h"
#include "tests/testing/strategy_cases.h"
#include "worker/comm/local_communicator.h"
#include "worker/optim/stored_state.h"
#include "worker/trainer/exit_code.h"

namespace ravel::trainer {
namespace {

constexpr char kRegressionModel[] = "odd_tied";

std::string RegressionFolder() {
  return OwnFolder("ravel_engine_regressions");
}

RecordArgs ArgsFor(const StrategyCase& tested,
                   int64_t steps,
                   const char* model = kRegressionModel) {
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, RegressionFolder()));
  args.last_step = steps;
  return args;
}

LocalRun RunOf(const StrategyCase& tested, std::function<absl::Status(RankEngine&, int)> body) {
  const RecordArgs args = ArgsFor(tested, 0);
  return {
      .spec = args.spec, .ranks = tested.ranks(), .body = std::move(body), .adjust = args.adjust};
}

std::vector<StrategyCase> OfEachStrategy(int64_t width) {
  std::vector<StrategyCase> cases;
  for (const NamedStrategy& strategy : MatrixStrategies()) {
    cases.push_back({.strategy = strategy.name, .width = width, .in_place = width % 2 == 0});
  }
  return cases;
}

// Fails when weights are drawn by position in a shard: RNG is keyed by tensor and global index.
TEST(EngineRegressions, InitIdenticalOnAllRanks) {
  // Shards of the first begin with whole tensors, those of the second cut them.
  for (const char* model : {kRegressionModel, "bundled_rope_scaling"}) {
    const Recording one = Record(ArgsFor({}, 0, model));
    for (const int64_t width : {2, 3, 8}) {
      for (const StrategyCase& tested : OfEachStrategy(width)) {
        EXPECT_EQ(FirstDifference(one, Record(ArgsFor(tested, 0, model))), "") << tested.name();
      }
    }
  }
}

// Fails when Create or InitializeWeights runs a dummy step, or when a skipped step counts.
TEST(EngineRegressions, InitDoesNotAdvanceStep) {
  const auto body = [](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.updates(), 0);
    RETURN_IF_ERROR(engine.InitializeWeights());
    EXPECT_EQ(engine.updates(), 0);
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    EXPECT_EQ(engine.updates(), 1);
    for (shard::ParameterGroup& group : engine.groups()) {
      for (const plan::OwnedPiece& piece : group.pieces()) {
        group.main_weight()[piece.shard_offset] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(1));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(engine.updates(), 1);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(RunOf({.width = 2}, body)), absl::OkStatus());
}

// Padding between pieces is neither read nor written: NaN there changes no bit and stays. Fails
// when an update, a norm or a sum walks a buffer instead of its pieces (L12).
TEST(EngineRegressions, EmptyShardLeavesNeighboursAlone) {
  constexpr uint32_t kMark = 0x7fa12345;
  for (const StrategyCase& tested : OfEachStrategy(8)) {
    std::vector<float> losses;
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      const auto each_gap = [&](const auto& visit) {
        for (shard::ParameterGroup& group : engine.groups()) {
          int64_t at = 0;
          for (const shard::ShardRun& run : group.runs()) {
            visit(group, at, run.offset);
            at = run.offset + run.elements;
          }
          visit(group, at, group.shard_elements());
        }
      };
      each_gap([&](shard::ParameterGroup& group, int64_t begin, int64_t end) {
        for (float* state : {group.main_weight(),
                             optim::StoredFloats(group, plan::StateRole::kExpAvg),
                             optim::StoredFloats(group, plan::StateRole::kExpAvgSq)}) {
          std::fill(state + begin, state + end, std::bit_cast<float>(kMark));
        }
      });
      for (int64_t step = 0; step < 4; ++step) {
        ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
        if (rank == 0) {
          losses.push_back(result.loss);
        }
      }
      each_gap([&](shard::ParameterGroup& group, int64_t begin, int64_t end) {
        for (float* state : {group.main_weight(),
                             optim::StoredFloats(group, plan::StateRole::kExpAvg),
                             optim::StoredFloats(group, plan::StateRole::kExpAvgSq)}) {
          for (int64_t i = begin; i < end; ++i) {
            ASSERT_EQ(std::bit_cast<uint32_t>(state[i]), kMark) << tested.name();
          }
        }
      });
      return absl::OkStatus();
    };
    ASSERT_EQ(RunLocalRanks(RunOf(tested, body)), absl::OkStatus()) << tested.name();
    const Recording clean = Record(ArgsFor(tested, 4));
    ASSERT_EQ(losses.size(), clean.steps.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(losses[i]), std::bit_cast<uint32_t>(clean.steps[i].loss));
    }
  }
}

// Losses of three steps, and of the evaluations before each of them.
struct EvaluatedRun {
  std::vector<uint32_t> steps;
  std::vector<uint32_t> evaluations;
};
EvaluatedRun RunEvaluated(const StrategyCase& tested, int evaluations) {
  EvaluatedRun run;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    for (int64_t step = 0; step < 3; ++step) {
      for (int i = 0; i < evaluations; ++i) {
        ASSIGN_OR_RETURN(const float loss, engine.Evaluate());
        if (rank == 0) {
          run.evaluations.push_back(std::bit_cast<uint32_t>(loss));
        }
      }
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(step));
      if (rank == 0) {
        run.steps.push_back(std::bit_cast<uint32_t>(result.loss));
      }
    }
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(RunOf(tested, body)), absl::OkStatus()) << tested.name();
  return run;
}

// Evaluation with its own programs, before the first step and between steps. Fails when it writes
// persistent buffers, counts generations, or leaves something gathered.
TEST(EngineRegressions, EvalBetweenSteps) {
  for (const StrategyCase& tested : OfEachStrategy(3)) {
    EXPECT_EQ(RunEvaluated(tested, 1).steps, RunEvaluated(tested, 0).steps) << tested.name();
  }
}

// Two evaluations one after the other: the second finds what the first found. Fails when a place in
// the programs, or what they gathered, is carried from one to the next.
TEST(EngineRegressions, ForwardOnlyTwice) {
  for (const StrategyCase& tested : OfEachStrategy(3)) {
    const EvaluatedRun twice = RunEvaluated(tested, 2);
    const EvaluatedRun once = RunEvaluated(tested, 1);
    ASSERT_EQ(twice.evaluations.size(), 2 * once.evaluations.size());
    for (size_t i = 0; i < once.evaluations.size(); ++i) {
      EXPECT_EQ(twice.evaluations[2 * i], once.evaluations[i]) << tested.name();
      EXPECT_EQ(twice.evaluations[2 * i + 1], once.evaluations[i]) << tested.name();
    }
    EXPECT_EQ(twice.steps, once.steps) << tested.name();
  }
}

// Frozen tensors: trained ones have the same bits on every mesh, frozen ones do not move. Fails
// when a frozen tensor shares a group, is updated, or stops its unit's input gradient.
TEST(EngineRegressions, FrozenTensorsStayAndTheOthersTrainEverywhere) {
  const std::vector<std::vector<std::string>> frozen = {
      {"model.layers.0.mlp.*"}, {"model.layers.1.*"}, {"model.embed_tokens.weight"}};
  for (const std::vector<std::string>& patterns : frozen) {
    StrategyCase one;
    RecordArgs reference = ArgsFor(one, 4);
    reference.spec.freeze = patterns;
    const Recording expected = Record(reference);
    const Recording initial = Record(ArgsFor(one, 0));
    ASSERT_EQ(expected.steps.size(), 4u);
    int same = 0;
    for (const auto& [name, values] : expected.weights) {
      same += values == initial.weights.at(name) ? 1 : 0;
    }
    EXPECT_GE(same, 1) << patterns[0];
    EXPECT_LT(same, static_cast<int>(expected.weights.size())) << patterns[0];
    for (const StrategyCase& tested : OfEachStrategy(2)) {
      RecordArgs args = ArgsFor(tested, 4);
      args.spec.freeze = patterns;
      EXPECT_EQ(FirstDifference(expected, Record(args)), "") << tested.name() << patterns[0];
    }
  }
}

// bf16 on the wire: the same bits for every mesh, which are not those of fp32.
TEST(EngineRegressions, Bf16WireGivesTheSameBitsOnEveryMesh) {
  RecordArgs one = ArgsFor({}, 4);
  const Recording exact = Record(one);
  one.spec.gradient_wire = plan::WireType::kBF16;
  const Recording expected = Record(one);
  EXPECT_NE(FirstDifference(exact, expected), "");
  for (const int64_t width : {2, 3}) {
    for (const StrategyCase& tested : OfEachStrategy(width)) {
      RecordArgs args = ArgsFor(tested, 4);
      args.spec.gradient_wire = plan::WireType::kBF16;
      EXPECT_EQ(FirstDifference(expected, Record(args)), "") << tested.name();
    }
  }
  RecordArgs tcp = ArgsFor({.width = 2, .in_place = true}, 2);
  tcp.spec.gradient_wire = plan::WireType::kBF16;
  const Recording shared = Record(tcp);
  tcp.shared_memory = false;
  EXPECT_EQ(FirstDifference(shared, Record(tcp)), "");
}

// Fails when something is kept per step: graphs, events, messages, samples.
TEST(EngineRegressions, BytesAtRestAfterFiftyStepsAreThoseAfterOne) {
  const StrategyCase tested = {.strategy = "HFSDP", .width = 1};
  const auto body = [](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    int64_t first = 0;
    for (int64_t step = 0; step < 50; ++step) {
      RETURN_IF_ERROR(engine.TrainStep(step).status());
      RETURN_IF_ERROR(engine.Evaluate().status());  // a barrier too: the other rank is at rest
      if (rank == 0 && step == 1) {
        first = testing::HeapBytes();
      }
    }
    const int64_t last = testing::HeapBytes();
    // Room for what threads keep at hand: a kilobyte per step would show.
    EXPECT_TRUE(rank != 0 || last < first + 32 * 1024) << first << " bytes, then " << last;
    EXPECT_GE(engine.measured_bytes(), engine.planned_bytes());
    EXPECT_LE(engine.measured_bytes(), engine.planned_bytes() + RankEngine::kMostMeasuredSlack);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(RunOf(tested, body)), absl::OkStatus());
}

int64_t MappedRegions() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int64_t regions = 0;
  while (std::getline(maps, line)) {
    ++regions;
  }
  return regions;
}

// Fails when an engine leaves an arena, a segment, a queue's thread or a communicator behind.
TEST(EngineRegressions, EngineDestructionFreesAll) {
  const auto live = [] {
    StrategyCase tested = {.strategy = "HSDP", .width = 1};
    RecordArgs args = ArgsFor(tested, 1);
    args.options.host_replay = shard::QueuedStreams();
    Record(args);
  };
  for (int i = 0; i < 5; ++i) {
    live();
  }
  const int64_t before = MappedRegions();
  for (int i = 0; i < 20; ++i) {
    live();
  }
  // Less than one region for each engine.
  EXPECT_LT(MappedRegions(), before + 20);
}

// Collectives of one step of rank 0, by name.
std::map<std::string, int> CollectivesOf(const StrategyCase& tested) {
  std::map<std::string, int> counts;
  trace::Recorder recorder;
  const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    if (rank == 0) {
      engine.executor().set_recorder(&recorder);
    }
    RETURN_IF_ERROR(engine.TrainStep(1).status());
    engine.executor().set_recorder(nullptr);
    return absl::OkStatus();
  };
  EXPECT_EQ(RunLocalRanks(RunOf(tested, body)), absl::OkStatus());
  for (const trace::Event& event : recorder.Take()) {
    ++counts[std::string(event.op)];
  }
  return counts;
}

// Sharding rules 6.4. U groups, of which the tied table is reduced twice; M programs.
TEST(EngineRegressions, CollectivesPerStepAreThoseOfTheRules) {
  for (const int64_t width : {2, 4}) {
    for (const StrategyCase& tested : OfEachStrategy(width)) {
      const RecordArgs args = ArgsFor(tested, 0);
      const auto plan =
          PlanLocalRanks({.spec = args.spec, .ranks = args.ranks, .adjust = args.adjust});
      ASSERT_TRUE(plan.ok());
      const auto groups = static_cast<int>(plan->groups.size());
      const auto programs = static_cast<int>(plan->lanes.programs());
      const int sums = groups + 1;
      std::map<std::string, int> counts = CollectivesOf(tested);
      const bool blocks = tested.strategy == "ZeRO0" || tested.strategy == "ZeRO1";
      EXPECT_EQ(counts["ReduceScatter"], blocks ? sums : programs * sums) << tested.name();
      EXPECT_EQ(counts["AccumulateGrad"], blocks ? programs * sums : 0) << tested.name();
      const bool outer = tested.strategy == "HSDP" || tested.strategy == "HFSDP";
      EXPECT_EQ(counts["OuterReduce"], outer ? sums : 0) << tested.name();
      EXPECT_EQ(counts["OuterGather"], tested.strategy == "HFSDP" ? groups : 0) << tested.name();
      EXPECT_EQ(counts["GatherGradient"], tested.strategy == "ZeRO0" ? groups : 0);
      EXPECT_EQ(counts["StatsReduce"], 1);
      EXPECT_EQ(counts["OptimizerStep"], groups);
      if (tested.strategy == "ZeRO0") {
        EXPECT_EQ(counts["Gather"], 0);
      } else if (tested.strategy == "ZeRO1" || tested.strategy == "ZeRO2" || tested.in_place) {
        EXPECT_EQ(counts["Gather"], groups) << tested.name();
      }
    }
  }
}

// Whether some backward of one unit and a reduce-scatter of another ran at one time.
bool ReduceOverlapsBackward(const std::vector<trace::Event>& events) {
  for (const trace::Event& reduce : events) {
    for (const trace::Event& backward : events) {
      if (reduce.op == "ReduceScatter" && backward.op == "Backward" &&
          reduce.step == backward.step && reduce.turn == backward.turn &&
          backward.begin_ns < reduce.end_ns && backward.unit != reduce.unit &&
          backward.end_ns > reduce.begin_ns) {
        return true;
      }
    }
  }
  return false;
}

// Fails when compute waits for the reduce stream instead of for its staging (O2, O7).
TEST(EngineRegressions, SlowReduceDoesNotStallCompute) {
  bool overlaps = false;
  for (uint64_t schedule = 3; schedule < 600 && !overlaps; schedule += 6) {  // slow: reduce
    trace::Recorder recorder;
    const StrategyCase tested = {.width = 1, .in_place = true};
    const RecordArgs args = ArgsFor(tested, 2);
    // Events name units of the plan, which ends with the run.
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      Recording recording;
      RETURN_IF_ERROR(RunRank(args, engine, rank, recording));
      overlaps = ReduceOverlapsBackward(recorder.Take());
      return absl::OkStatus();
    };
    LocalRun run = RunOf(tested, body);
    run.options = {.recorder = &recorder, .host_replay = shard::QueuedStreams(schedule)};
    EXPECT_EQ(RunLocalRanks(run), absl::OkStatus());
  }
  EXPECT_TRUE(overlaps);
}

// Fails when an unsupported pair is taken for the nearest supported one.
TEST(EngineRegressions, UnsupportedCombinationRefused) {
  plan::JobSpec spec = JobOf({}, kRegressionModel, RegressionFolder());
  spec.replicas = 2;
  spec.replicate_strategy = plan::Strategy::kOptimGradsParams;
  const auto plan = plan::BuildShardingPlan({.spec = spec, .ranks = 4});
  EXPECT_FALSE(plan.ok());
}

// Fails when an engine takes a plan that was made for another group.
TEST(EngineRegressions, APlanForOtherRanksIsRefused) {
  const plan::JobSpec spec = *plan::ResolveBatch(JobOf({}, kRegressionModel, RegressionFolder()));
  const plan::ShardingPlan plan = *plan::BuildShardingPlan({.spec = spec, .ranks = 1});
  const auto communicators = *comm::CreateLocalGroup(2);
  const absl::Status refused = RankEngine::Create({.plan = plan,
                                                   .settings = SettingsOf(spec),
                                                   .communicator = *communicators[0],
                                                   .control = nullptr})
                                   .status();
  EXPECT_EQ(CodeOf(refused), ExitCode::kPlanMismatch) << refused;
  EXPECT_EQ(refused.message(), "plan is for 1 ranks, the group has 2");
}

// NaN in one weight: the report names what was first, and where, on every mesh alike.
TEST(Localisation, NamesTheFirstValueThatIsNotFinite) {
  for (const StrategyCase& tested : OfEachStrategy(2)) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      RETURN_IF_ERROR(engine.TrainStep(0).status());
      for (shard::ParameterGroup& group : engine.groups()) {
        for (const plan::OwnedPiece& piece : group.pieces()) {
          // Element [3, 5] of layer 1's second projection of the MLP, [30, 37].
          const int64_t at = 3 * 37 + 5;
          const bool in = piece.range.begin <= at && at < piece.range.end;
          if (engine.tensor(piece.tensor).name == "model.layers.1.mlp.down_proj.weight" && in) {
            group.main_weight()[piece.shard_offset + at - piece.range.begin] =
                std::numeric_limits<float>::quiet_NaN();
          }
        }
      }
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(1));
      EXPECT_TRUE(result.skipped);
      ASSIGN_OR_RETURN(const std::string text, engine.Localise(1));
      // Where weights are gathered that is the gather, else the forward that used it.
      if (tested.strategy != "ZeRO0") {
        EXPECT_NE(text.find("weight model.layers.1.mlp.down_proj.weight [3, 5] = nan"),
                  std::string::npos)
            << text;
      }
      for (const char* part : {"rank 0", "unit layers.1", "turn 0", "micro-batch 0"}) {
        EXPECT_NE(text.find(part), std::string::npos) << text;
      }
      ASSIGN_OR_RETURN(const std::string again, engine.Localise(1));
      EXPECT_EQ(again, text);
      return absl::OkStatus();
    };
    EXPECT_EQ(RunLocalRanks(RunOf(tested, body)), absl::OkStatus()) << tested.name();
  }
}

// Sets the elements of a tensor that this rank stores, by their coordinates in all of it.
void SetElements(RankEngine& engine,
                 const std::string& name,
                 const std::function<bool(int64_t row, int64_t column)>& which,
                 float value) {
  for (shard::ParameterGroup& group : engine.groups()) {
    for (const plan::OwnedPiece& piece : group.pieces()) {
      const plan::TensorSpec& tensor = engine.tensor(piece.tensor);
      if (tensor.name != name) {
        continue;
      }
      const int64_t columns = tensor.shape.back();
      for (int64_t i = 0; i < piece.elements(); ++i) {
        const int64_t index = piece.IndexOf(tensor.shape, i);
        if (which(index / columns, index % columns)) {
          group.main_weight()[piece.shard_offset + i] = value;
        }
      }
    }
  }
}

// A gradient that overflows in one column of a projection, which the last of the ranks that share
// the layer has: its place is told in the whole tensor.
TEST(Localisation, NamesAnElementOfASharedLayerInItsWholeTensor) {
  constexpr int64_t kColumn = 41;  // of 48
  for (const int64_t tensor : {1, 2, 4}) {
    const StrategyCase tested = {.width = 2, .tensor = tensor};
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      const std::string mlp = "model.layers.1.mlp.";
      const auto column = [](int64_t, int64_t at) { return at == kColumn; };
      const auto row = [](int64_t at, int64_t) { return at == kColumn; };
      // The forward multiplies a huge activation by zeros, the gradient by what comes back.
      SetElements(engine, mlp + "down_proj.weight", column, 0.0f);
      SetElements(engine, mlp + "up_proj.weight", row, 1e36f);
      const auto all = [](int64_t, int64_t) { return true; };
      SetElements(engine, "model.norm.weight", all, 1e7f);
      ASSIGN_OR_RETURN(const StepResult result, engine.TrainStep(0));
      EXPECT_TRUE(result.skipped);
      ASSIGN_OR_RETURN(const std::string text, engine.Localise(0));
      EXPECT_THAT(text,
                  ::testing::HasSubstr(absl::StrCat(
                      "gradient of model.layers.1.mlp.down_proj.weight [0, ", kColumn, "] = ")));
      return absl::OkStatus();
    };
    RecordArgs args = ArgsOf(tested, JobOf(tested, "cut_llama_untied", RegressionFolder()));
    args.spec.tensor_parts = 4;
    const LocalRun run = {
        .spec = args.spec, .ranks = tested.ranks(), .body = body, .adjust = args.adjust};
    EXPECT_EQ(RunLocalRanks(run), absl::OkStatus()) << tested.name();
  }
}

TEST(TensorNorms, AreTheSameOnEveryMeshAndChangeNoBit) {
  const auto run = [&](const StrategyCase& tested, const char* model) {
    std::vector<optim::TensorNorms> norms;
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 5; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
        auto taken = engine.optimizer().TakeNorms();
        if (rank == 0 && taken.has_value()) {
          norms.push_back(*taken);
        }
      }
      return absl::OkStatus();
    };
    RecordArgs args = ArgsFor(tested, 0, model);
    args.spec.norms_every = 2;
    args.spec.tensor_parts = model == kRegressionModel ? 1 : 4;
    const LocalRun local = {
        .spec = args.spec, .ranks = tested.ranks(), .body = body, .adjust = args.adjust};
    EXPECT_EQ(RunLocalRanks(local), absl::OkStatus()) << tested.name();
    return norms;
  };
  const std::vector<optim::TensorNorms> expected = run({}, kRegressionModel);
  ASSERT_EQ(expected.size(), 2u);
  EXPECT_EQ(expected[0].step, 2);
  for (const double update : expected[0].update) {
    EXPECT_GT(update, 0);
  }
  const auto expect_equal = [](const std::vector<optim::TensorNorms>& norms,
                               const std::vector<optim::TensorNorms>& of_one,
                               const StrategyCase& tested) {
    ASSERT_EQ(norms.size(), of_one.size());
    for (size_t i = 0; i < norms.size(); ++i) {
      EXPECT_EQ(norms[i].gradient, of_one[i].gradient) << tested.name();
      EXPECT_EQ(norms[i].weight, of_one[i].weight) << tested.name();
      EXPECT_EQ(norms[i].update, of_one[i].update) << tested.name();
    }
  };
  for (const StrategyCase& tested : OfEachStrategy(3)) {
    expect_equal(run(tested, kRegressionModel), expected, tested);
  }
  const char* const cut = "cut_llama_untied";
  const std::vector<optim::TensorNorms> of_one = run({}, cut);
  ASSERT_EQ(of_one.size(), 2u);
  for (const int64_t tensor : {2, 4}) {
    const StrategyCase tested = {.strategy = "ZeRO2", .width = 2, .tensor = tensor};
    expect_equal(run(tested, cut), of_one, tested);
  }
  RecordArgs with = ArgsFor({.width = 2}, 4);
  const Recording without = Record(with);
  with.spec.norms_every = 1;
  EXPECT_EQ(FirstDifference(without, Record(with)), "");
}

}  // namespace
}  // namespace ravel::trainer
