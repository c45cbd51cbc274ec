// Regressions that carry the names of bug classes of quantized training: what other systems get
// wrong when a quantized tensor is cut between ranks, reloaded or skipped.

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/gemm_paths.h"
#include "common/model/recipes.h"
#include "common/plan/device_kind.h"
#include "tests/testing/strategy_cases.h"
#include "worker/optim/stored_state.h"

namespace ravel::trainer {
namespace {

using plan::Recipe;

constexpr Recipe kAllRecipes[] = {
    Recipe::kDelayed, Recipe::kCurrent, Recipe::kFloat8Block, Recipe::kMxFp8, Recipe::kNvFp4};
constexpr int64_t kShortHistory = 4;

// Codes and amaxes of whole tensors, joined over ranks, and how many ranks stored each row.
struct Codes {
  std::map<std::string, std::vector<uint8_t>> codes;
  std::map<std::string, std::vector<int>> owners;
  std::vector<std::vector<uint32_t>> amaxes;  // by rank
  std::vector<int64_t> pieces;                // by rank
};

void AddCodes(RankEngine& engine, int rank, Codes& into) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  into.amaxes.resize(std::max(into.amaxes.size(), static_cast<size_t>(rank) + 1));
  into.pieces.resize(into.amaxes.size(), 0);
  const plan::QuantLayout& layout = engine.quant()->layout();
  const kernels::WeightScales first =
      engine.quant()->ScalesOf(layout.tensors[0].tensor, false).weight;
  const uint32_t* words = first.amax.As<uint32_t>() - layout.tensors[0].grid;
  into.amaxes[static_cast<size_t>(rank)].assign(words, words + layout.weight_words);
  for (const shard::ParameterGroup& group : engine.groups()) {
    for (const quant::QuantPiece& piece : group.quant_pieces()) {
      ++into.pieces[static_cast<size_t>(rank)];
      const plan::TensorSpec& tensor = engine.tensor(piece.tensor);
      const int64_t row = piece.codes.size[1];
      std::vector<uint8_t>& all = into.codes[tensor.name];
      std::vector<int>& owners = into.owners[tensor.name];
      all.resize(static_cast<size_t>(tensor.shape[0] * row));
      owners.resize(static_cast<size_t>(tensor.shape[0]), 0);
      std::memcpy(all.data() + piece.first_row * row,
                  piece.codes.data,
                  static_cast<size_t>(piece.codes.size[0] * row));
      for (int64_t i = 0; i < piece.codes.size[0]; ++i) {
        ++owners[static_cast<size_t>(piece.first_row + i)];
      }
    }
  }
}

class RecipeRegressions : public ::testing::Test {
 protected:
  RecipeRegressions() { std::filesystem::remove_all(folder_); }
  ~RecipeRegressions() override { std::filesystem::remove_all(folder_); }

  plan::JobSpec Job(const StrategyCase& tested, Recipe recipe) {
    plan::JobSpec spec = JobOf(tested, "recipes", folder_);
    spec.compute = plan::ComputeType::kBF16;
    spec.recipe = {.recipe = recipe, .keep_bf16 = {}, .history = kShortHistory};
    return spec;
  }
  // After so many steps; 0: initial weights.
  Codes CodesAfter(const StrategyCase& tested, Recipe recipe, int64_t steps, double epsilon = 0) {
    plan::JobSpec spec = Job(tested, recipe);
    spec.recipe.amax_epsilon = epsilon;
    return CodesOf(spec, tested.ranks(), steps);
  }
  static Codes CodesOf(const plan::JobSpec& spec, int ranks, int64_t steps) {
    Codes codes;
    const auto body = [&](RankEngine& engine, int rank) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < steps; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
      }
      AddCodes(engine, rank, codes);
      return absl::OkStatus();
    };
    const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = ranks, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
    return codes;
  }

  const std::string folder_ = OwnFolder("ravel_recipe_regressions");
};

// Blocks that two ranks share, ranks without a row, replicas, every way to cut.
TEST_F(RecipeRegressions, StraddledTileEqualsWholeTile) {
  for (const Recipe recipe : kAllRecipes) {
    const Codes one = CodesAfter({}, recipe, 2);
    ASSERT_EQ(one.codes.size(), 14u);
    for (const int64_t width : {2, 3, 5, 7, 9}) {
      const Codes cut = CodesAfter({.width = width}, recipe, 2);
      EXPECT_EQ(cut.codes, one.codes) << plan::RecipeName(recipe) << " on " << width;
    }
  }
}

