// One, two and four ranks of a tensor axis give the same bits where sums are in four parts, and
// each rule of that order is needed.

#include "tests/worker/model/tensor_ranks.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <tuple>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/tensor_parts.h"
#include "kernels/philox.h"
#include "tests/testing/sanitizer.h"
#include "tests/worker/model/unit_of_rank.h"
#include "worker/model/norm.h"

namespace ravel::model {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

RankTestModel ModelOf(plan::ArchitectureKind kind, int64_t key_heads) {
  RankTestModel model = {.config = {},
                         .shape = {.sequences = 2, .sequence_tokens = 6},
                         .parts = 4,
                         .micro_batches = 2};
  plan::ModelConfig& config = model.config;
  const bool gpt2 = kind == plan::ArchitectureKind::kGpt2;
  config.architecture = kind;
  config.vocab_size = 37;
  config.hidden_size = 32;
  config.intermediate_size = gpt2 ? 0 : 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = gpt2 ? 8 : key_heads;
  config.head_dim = gpt2 ? 4 : 6;
  config.max_position_embeddings = 32;
  config.tie_word_embeddings = key_heads == 2;
  return model;
}

struct NamedModel {
  std::string name;
  RankTestModel model;
};

std::vector<NamedModel> AllModels() {
  std::vector<NamedModel> models;
  for (const int64_t key_heads : {1, 2, 4, 8}) {
    const std::string heads = "_" + std::to_string(key_heads) + "kv";
    models.push_back({"llama" + heads, ModelOf(plan::ArchitectureKind::kLlama, key_heads)});
    models.push_back({"qwen2" + heads, ModelOf(plan::ArchitectureKind::kQwen2, key_heads)});
    models.push_back({"qwen3" + heads, ModelOf(plan::ArchitectureKind::kQwen3, key_heads)});
  }
  models.push_back({"gpt2", ModelOf(plan::ArchitectureKind::kGpt2, 8)});
  models.push_back({"short_vocabulary", ModelOf(plan::ArchitectureKind::kLlama, 4)});
  models.back().model.config.vocab_size = 9;  // blocks of 8, 1, 0 and 0 rows
  models.push_back({"bundled", ModelOf(plan::ArchitectureKind::kQwen3, 2)});
  models.back().model.config.head_dim = 8;
  models.back().model.config.intermediate_size = 64;
  models.push_back({"bf16", ModelOf(plan::ArchitectureKind::kLlama, 2)});
  models.back().model.dtype = DType::kBF16;
  models.push_back({"gpt2_bf16", ModelOf(plan::ArchitectureKind::kGpt2, 8)});
  models.back().model.dtype = DType::kBF16;
  models.push_back({"gpt2_tied", ModelOf(plan::ArchitectureKind::kGpt2, 8)});
  models.back().model.config.tie_word_embeddings = true;
  for (const plan::RecomputePolicy policy :
       {plan::RecomputePolicy::kNorm, plan::RecomputePolicy::kMlp, plan::RecomputePolicy::kBlock}) {
    const std::string suffix = "_recompute" + std::to_string(static_cast<int>(policy));
    models.push_back({"qwen3" + suffix, ModelOf(plan::ArchitectureKind::kQwen3, 2)});
    models.back().model.recompute = policy;
    models.push_back({"gpt2" + suffix, ModelOf(plan::ArchitectureKind::kGpt2, 8)});
    models.back().model.recompute = policy;
  }
  return models;
}

class EveryTensorDegree : public ::testing::TestWithParam<NamedModel> {};

TEST_P(EveryTensorDegree, GivesTheBitsOfOneRank) {
  const RankTestModel& model = GetParam().model;
  const RankResults one = RunRanks(model, 1);
  EXPECT_THAT(Differences(one, RunRanks(model, 2)), IsEmpty());
  EXPECT_THAT(Differences(one, RunRanks(model, 4)), IsEmpty());
}

TEST_P(EveryTensorDegree, GivesTheBitsOfOneRankWithItsOwnTokensAlone) {
  RankTestModel model = GetParam().model;
  const RankResults one = RunRanks(model, 1);
  model.sequence = true;
  EXPECT_THAT(Differences(one, RunRanks(model, 2)), IsEmpty());
  EXPECT_THAT(Differences(one, RunRanks(model, 4)), IsEmpty());
}

// Three chunks of the tokens: each is summed apart, and nothing else changes.
TEST_P(EveryTensorDegree, GivesTheBitsOfOneRankInChunksOfTokens) {
  RankTestModel model = GetParam().model;
  const RankResults one = RunRanks(model, 1);
  model.chunks = 3;
  for (const bool sequence : {false, true}) {
    model.sequence = sequence;
    EXPECT_THAT(Differences(one, RunRanks(model, 2)), IsEmpty()) << sequence;
    if (!ravel::testing::kSanitized) {
      EXPECT_THAT(Differences(one, RunRanks(model, 4)), IsEmpty()) << sequence;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         EveryTensorDegree,
                         ::testing::ValuesIn(AllModels()),
                         [](const auto& row) { return row.param.name; });

std::vector<float> Random(int64_t n, uint32_t site) {
  std::vector<float> values(static_cast<size_t>(n));
  kernels::CpuStream stream;
  kernels::InitNormal(stream,
                      {.out = VectorView(values.data(), n),
                       .seed = 3,
                       .site = site,
                       .first_index = 0,
                       .standard_deviation = 1.0f});
  return values;
}

// Gradients of the weights of the norm before the MLP, weight and bias, from the rows of one rank;
// `dx` gets the rank's rows.
std::vector<float> NormGradients(const RankTestModel& model,
                                 const plan::TensorCut& cut,
                                 std::vector<float>& dx) {
  plan::ModelInventory inventory = plan::BuildInventory(
      *plan::ValidateModelConfig(model.config), model.shape, model.recompute, cut);
  plan::ReserveTensorParts(inventory);
  const plan::UnitId unit = static_cast<int>(inventory.units.size()) - 2;
  UnitOfRank memory(inventory, unit, DType::kF32);
  const UnitTensors tensors(inventory, unit);
  const Norm norm(tensors, tensors.architecture().mlp_norm);
  const int64_t tokens = model.shape.sequences * model.shape.sequence_tokens;
  const int64_t rows = cut.sequence ? tokens / cut.degree : tokens;
  const int64_t hidden = model.config.hidden_size;
  std::vector<float> x = Random(tokens * hidden, 1);
  std::vector<float> dy = Random(tokens * hidden, 2);
  const auto mine = [&](std::vector<float>& all) {
    return RowsOf(MatrixView(all.data(), tokens, hidden), cut.coordinate * rows, rows);
  };
  std::vector<float> y(x.size());
  std::vector<float> statistics(static_cast<size_t>(2 * rows));
  const Norm::Statistics of_rows = {.mean = VectorView(statistics.data(), rows),
                                    .rstd = VectorView(statistics.data() + rows, rows)};
  kernels::CpuStream stream;
  const UnitMemory unit_memory = memory.Memory({}, plan::UnitPass::kBackward);
  norm.Forward(
      stream,
      {.memory = unit_memory, .x = mine(x), .copy = {}, .y = mine(y), .statistics = of_rows});
  norm.Backward(stream,
                {.memory = unit_memory,
                 .gradients = memory.Gradients(kernels::Output::kOverwrite),
                 .dy = mine(dy),
                 .x = mine(x),
                 .dresidual = {},
                 .dx = mine(dx),
                 .statistics = of_rows});
  std::vector<float> gradients;
  for (const char* suffix : {"weight", "bias"}) {
    if (norm.has_mean() || std::string(suffix) == "weight") {
      const std::vector<float> values =
          FloatsOf(memory.Gradient(tensors.Index(tensors.architecture().mlp_norm, suffix)));
      gradients.insert(gradients.end(), values.begin(), values.end());
    }
  }
  return gradients;
}

TEST(TensorParts, NormsOfCutTokensGiveTheBitsOfAll) {
  for (const plan::ArchitectureKind kind :
       {plan::ArchitectureKind::kLlama, plan::ArchitectureKind::kGpt2}) {
    const RankTestModel model = ModelOf(kind, 4);
    const auto elements = static_cast<size_t>(12 * model.config.hidden_size);
    std::vector<float> dx(elements);
    const std::vector<float> whole = NormGradients(model, {.parts = 4}, dx);
    std::vector<float> other_dx(elements);
    EXPECT_NE(NormGradients(model, {}, other_dx), whole);
    EXPECT_EQ(dx, other_dx);
    for (const int64_t degree : {2, 4}) {
      std::vector<std::vector<float>> ranks;
      std::vector<float> cut_dx(elements);
      for (int64_t rank = 0; rank < degree; ++rank) {
        ranks.push_back(NormGradients(
            model, {.parts = 4, .degree = degree, .coordinate = rank, .sequence = true}, cut_dx));
      }
      for (; ranks.size() > 1; ranks.resize(ranks.size() / 2)) {
        for (size_t i = 0; 2 * i < ranks.size(); ++i) {
          std::vector<float> sum = ranks[2 * i];
          for (size_t e = 0; e < sum.size(); ++e) {
            sum[e] += ranks[2 * i + 1][e];
          }
          ranks[i] = sum;
        }
      }
      EXPECT_EQ(ranks[0], whole) << degree;
      EXPECT_EQ(cut_dx, dx) << degree;
    }
  }
}

void ExpectEveryUseIsNeeded(bool sequence) {
  using Part = SegmentWatch::Part;
  using Use =
      std::tuple<plan::UnitPass, plan::SegmentKind, plan::ActivationList, std::string, Part>;
  for (const plan::ArchitectureKind kind :
       {plan::ArchitectureKind::kQwen3, plan::ArchitectureKind::kGpt2}) {
    RankTestModel model = ModelOf(kind, 8);
    model.config.num_hidden_layers = 1;
    model.micro_batches = 1;
    model.sequence = sequence;
    const bool block = kind == plan::ArchitectureKind::kQwen3;
    model.recompute = block ? plan::RecomputePolicy::kBlock : plan::RecomputePolicy::kNone;
    std::set<Use> all;
    const auto of = [](auto pass, auto segment, const plan::SegmentUse& use, Part part) {
      return Use(pass, segment, use.list, use.name, part);
    };
    model.without = [&](auto pass, auto segment, const auto& use, Part part) {
      all.insert(of(pass, segment, use, part));
      return false;
    };
    const RankResults whole = RunRanks(model, 2);
    const size_t every = all.size() / ravel::testing::Fewer(all.size(), size_t{8});
    size_t index = 0;
    for (const Use& lacking : all) {
      if (index++ % every != 0) {
        continue;
      }
      const std::string& name = std::get<3>(lacking);
      if (name == "ids" || name == "targets") {  // that are no tokens would end the process
        continue;
      }
      model.without = [&](auto pass, auto segment, const auto& use, Part part) {
        return of(pass, segment, use, part) == lacking;
      };
      EXPECT_THAT(Differences(whole, RunRanks(model, 2)), Not(IsEmpty()))
          << plan::UnitPassName(std::get<0>(lacking)) << " "
          << plan::SegmentName(std::get<1>(lacking)) << " without " << name << " "
          << static_cast<int>(std::get<4>(lacking));
    }
    EXPECT_GT(all.size(), 60u);
  }
}

TEST(TensorParts, NoUseOfASegmentCanBeLeftOut) {
  ExpectEveryUseIsNeeded(false);
}
TEST(TensorParts, NoUseOfASegmentOfOwnTokensCanBeLeftOut) {
  ExpectEveryUseIsNeeded(true);
}

// One rule of the order of sums, and a model whose bits then depend on the number of ranks.
struct OrderRule {
  const char* rule;
  Mistake without;
  RankTestModel model;
  std::vector<int64_t> degrees;  // on which they differ from one rank's
  bool one_follows = false;      // one rank keeps to the rule: without it, all would alike
};

std::vector<OrderRule> OrderRules() {
  using plan::ArchitectureKind;
  const RankTestModel qwen3 = ModelOf(ArchitectureKind::kQwen3, 2);
  const RankTestModel llama = ModelOf(ArchitectureKind::kLlama, 2);
  RankTestModel narrow = qwen3;
  narrow.dtype = DType::kBF16;
  RankTestModel own_tokens = qwen3;
  own_tokens.sequence = true;
  RankTestModel gpt2 = ModelOf(ArchitectureKind::kGpt2, 8);
  gpt2.sequence = true;
  RankTestModel chunks = llama;
  chunks.chunks = 3;
  // Logits of a token may both be below 0, the maximum that an empty block must not have.
  RankTestModel two_words = ModelOf(ArchitectureKind::kQwen2, 8);
  two_words.config.vocab_size = 2;
  return {
      {"products are summed part by part", Mistake::kSumByRank, qwen3, {2, 4}},
      {"the same of own tokens", Mistake::kSumByRank, own_tokens, {2, 4}},
      {"a sum is rounded once, with the residual", Mistake::kRoundBeforeAdding, narrow, {2, 4}},
      {"a sum stays with the owner of its tokens", Mistake::kFirstRows, own_tokens, {2, 4}},
      {"a part of a bundle is a share of each member", Mistake::kMembersAsOne, llama, {2}},
      {"key heads below P have a leaf of each part", Mistake::kSharedHeadByRank, llama, {2}},
      {"q/k norms are a tree over parts",
       Mistake::kHeadNormsInOrder,
       ModelOf(ArchitectureKind::kQwen3, 4),
       {2, 4}},
      {"leaves add micro-batches first", Mistake::kFoldMicroBatches, qwen3, {2, 4}, true},
      {"the same of own tokens", Mistake::kFoldMicroBatches, own_tokens, {2, 4}, true},
      {"the loss is of vocabulary blocks", Mistake::kLossByRank, qwen3, {2, 4}},
      {"a chunk of logits is of the whole vocabulary", Mistake::kLogitsByRank, llama, {2, 4}},
      {"an empty block has the maximum -inf", Mistake::kEmptyBlockOfZeros, two_words, {2, 4}},
      {"rows that a rank lacks are -0", Mistake::kPlusZero, qwen3, {2, 4}},
      {"positions are summed in token order", Mistake::kPositionsByRank, gpt2, {2, 4}},
      {"a weight gradient is one product of all chunks", Mistake::kWeightsByChunk, chunks, {2, 4}},
  };
}

// Without one rule the bits of two or four ranks are not those of one, and with all of them they
// are. A rank of four has one part alone, so that the order in it needs no rule of parts.
TEST(TensorParts, EachRuleOfTheOrderIsNeeded) {
  std::string table;
  std::vector<OrderRule> rules = OrderRules();
  rules.resize(ravel::testing::Fewer(rules.size(), size_t{5}));
  for (const OrderRule& row : rules) {
    absl::StrAppend(&table, row.rule, ":");
    const RankResults one = RunRanks(row.model, 1);
    const RankResults one_without = row.one_follows ? one : RunRanks(row.model, 1, row.without);
    for (const int64_t degree : {2, 4}) {
      EXPECT_THAT(Differences(one, RunRanks(row.model, degree)), IsEmpty())
          << row.rule << " on " << degree;
      const std::vector<std::string> differ =
          Differences(one_without, RunRanks(row.model, degree, row.without));
      const bool expected =
          std::find(row.degrees.begin(), row.degrees.end(), degree) != row.degrees.end();
      EXPECT_EQ(!differ.empty(), expected) << "without " << row.rule << " on " << degree;
      absl::StrAppend(&table,
                      "  T = ",
                      degree,
                      ": ",
                      differ.size(),
                      " differ",
                      differ.empty() ? "" : ", as " + differ.front());
    }
    table += "\n";
  }
  // An empty block's sum of 0 is added, which changes no bit of a sum above it: nothing to leave
  // out.
  std::printf("Results that differ from one rank's without a rule:\n%s", table.c_str());
}

}  // namespace
}  // namespace ravel::model
