// Plans in which units have strategies of their own, and strategies of two axes in every
// combination.

#include <random>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/plan_pieces.h"
#include "common/plan/plan_proto.h"
#include "common/plan/program/group_roles.h"
#include "common/plan/report/plan_fit.h"
#include "common/plan/report/plan_printer.h"
#include "common/plan/report/plan_report.h"
#include "common/plan/save/save_plan.h"
#include "tests/common/plan/layout/rank_check.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/sanitizer.h"

namespace ravel::plan {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr Strategy kAll[] = {
    Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams};
constexpr Strategy kParams = Strategy::kOptimGradsParams;

JobSpec TinySpec(int64_t lanes) {
  return testing::SpecOf(testing::Llama(64, 3, 96, 257), lanes);
}

std::string Refusal(const JobSpec& spec, int64_t ranks) {
  return std::string(
      BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = false}).status().message());
}

// Every element of every tensor is counted, and so saved, by exactly one rank.
void ExpectOwnersCoverTensorsOnce(const ShardingPlan& plan) {
  std::vector<std::vector<int>> owners;
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    owners.emplace_back(static_cast<size_t>(ElementCount(tensor.shape)), 0);
  }
  for (const GroupId group : plan.groups.ids()) {
    for (int64_t rank = 0; rank < plan.ranks; ++rank) {
      for (const OwnedPiece& piece : CountedPieces(plan, group, rank)) {
        for (int64_t i = piece.range.begin; i < piece.range.end; ++i) {
          ++owners[static_cast<size_t>(piece.tensor)][static_cast<size_t>(i)];
        }
      }
    }
  }
  for (const TensorId tensor : plan.inventory.tensors.ids()) {
    EXPECT_THAT(owners[static_cast<size_t>(tensor)], ::testing::Each(1))
        << plan.inventory.tensors[tensor].name;
  }
}

class RandomUnitStrategies {
 public:
  explicit RandomUnitStrategies(uint64_t seed) : random_(seed) {}

  PlanRequest Next() {
    PlanRequest request = {.spec = TinySpec(16)};
    JobSpec& spec = request.spec;
    spec.model->tie_word_embeddings = Below(2) == 0;
    spec.strategy = AnyOf(1);
    spec.replicas = Below(2) == 0 ? 2 : 1;
    spec.replicate_strategy = AnyOuter(spec.strategy);
    request.ranks = spec.replicas * (1 + Below(8 / spec.replicas));
    request.shared_memory = Below(2) == 0;
    spec.micro_batch = 1;
    spec.global_batch = 16 * (1 + Below(3));
    spec.recompute = Below(2) == 0 ? RecomputePolicy::kNone : RecomputePolicy::kBlock;
    if (Below(3) == 0) {
      spec.freeze = {Below(2) == 0 ? "model.layers.1.*" : "*norm*"};
    }
    const bool flat = Below(3) == 0;  // nothing that is reduced in each turn
    for (const char* match : {"embed", "layers.0", "layers.1", "layers.2"}) {
      if (Below(4) > 0) {
        const Strategy shard = flat ? kAll[Below(2)] : AnyOf(0);
        spec.units.push_back({.match = match, .strategy = shard, .replicate = AnyOuter(shard)});
      }
    }
    if (flat) {
      spec.units.push_back({.match = "*", .strategy = Strategy::kOptim, .replicate = {}});
      spec.units.back().replicate = Strategy::kNoShard;
    }
    return request;
  }

 private:
  int64_t Below(int64_t limit) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit));
  }
  Strategy AnyOf(int64_t first) { return kAll[first + Below(4 - first)]; }
  Strategy AnyOuter(Strategy shard) {
    return shard == Strategy::kNoShard ? Strategy::kNoShard : kAll[Below(3)];
  }

  std::mt19937_64 random_;
};

