#include "common/plan/layout/strategy_table.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/model_inventory.h"
#include "tests/common/plan/layout/strategy_costs.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

constexpr Strategy kAllStrategies[] = {
    Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams};

const PlacedTensor& Matrix() {
  static const PlacedTensor tensor = {"model.layers.0.mlp.up_proj.weight", {768, 512}};
  return tensor;
}

Mesh TableMesh(int64_t replicate, int64_t shard) {
  return *Mesh::Create({{"replicate", replicate}, {"shard", shard}});
}

// "R,F": replicate, shard. Spelled as in the design's table.
std::string Letters(const Placements& placements) {
  const auto letter = [&](const char* axis) -> std::string {
    switch (PlacementOn(placements, axis).kind) {
      case PlacementKind::kReplicate:
        return "R";
      case PlacementKind::kPartial:
        return "P";
      case PlacementKind::kFlat:
        return "F";
      default:
        return PlacementText(PlacementOn(placements, axis));
    }
  };
  return letter("replicate") + "," + letter("shard");
}

std::string RowText(const RolePlacements& roles) {
  return Letters(roles.parameter) + " | " + Letters(roles.gradient_between) + " -> " +
         Letters(roles.gradient_at_step) + " | " + Letters(roles.optimizer);
}

TEST(StrategyTableTest, RowsAreThoseOfTheDesign) {
  struct Row {
    std::string name;
    std::string text;
  };
  const std::vector<Row> rows = {
      {"no_shard", "R,R | P,P -> R,R | R,R"},
      {"hsdp", "R,F | P,F -> R,F | R,F"},
      {"hfsdp", "R,F | P,F -> F,F | F,F"},
  };
  for (const Row& row : rows) {
    const absl::StatusOr<NamedStrategy> named = FindStrategy(row.name);
    ASSERT_TRUE(named.ok()) << named.status();
    const absl::StatusOr<RolePlacements> roles =
        PlacementsOf(named->choice, Matrix(), {}, TableMesh(2, 4));
    ASSERT_TRUE(roles.ok()) << roles.status();
    EXPECT_EQ(RowText(*roles), row.text) << row.name;
    EXPECT_EQ(Letters(roles->gradient_staged), "P,P");
  }
  const std::vector<Row> one_axis = {
      {"no_shard", "R,R | R,P -> R,R | R,R"},
      {"optim", "R,R | R,P -> R,F | R,F"},
      {"optim_grads", "R,R | R,F -> R,F | R,F"},
      {"optim_grads_params", "R,F | R,F -> R,F | R,F"},
  };
  for (const Row& row : one_axis) {
    const absl::StatusOr<RolePlacements> roles =
        PlacementsOf(FindStrategy(row.name)->choice, Matrix(), {}, *Mesh::Create({{"shard", 4}}));
    ASSERT_TRUE(roles.ok()) << roles.status();
    EXPECT_EQ(RowText(*roles), row.text) << row.name;
  }
}

TEST(StrategyTableTest, NamesAndZeroAliases) {
  const std::vector<std::string> names = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
  for (size_t zero = 0; zero < names.size(); ++zero) {
    for (const std::string& alias : {"ZeRO-" + std::to_string(zero),
                                     "zero" + std::to_string(zero),
                                     "zero_" + std::to_string(zero),
                                     names[zero]}) {
      const absl::StatusOr<NamedStrategy> found = FindStrategy(alias);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->name, names[zero]);
      EXPECT_EQ(found->choice.shard, kAllStrategies[zero]);
      EXPECT_FALSE(found->two_axes);
    }
  }
  EXPECT_TRUE(FindStrategy("HSDP")->two_axes);
  EXPECT_NE(FindStrategy("hsdp")->choice, FindStrategy("hfsdp")->choice);
  for (const char* unknown : {"", "-", "zero", "zero4", "fsdp"}) {
    const absl::Status status = FindStrategy(unknown).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("expected one of no_shard (ZeRO-0), optim (ZeRO-1)"))
        << unknown;
  }
}