TEST_F(RecipeRegressions, InitMatrixAllRecipesAllMeshes) {
  for (const Recipe recipe : kAllRecipes) {
    const Codes one = CodesAfter({}, recipe, 0);
    for (const NamedStrategy& strategy : MatrixStrategies()) {
      const StrategyCase tested = {.strategy = strategy.name, .width = 2};
      EXPECT_EQ(CodesAfter(tested, recipe, 0).codes, one.codes)
          << plan::RecipeName(recipe) << " " << tested.name();
    }
  }
}

// Every rank has the amaxes of all blocks, replicas and ranks without a row included.
TEST_F(RecipeRegressions, ScalesEqualOnAllOwners) {
  for (const Recipe recipe : kAllRecipes) {
    const Codes one = CodesAfter({}, recipe, 1);
    for (const char* strategy : {"ZeRO0", "ZeRO3", "HSDP", "HFSDP"}) {
      const Codes cut = CodesAfter({.strategy = strategy, .width = 3}, recipe, 1);
      for (const std::vector<uint32_t>& amaxes : cut.amaxes) {
        EXPECT_EQ(amaxes, one.amaxes[0]) << plan::RecipeName(recipe) << " " << strategy;
      }
    }
  }
}

// Few rows of blocks over more ranks: some have none.
TEST_F(RecipeRegressions, EmptyShardJoinsAmaxReduce) {
  for (const Recipe recipe : {Recipe::kFloat8Block, Recipe::kNvFp4}) {
    const auto codes = [&](int64_t width) {
      const StrategyCase tested = {.width = width};
      plan::JobSpec spec = Job(tested, recipe);
      spec.recipe.keep_bf16 = {"*.q_proj.*", "*.v_proj.*", "*.o_proj.*", "*.mlp.*"};
      return CodesOf(spec, tested.ranks(), 2);
    };
    const Codes one = codes(1);
    const Codes cut = codes(15);
    EXPECT_EQ(*std::min_element(cut.pieces.begin(), cut.pieces.end()), 0)
        << plan::RecipeName(recipe);
    EXPECT_EQ(cut.codes, one.codes) << plan::RecipeName(recipe);
    for (const std::vector<uint32_t>& amaxes : cut.amaxes) {
      EXPECT_EQ(amaxes, one.amaxes[0]) << plan::RecipeName(recipe);
    }
  }
}

// Eight columns of k and eight of v beside 128 of q: together no whole blocks of gradients.
TEST_F(RecipeRegressions, MatricesMayKeepBf16BesideQuantizedOnes) {
  for (const Recipe recipe : kAllRecipes) {
    const auto codes = [&](int64_t width) {
      const StrategyCase tested = {.width = width};
      plan::JobSpec spec = Job(tested, recipe);
      spec.model->num_attention_heads = 16;
      spec.model->num_key_value_heads = 1;
      spec.model->head_dim = 8;
      spec.recipe.keep_bf16 = {"*.k_proj.*", "*.v_proj.*"};
      return CodesOf(spec, tested.ranks(), 2);
    };
    const Codes one = codes(1);
    EXPECT_EQ(one.codes.size(), 10u);
    EXPECT_EQ(codes(3).codes, one.codes) << plan::RecipeName(recipe);
  }
}

// Rows of 352 are no divisor of what shards are aligned to.
TEST_F(RecipeRegressions, NvFp4RangesAreWholeBytes) {
  for (const int64_t width : {2, 3, 7}) {
    const StrategyCase tested = {.width = width};
    plan::JobSpec spec = Job(tested, Recipe::kNvFp4);
    spec.model->intermediate_size = 352;
    for (const auto& [name, owners] : CodesOf(spec, tested.ranks(), 0).owners) {
      for (const int count : owners) {
        ASSERT_EQ(count, 1) << name;
      }
    }
  }
}

// 256 x 128 over 4 ranks has the grid of the whole: two rows of blocks.
TEST_F(RecipeRegressions, ScaleGridRowsMatchGlobalTiles) {
  for (const int64_t width : {1, 4}) {
    const auto plan = plan::BuildShardingPlan({.spec = Job({.width = width}, Recipe::kFloat8Block),
                                               .ranks = width,
                                               .shared_memory = true});
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const plan::QuantTensor& tensor : plan::QuantLayoutOf(plan->inventory).tensors) {
      const Shape& shape = plan->inventory.tensors[tensor.tensor].shape;
      EXPECT_EQ(tensor.grid_rows, shape[0] / 128);
      EXPECT_EQ(tensor.grid_columns, shape[1] / 128);
    }
  }
}