TEST(UnitStrategies, RandomAssignmentsPassTheCheckerAndOwnEverythingOnce) {
  int mixed = 0;
  int in_blocks = 0;
  for (int i = 0; i < ravel::testing::Fewer(100, 5); ++i) {
    const uint64_t seed = testing::kSeed + static_cast<uint64_t>(i);
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const PlanRequest request = RandomUnitStrategies(seed).Next();
    const absl::StatusOr<ShardingPlan> plan = BuildShardingPlan(request);  // runs the checker
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const StepProgram& program : plan->programs) {
      const std::vector<const StepProgram*> of_ranks(static_cast<size_t>(plan->ranks), &program);
      EXPECT_TRUE(CheckRanks(*plan, of_ranks).ok());
    }
    ExpectOwnersCoverTensorsOnce(*plan);
    EXPECT_TRUE(BuildSavePlan(*plan).ok());
    const absl::StatusOr<ShardingPlan> again = ParsePlan(SerializePlan(*plan));
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->roles, plan->roles);
    EXPECT_EQ(SerializePlan(*again), SerializePlan(*plan));
    for (const GroupId group : plan->groups.ids()) {
      const GroupRoles& roles = plan->roles[group];
      EXPECT_TRUE(!plan->groups[group].trainable ||
                  (roles.between == roles.staged) == plan->lanes.blocks);
      mixed += roles.parameter != plan->roles[0].parameter ? 1 : 0;
    }
    in_blocks += plan->lanes.blocks ? 1 : 0;
  }
  EXPECT_GT(mixed, ravel::testing::Fewer(100, 10));
  EXPECT_GT(in_blocks, ravel::testing::kSanitized ? 0 : 5);
}

TEST(UnitStrategies, TheFirstEntryThatMatchesHolds) {
  JobSpec spec = TinySpec(4);
  spec.units = {{.match = "layers.1", .strategy = Strategy::kNoShard, .replicate = {}},
                {.match = "layers.*", .strategy = Strategy::kOptim, .replicate = {}},
                {.match = "hea?", .strategy = Strategy::kOptimGrads, .replicate = {}}};
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false});
  const UnitChoices choices = *ChoicesOf(spec, plan.inventory);
  std::vector<Strategy> chosen;
  for (const UnitChoice& choice : choices) {
    chosen.push_back(choice.strategies.shard);
  }
  EXPECT_THAT(
      chosen,
      ::testing::ElementsAre(
          kParams, Strategy::kOptim, Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads));
  for (const GroupRow& row : GroupTable(plan)) {
    EXPECT_EQ(row.parameter, row.unit == "embed" ? "F" : "R") << row.unit;
    EXPECT_EQ(row.optimizer, row.unit == "layers.1" ? "R" : "F") << row.unit;
  }
  EXPECT_THAT(StrategiesText(plan, choices),
              AllOf(HasSubstr("embed                              optim_grads_params\n"),
                    HasSubstr("head                               optim_grads\n")));
}

TEST(UnitStrategies, EqualUnitsShareALineAndReplicasAreNamed) {
  JobSpec spec = TinySpec(4);
  spec.replicas = 2;
  spec.units = {{.match = "layers.*", .strategy = kParams, .replicate = Strategy::kOptim}};
  spec.strategy = Strategy::kOptim;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
  EXPECT_EQ(StrategiesText(plan, *ChoicesOf(spec, plan.inventory)),
            "\nstrategies of units\n"
            "  embed                              optim, replicate no_shard\n"
            "  layers.0 .. layers.2 (3)           optim_grads_params, replicate optim\n"
            "  head                               optim, replicate no_shard\n");
}

TEST(UnitStrategies, PatternsThatDecideNothingAreRefused) {
  JobSpec spec = TinySpec(4);
  spec.units = {{.match = "layers.*", .strategy = Strategy::kOptim, .replicate = {}},
                {.match = "layer.0", .strategy = Strategy::kOptim, .replicate = {}}};
  EXPECT_THAT(Refusal(spec, 2),
              AllOf(HasSubstr("parallelism.units[1].match: expected a pattern that matches a unit"),
                    HasSubstr("such as embed, got 'layer.0'")));
  spec.units[1].match = "layers.2";
  EXPECT_THAT(Refusal(spec, 2),
              HasSubstr("parallelism.units[1].match: expected a pattern that matches a unit which "
                        "no entry before it matches, got 'layers.2'"));
}

// Lanes are in blocks where no trained unit reduces in each turn; frozen ones do not count.
TEST(UnitStrategies, LanesAreInBlocksWhereNoTrainedUnitReducesInEachTurn) {
  const auto in_blocks = [](const JobSpec& spec) {
    return BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false})->lanes.blocks;
  };
  JobSpec spec = TinySpec(8);
  EXPECT_FALSE(in_blocks(spec));
  spec.units = {{.match = "*", .strategy = Strategy::kOptim, .replicate = {}}};
  EXPECT_TRUE(in_blocks(spec));
  spec.units = {{.match = "layers.0", .strategy = kParams, .replicate = {}},
                {.match = "*", .strategy = Strategy::kOptim, .replicate = {}}};
  EXPECT_FALSE(in_blocks(spec));
  spec.freeze = {"model.layers.0.*"};
  EXPECT_TRUE(in_blocks(spec));
}