// Combinations of two axes that exist; the others have no order of moves.
TEST(StrategyTableTest, FreeCombinationsAreCheckedByTheirMoves) {
  std::vector<std::string> accepted;
  for (const Strategy replicate : kAllStrategies) {
    for (const Strategy shard : kAllStrategies) {
      const absl::StatusOr<RolePlacements> roles =
          PlacementsOf({.replicate = replicate, .shard = shard}, Matrix(), {}, TableMesh(2, 4));
      const std::string names = "replicate " + std::string(RowOf(replicate).name) + " with shard " +
                                std::string(RowOf(shard).name);
      if (roles.ok()) {
        accepted.push_back(names + ": " + RowText(*roles));
      } else {
        EXPECT_THAT(std::string(roles.status().message()),
                    HasSubstr(names + ": tensor " + Matrix().name + ": axis "));
      }
    }
  }
  EXPECT_THAT(
      accepted,
      ::testing::ElementsAre(
          "replicate no_shard with shard no_shard: R,R | P,P -> R,R | R,R",
          "replicate no_shard with shard optim: R,R | P,P -> R,F | R,F",
          "replicate no_shard with shard optim_grads: R,R | P,F -> R,F | R,F",
          "replicate no_shard with shard optim_grads_params: R,F | P,F -> R,F | R,F",
          "replicate optim with shard no_shard: R,R | P,P -> F,R | F,R",
          "replicate optim with shard optim: R,R | P,P -> F,F | F,F",
          "replicate optim with shard optim_grads: R,R | P,F -> F,F | F,F",
          "replicate optim with shard optim_grads_params: R,F | P,F -> F,F | F,F",
          "replicate optim_grads with shard no_shard: R,R | F,P -> F,R | F,R",
          "replicate optim_grads with shard optim_grads: R,R | F,F -> F,F | F,F",
          "replicate optim_grads with shard optim_grads_params: R,F | F,F -> F,F | F,F",
          "replicate optim_grads_params with shard no_shard: F,R | F,P -> F,R | F,R",
          "replicate optim_grads_params with shard optim_grads_params: F,F | F,F -> F,F | F,F"));
}