// Lists that are built and never used leave a parameter as it was.
TEST_F(RecipeRegressions, EveryTrainableParameterMoves) {
  for (const Recipe recipe : kAllRecipes) {
    RecordArgs args = ArgsOf({.width = 3}, Job({.width = 3}, recipe));
    args.last_step = 1;
    const Recording first = Record(args);
    args.last_step = 3;
    const Recording later = Record(args);
    for (const auto& [name, before] : first.weights) {
      EXPECT_NE(before, later.weights.at(name)) << plan::RecipeName(recipe) << " " << name;
    }
    const Codes codes = CodesAfter({.width = 3}, recipe, 1);
    const Codes moved = CodesAfter({.width = 3}, recipe, 8);
    for (const auto& [name, before] : codes.codes) {
      EXPECT_NE(before, moved.codes.at(name)) << plan::RecipeName(recipe) << " " << name;
    }
  }
}

// A history that rolls after each backward would depend on how lanes are spread.
TEST_F(RecipeRegressions, DelayedUpdateOncePerGlobalBatch) {
  for (const int64_t micro_batches : {1, 3}) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      for (int64_t step = 0; step < 2; ++step) {
        RETURN_IF_ERROR(engine.TrainStep(step).status());
        RETURN_IF_ERROR(engine.Evaluate().status());  // stages nothing
      }
      const int64_t slots = engine.quant()->layout().slots;
      std::vector<float> histories(static_cast<size_t>(slots * kShortHistory));
      RETURN_IF_ERROR(optim::ReadScales(
          engine.memory(), *engine.quant(), plan::StateRole::kAmaxHistory, 0, histories));
      for (int64_t slot = 0; slot < slots; ++slot) {
        const auto begin = histories.begin() + slot * kShortHistory;
        const bool weight = slot % plan::kSlotsPerDomain == 0;
        // Initial weights have an entry, too.
        EXPECT_EQ(std::count_if(begin, begin + kShortHistory, [](float amax) { return amax > 0; }),
                  weight ? 3 : 2)
            << "slot " << slot;
        EXPECT_GT(*(begin + kShortHistory - 1), 0) << "the newest is last";
        // The input's history is not that of the gradient.
        EXPECT_TRUE(weight || *(begin + kShortHistory - 1) != *(begin - 1)) << "slot " << slot;
      }
      return absl::OkStatus();
    };
    const StrategyCase tested = {.width = 2, .micro_batches = micro_batches};
    const absl::Status ran =
        RunLocalRanks({.spec = Job(tested, Recipe::kDelayed), .ranks = 2, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// The scale of the third cast follows from the two amaxes before it, and leaves the margin free.
TEST_F(RecipeRegressions, DelayedScalesLeaveTheirMargin) {
  for (const int64_t margin : {0, 3}) {
    const auto body = [&](RankEngine& engine, int) -> absl::Status {
      RETURN_IF_ERROR(engine.InitializeWeights());
      RETURN_IF_ERROR(engine.TrainStep(0).status());
      RETURN_IF_ERROR(engine.TrainStep(1).status());
      const int64_t slots = engine.quant()->layout().slots;
      std::vector<float> scales(static_cast<size_t>(slots));
      std::vector<float> histories(static_cast<size_t>(slots * kShortHistory));
      RETURN_IF_ERROR(optim::ReadScales(
          engine.memory(), *engine.quant(), plan::StateRole::kCastScale, 0, scales));
      RETURN_IF_ERROR(optim::ReadScales(
          engine.memory(), *engine.quant(), plan::StateRole::kAmaxHistory, 0, histories));
      for (int64_t weight = 0; weight < slots; weight += plan::kSlotsPerDomain) {
        const auto end = histories.begin() + (weight + 1) * kShortHistory;
        const float largest = std::max(*(end - 3), *(end - 2));
        const float expected = 448.0f / static_cast<float>(1 << margin) / largest;
        EXPECT_EQ(scales[static_cast<size_t>(weight)], expected) << "slot " << weight;
      }
      return absl::OkStatus();
    };
    plan::JobSpec spec = Job({.width = 1}, Recipe::kDelayed);
    spec.recipe.margin = margin;
    const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 1, .body = body});
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// Weights of deviation 0.02 have no amax of 0.5, so that all scales follow from it.
TEST_F(RecipeRegressions, EpsilonReachesEveryQuantizer) {
  constexpr double kEpsilon = 0.5;
  for (const Recipe recipe : {Recipe::kCurrent, Recipe::kFloat8Block}) {
    const Codes without = CodesAfter({.width = 1}, recipe, 0);
    const Codes one = CodesAfter({.width = 1}, recipe, 1, kEpsilon);
    const Codes three = CodesAfter({.width = 3}, recipe, 1, kEpsilon);
    EXPECT_EQ(one.codes, three.codes);
    EXPECT_EQ(one.amaxes[0], three.amaxes[2]);
    EXPECT_NE(one.codes, without.codes);
    const std::vector<uint32_t> all(one.amaxes[0].size(), std::bit_cast<uint32_t>(0.5f));
    EXPECT_EQ(one.amaxes[0], all);
  }
}

// Gemms quantize inputs and gradients by these.
TEST_F(RecipeRegressions, GemmsHaveTheEpsilonOfTheJob) {
  plan::JobSpec spec = Job({.width = 1}, Recipe::kCurrent);
  spec.recipe.amax_epsilon = 0.25;
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    EXPECT_EQ(engine.quant()->layout().tensors.size(), 14u);
    for (const plan::QuantTensor& of : engine.quant()->layout().tensors) {
      EXPECT_EQ(engine.quant()->ScalesOf(of.tensor, true).amax_epsilon, 0.25f);
    }
    return absl::OkStatus();
  };
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 1, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
}

TEST_F(RecipeRegressions, DelayedScalesBeginAtOneOnRequest) {
  const auto body = [&](RankEngine& engine, int) -> absl::Status {
    RETURN_IF_ERROR(engine.InitializeWeights());
    const int64_t slots = engine.quant()->layout().slots;
    std::vector<float> scales(static_cast<size_t>(slots));
    RETURN_IF_ERROR(optim::ReadScales(
        engine.memory(), *engine.quant(), plan::StateRole::kCastScale, 0, scales));
    for (int64_t weight = 0; weight < slots; weight += plan::kSlotsPerDomain) {
      EXPECT_EQ(scales[static_cast<size_t>(weight)], 1.0f);
    }
    RETURN_IF_ERROR(engine.TrainStep(0).status());
    RETURN_IF_ERROR(engine.TrainStep(1).status());
    RETURN_IF_ERROR(optim::ReadScales(
        engine.memory(), *engine.quant(), plan::StateRole::kCastScale, 0, scales));
    for (int64_t weight = 0; weight < slots; weight += plan::kSlotsPerDomain) {
      EXPECT_GT(scales[static_cast<size_t>(weight)], 1.0f) << "they follow from histories then";
    }
    return absl::OkStatus();
  };
  plan::JobSpec spec = Job({.width = 2}, Recipe::kDelayed);
  spec.recipe.first_scale = plan::FirstScale::kOnes;
  spec.recipe.amax_algorithm = plan::AmaxAlgorithm::kMostRecent;
  const absl::Status ran = RunLocalRanks({.spec = spec, .ranks = 2, .body = body});
  EXPECT_TRUE(ran.ok()) << ran;
}

TEST_F(RecipeRegressions, UnsupportedRecipeRefusedAtPlan) {
  plan::JobSpec spec = Job({}, Recipe::kNvFp4);
  spec.cpu_devices = false;
  const plan::DeviceKind hopper = plan::ParseDevices("1xH100-80G", false)->kind;
  EXPECT_THAT(std::string(plan::CheckRecipeOn(hopper, spec.recipe).message()),
              ::testing::HasSubstr("precision.emulation: [dequant_bf16] beside it, got nvfp4"));
  spec.recipe.emulation = {plan::GemmPath::kDequantBf16};
  EXPECT_EQ(plan::CheckRecipeOn(hopper, spec.recipe), absl::OkStatus());
  EXPECT_TRUE(plan::BuildShardingPlan({.spec = spec, .ranks = 1, .shared_memory = true}).ok());
}

// A recipe is accepted for a kind of device exactly where a trainer there would begin with the
// plan's path.
TEST_F(RecipeRegressions, APlanIsAcceptedWhereItsTrainerBegins) {
  constexpr uint64_t kLibrary = 130100;
  for (const char* devices : {"1xA100-80G", "1xH100-80G", "1xH200-141G", "1xB200-180G", "1xcpu"}) {
    const plan::DeviceKind kind = plan::ParseDevices(devices, false)->kind;
    for (const Recipe recipe : kAllRecipes) {
      for (const bool emulated : {false, true}) {
        plan::JobSpec spec = Job({}, recipe);
        spec.cpu_devices = kind.cpu;
        spec.recipe.emulation = {};
        if (emulated && !kind.cpu) {
          spec.recipe.emulation = {plan::GemmPath::kDequantBf16};
        }
        const absl::StatusOr<plan::GemmPath> path =
            plan::ChooseGemmPath(spec.recipe, spec.cpu_devices);
        SCOPED_TRACE(absl::StrCat(devices, " ", plan::RecipeName(recipe), " ", emulated));
        ASSERT_TRUE(path.ok()) << path.status();
        EXPECT_EQ(*path == plan::GemmPath::kCpuReference, kind.cpu);
        EXPECT_EQ(plan::CheckRecipeOn(kind, spec.recipe).ok(),
                  plan::CheckGemmPath(*path,
                                      {.name = kind.name,
                                       .compute_major = kind.compute_major,
                                       .compute_minor = kind.compute_minor,
                                       .cublas_lt_version = kLibrary})
                      .ok());
      }
    }
  }
}

}  // namespace
}  // namespace ravel::trainer