// A plan whose lanes are in blocks has no group that is reduced in each turn, whoever wrote it.
TEST(UnitStrategies, RolesThatDoNotFitTheLanesAreRefused) {
  JobSpec spec = TinySpec(8);
  spec.units = {{.match = "*", .strategy = Strategy::kOptim, .replicate = {}}};
  v1::ShardingPlan proto =
      ToProto(*BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = false}));
  ASSERT_TRUE(FromProto(proto).ok());
  proto.mutable_groups(1)->mutable_rules()->set_reduces_each_turn(true);
  EXPECT_THAT(std::string(FromProto(proto).status().message()),
              HasSubstr("groups[1]: width, rules or order are those of no strategy"));
}

TEST(UnitStrategies, RemediesIncludeOneStrategyForAll) {
  PlanRequest request = {.spec = TinySpec(8), .ranks = 2, .shared_memory = false};
  request.spec.units = {{.match = "layers.*", .strategy = Strategy::kOptim, .replicate = {}}};
  const int64_t needed = PeakBytes(*BuildShardingPlan(request));
  for (const Remedy& remedy : TryRemedies(request, 1)) {
    if (remedy.change == "parallelism.strategy: optim_grads_params without units") {
      EXPECT_TRUE(remedy.status.ok()) << remedy.status;
      EXPECT_LT(remedy.peak_bytes, needed);
      return;
    }
  }
  ADD_FAILURE() << "no such remedy";
}

// The 16 combinations of two axes: refused, or with as many bytes per rank as placements say.
TEST(TwoAxes, EveryCombinationIsPlannedOrRefusedWithTensorAxisFromAndTo) {
  int planned = 0;
  for (const Strategy outer : kAll) {
    for (const Strategy inner : kAll) {
      JobSpec spec = TinySpec(4);
      spec.strategy = inner;
      spec.replicate_strategy = outer;
      spec.replicas = 2;
      const std::string names =
          absl::StrCat(std::string(RowOf(outer).name), " of ", std::string(RowOf(inner).name));
      const bool runs =
          outer == Strategy::kNoShard || (outer != kParams && inner != Strategy::kNoShard);
      const absl::StatusOr<ShardingPlan> plan =
          BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
      ASSERT_EQ(plan.ok(), runs) << names << ": " << plan.status();
      if (!runs) {
        EXPECT_THAT(std::string(plan.status().message()),
                    AllOf(HasSubstr("parallelism.replicateStrategy: "),
                          HasSubstr("tensor model.embed_tokens"),
                          HasSubstr("axis "),
                          HasSubstr("from "),
                          HasSubstr(" to ")))
            << names;
        continue;
      }
      ++planned;
      const GroupRow row = GroupTable(*plan).front();
      const std::string cut = inner == Strategy::kNoShard ? "R" : "F";
      EXPECT_EQ(row.optimizer, (outer == Strategy::kNoShard ? "R," : "F,") + cut) << names;
      EXPECT_EQ(row.parameter, inner == kParams ? "R,F" : "R,R") << names;
    }
  }
  EXPECT_EQ(planned, 10);
}

// The refusal is that of the field which asks for it.
TEST(TwoAxes, AUnitThatCannotRunIsNamed) {
  JobSpec spec = TinySpec(4);
  spec.replicas = 2;
  spec.units = {{.match = "embed", .strategy = Strategy::kOptim, .replicate = {}},
                {.match = "layers.1", .strategy = kParams, .replicate = kParams}};
  EXPECT_THAT(Refusal(spec, 4),
              AllOf(HasSubstr("parallelism.units[1].replicateStrategy: tensor model.layers.1."),
                    HasSubstr("axis replicate: from Flat to Replicate")));
  spec.replicate_strategy = Strategy::kOptim;
  spec.units[1] = {.match = "head", .strategy = Strategy::kNoShard, .replicate = {}};
  EXPECT_THAT(Refusal(spec, 4), HasSubstr("parallelism.units[1].strategy: tensor model.norm"));
}

}  // namespace
}  // namespace ravel::plan