TEST(StrategyTableTest, LlamaEightBillionIsAsComputed) {
  ModelConfig config;
  config.vocab_size = 128256;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = 32;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  const int64_t parameters =
      BuildInventory(config, {.sequences = 1, .sequence_tokens = 8192}).parameter_count();
  ASSERT_EQ(parameters, 8'030'261'248);
  const Mesh mesh = *Mesh::Create({{"shard", 8}});
  const std::vector<double> gigabytes = {144.5, 60.2, 32.1, 18.1};
  for (size_t zero = 0; zero < gigabytes.size(); ++zero) {
    const PlacedTensor model = {"model", {parameters}};
    const absl::StatusOr<RolePlacements> roles =
        PlacementsOf({.shard = kAllStrategies[zero]}, model, {}, mesh);
    ASSERT_TRUE(roles.ok()) << roles.status();
    const RankBytes bytes = BytesPerRank(*roles, mesh, parameters, {});
    EXPECT_EQ(std::round(static_cast<double>(bytes.total()) / 1e8) / 10, gigabytes[zero]) << zero;
  }
}

// The bytes column, as formulas of w, g, o.
TEST(StrategyTableTest, BytesPerRankFollowTheFormulas) {
  const int64_t p = 96000;
  const int64_t n = 4;
  const int64_t o = 3;
  const PlacedTensor tensor = {"t", {p}};
  const Mesh mesh = TableMesh(o, n);
  struct Row {
    std::string name;
    int64_t weight, gradient, optimizer;
  };
  for (const Row& row : std::vector<Row>{{"no_shard", p, p, p},
                                         {"optim", p, p, p / n},
                                         {"optim_grads", p, p / n, p / n},
                                         {"optim_grads_params", p / n, p / n, p / n},
                                         {"hsdp", p / n, p / n, p / n},
                                         {"hfsdp", p / n, p / n, p / (n * o)}}) {
    const RolePlacements roles = *PlacementsOf(FindStrategy(row.name)->choice, tensor, {}, mesh);
    const RankBytes bytes =
        BytesPerRank(roles, mesh, p, {.weight = 2, .gradient = 4, .optimizer = 12});
    EXPECT_EQ(bytes.weight, 2 * row.weight) << row.name;
    EXPECT_EQ(bytes.gradient, 4 * row.gradient) << row.name;
    EXPECT_EQ(bytes.optimizer, 12 * row.optimizer) << row.name;
    EXPECT_EQ(bytes.total(), bytes.weight + bytes.gradient + bytes.optimizer);
  }
}

// The traffic column: what the moves cost is what the rows say, in every combination.
TEST(StrategyTableTest, TrafficOfTheMovesIsThatOfTheRows) {
  const ElementBytes bytes = {.weight = 2, .gradient = 4, .optimizer = 12, .wire = 3};
  const int64_t p = 2 * 3 * 4 * 6 * 1000;
  const PlacedTensor tensor = {"t", {p}};
  int compared = 0;
  for (const Strategy replicate : kAllStrategies) {
    for (const Strategy shard : kAllStrategies) {
      for (const int64_t micro_batches : {1, 3}) {
        for (const auto& [outer, inner] :
             std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 4}, {3, 1}, {3, 4}, {2, 6}}) {
          const Mesh mesh = TableMesh(outer, inner);
          const StrategyChoice choice = {.replicate = replicate, .shard = shard};
          const absl::StatusOr<RolePlacements> roles = PlacementsOf(choice, tensor, {}, mesh);
          if (!roles.ok()) {
            continue;
          }
          const auto planned = PlannedTraffic(*roles, tensor, mesh, bytes, micro_batches);
          ASSERT_TRUE(planned.ok()) << planned.status();
          EXPECT_EQ(*planned, TableTraffic(choice, mesh, p, bytes, micro_batches))
              << RowText(*roles) << " " << mesh.Text() << " M " << micro_batches;
          ++compared;
        }
      }
    }
  }
  EXPECT_EQ(compared, 13 * 2 * 5);
}

TEST(StrategyTableTest, TrafficFormulasOfTheNamedRows) {
  const int64_t w = 2, g = 4, wire = 3, micro = 5;
  const int64_t n = 4, o = 3, p = 1200;
  const int64_t inside = p * (n - 1) / n;
  const int64_t outside = p * (o - 1) / o / n;
  const ElementBytes bytes = {.weight = w, .gradient = g, .optimizer = 12, .wire = wire};
  struct Row {
    std::string name;
    int64_t replicate, shard;
  };
  for (const Row& row :
       std::vector<Row>{{"hsdp", 2 * g * outside, micro * (2 * w + wire) * inside},
                        {"hfsdp", (g + w) * outside, micro * (2 * w + wire) * inside}}) {
    EXPECT_EQ(TableTraffic(FindStrategy(row.name)->choice, TableMesh(o, n), p, bytes, micro),
              (std::vector<AxisTraffic>{{"replicate", row.replicate}, {"shard", row.shard}}))
        << row.name;
  }
  const std::vector<int64_t> one_axis = {2 * wire * inside,
                                         (wire + w) * inside,
                                         (micro * wire + w) * inside,
                                         micro * (2 * w + wire) * inside};
  for (size_t zero = 0; zero < one_axis.size(); ++zero) {
    EXPECT_EQ(TableTraffic(
                  {.shard = kAllStrategies[zero]}, *Mesh::Create({{"shard", n}}), p, bytes, micro),
              (std::vector<AxisTraffic>{{"shard", one_axis[zero]}}));
  }
}

TEST(StrategyTableTest, TensorParallelCutsComeBeforeFlat) {
  const Mesh mesh = *Mesh::Create({{"replicate", 2}, {"shard", 4}, {"tensor", 2}});
  struct Kind {
    TensorParallelKind kind;
    bool bias;
    std::string text;
  };
  for (const Kind& one : std::vector<Kind>{
           {TensorParallelKind::kReplicated, false, "[shard Flat]"},
           {TensorParallelKind::kColumn, false, "[tensor Shard(0), shard Flat]"},
           {TensorParallelKind::kColumn, true, "[tensor Shard(0), shard Flat]"},
           {TensorParallelKind::kRow, false, "[tensor Shard(1), shard Flat]"},
           {TensorParallelKind::kRow, true, "[shard Flat]"},
           {TensorParallelKind::kNorm, false, "[shard Flat]"},
           {TensorParallelKind::kNormBeforeRow, false, "[tensor Shard(0), shard Flat]"},
           {TensorParallelKind::kSoftmaxOffset, false, "[tensor Shard(0), shard Flat]"}}) {
    const PlacedTensor tensor = {"t", one.bias ? Shape{512} : Shape{768, 512}};
    const absl::StatusOr<RolePlacements> roles =
        PlacementsOf({}, tensor, {.tensor_parallel = one.kind, .bias = one.bias}, mesh);
    ASSERT_TRUE(roles.ok()) << roles.status();
    EXPECT_EQ(PlacementsText(roles->parameter), one.text);
  }
  const ElementBytes bytes;
  const RolePlacements row =
      *PlacementsOf({}, Matrix(), {.tensor_parallel = TensorParallelKind::kRow}, mesh);
  EXPECT_EQ(BytesPerRank(row, mesh, 768 * 512, bytes).weight, 2 * 768 * 512 / 8);
}

TEST(StrategyTableTest, SequenceParallelGradientsAreReducedOnceAtTheStep) {
  const Mesh mesh = *Mesh::Create({{"shard", 4}, {"tensor", 2}});
  const TensorTraits norm = {.tensor_parallel = TensorParallelKind::kNorm};
  const StrategyChoice choice = {.shard = Strategy::kOptimGradsParams, .sequence_parallel = true};
  const RolePlacements roles = *PlacementsOf(choice, {"norm", {512}}, norm, mesh);
  EXPECT_EQ(PlacementsText(roles.gradient_staged), "[tensor Partial, shard Partial]");
  EXPECT_EQ(PlacementsText(roles.gradient_between), "[shard Flat, tensor Partial]");
  EXPECT_EQ(PlacementsText(roles.gradient_at_step), "[shard Flat]");
  EXPECT_EQ(PlacementsText(roles.parameter), "[shard Flat]");
  const auto once = PlannedTraffic(roles, {"norm", {512}}, mesh, {}, 1);
  const auto thrice = PlannedTraffic(roles, {"norm", {512}}, mesh, {}, 3);
  ASSERT_TRUE(once.ok() && thrice.ok());
  EXPECT_EQ((*once)[1], (AxisTraffic{"tensor", 2 * 4 * 512 / 4 / 2}));
  EXPECT_EQ((*thrice)[1], (*once)[1]);
  EXPECT_EQ((*thrice)[0].bytes, 3 * (*once)[0].bytes);
  const RolePlacements without = *PlacementsOf({}, {"norm", {512}}, norm, mesh);
  EXPECT_EQ(PlacementsText(without.gradient_staged), "[shard Partial]");
  const RolePlacements column =
      *PlacementsOf(choice, Matrix(), {.tensor_parallel = TensorParallelKind::kColumn}, mesh);
  EXPECT_EQ(PlacementsText(column.gradient_staged), "[tensor Shard(0), shard Partial]");
}

TEST(StrategyTableTest, ExpertsAreCutWholeAndFlatOverTheirOwnShardAxis) {
  const Mesh mesh = *Mesh::Create({{"replicate", 2}, {"shard", 8}, {"tensor", 2}});
  const Mesh view = *mesh.ExpertView(4);
  const PlacedTensor stack = {"experts.up", {16, 768, 512}};
  const TensorTraits traits = {.tensor_parallel = TensorParallelKind::kColumn, .expert = true};
  const RolePlacements roles = *PlacementsOf(FindStrategy("hfsdp")->choice, stack, traits, view);
  EXPECT_EQ(PlacementsText(roles.parameter), "[expert Shard(0), tensor Shard(1), shard Flat]");
  EXPECT_EQ(PlacementsText(roles.optimizer),
            "[expert Shard(0), tensor Shard(1), shard Flat, replicate Flat]");
  EXPECT_EQ(PlacementsText(roles.gradient_between),
            "[expert Shard(0), tensor Shard(1), shard Flat, replicate Partial]");
  EXPECT_EQ(CutCount(roles.parameter, view), 4 * 2 * 2);
  EXPECT_THAT(std::string(PlacementsOf({}, stack, traits, mesh).status().message()),
              HasSubstr("tensor experts.up: axis expert: an expert's mesh is an expert view"));
}

TEST(StrategyTableTest, MatrixOptimizersExchangeEachWayOncePerStep) {
  const Mesh mesh = *Mesh::Create({{"shard", 4}});
  const TensorTraits traits = {.matrix_optimizer = true};
  const StrategyChoice fully_sharded;
  const RolePlacements roles = *PlacementsOf(fully_sharded, Matrix(), traits, mesh);
  EXPECT_EQ(PlacementsText(roles.parameter), "[shard Flat]");
  EXPECT_EQ(PlacementsText(roles.gradient_at_step), "[shard Flat]");
  EXPECT_EQ(PlacementsText(roles.optimizer), "[shard TensorAtomic]");
  const int64_t p = 768 * 512;
  const ElementBytes bytes = {.weight = 2, .gradient = 4, .optimizer = 8, .wire = 3};
  const auto traffic = PlannedTraffic(roles, Matrix(), mesh, bytes, 2);
  ASSERT_TRUE(traffic.ok()) << traffic.status();
  const int64_t zero3 = TableTraffic(fully_sharded, mesh, p, bytes, 2)[0].bytes;
  EXPECT_EQ((*traffic)[0].bytes - zero3, (4 + 2) * (p / 4) * 3 / 4);
  const RolePlacements whole = *PlacementsOf({.shard = Strategy::kNoShard}, Matrix(), traits, mesh);
  EXPECT_EQ(PlacementsText(whole.optimizer), "[]");
  EXPECT_THAT(
      std::string(PlacementsOf(FindStrategy("hfsdp")->choice, Matrix(), traits, TableMesh(2, 4))
                      .status()
                      .message()),
      HasSubstr("axis replicate: TensorAtomic beside TensorAtomic on axis shard"));
}

TEST(StrategyTableTest, BlocksAreKeptInEveryRole) {
  const RolePlacements roles =
      *PlacementsOf(FindStrategy("hfsdp")->choice, Matrix(), {.block_rows = 32}, TableMesh(2, 4));
  EXPECT_EQ(PlacementsText(roles.parameter), "[shard BlockAtomic(32)]");
  EXPECT_EQ(PlacementsText(roles.optimizer), "[shard BlockAtomic(32), replicate BlockAtomic(32)]");
  EXPECT_EQ(PlacementsText(roles.gradient_between), "[shard BlockAtomic(32), replicate Partial]");
}

TEST(StrategyTableTest, UnevenTensorCutsBelowFlatAreRefused) {
  const Mesh mesh = *Mesh::Create({{"shard", 4}, {"tensor", 3}});
  EXPECT_THAT(
      std::string(
          PlacementsOf(
              {}, {"o_proj", {768, 512}}, {.tensor_parallel = TensorParallelKind::kRow}, mesh)
              .status()
              .message()),
      HasSubstr("tensor o_proj: axis tensor: Shard(1) of shape [768, 512] over 3 ranks is "
                "uneven"));
}

}  // namespace
}  // namespace ravel::plan
