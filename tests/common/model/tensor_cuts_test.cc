#include "common/model/tensor_cuts.h"

#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

constexpr MicroBatchShape kCutsShape = {.sequences = 2, .sequence_tokens = 16};

ModelConfig Model(ArchitectureKind kind, int64_t heads = 8, int64_t key_heads = 4) {
  ModelConfig config = ArchitectureOf(kind).defaults;
  config.vocab_size = 97;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 1;
  config.num_attention_heads = heads;
  config.num_key_value_heads = ArchitectureOf(kind).qkv.names.size() == 1 ? heads : key_heads;
  config.head_dim = 8;
  config.max_position_embeddings = 32;
  return config;
}

ModelInventory Cut(const ModelConfig& config, const TensorCut& axis) {
  return BuildInventory(config, kCutsShape, RecomputePolicy::kNone, axis);
}

const TensorSpec& Find(const ModelInventory& inventory, const std::string& name) {
  for (const TensorSpec& tensor : inventory.tensors) {
    if (tensor.name.find(name) != std::string::npos) {
      return tensor;
    }
  }
  ADD_FAILURE() << name;
  return inventory.tensors.front();
}

// Column layers by outputs, row layers by inputs, whatever the layout of the matrices.
TEST(TensorCuts, FollowTheLayoutOfTheMatrices) {
  const TensorCut axis = {.parts = 2, .degree = 2};
  const ModelInventory llama = Cut(Model(ArchitectureKind::kLlama), axis);
  EXPECT_EQ(Find(llama, "q_proj").cut.dim, 0);
  EXPECT_EQ(ItemShape(Find(llama, "q_proj")), (Shape{32, 64}));
  EXPECT_EQ(ItemShape(Find(llama, "k_proj")), (Shape{16, 64}));
  EXPECT_EQ(ItemShape(Find(llama, "up_proj")), (Shape{48, 64}));
  EXPECT_EQ(ItemShape(Find(llama, "o_proj")), (Shape{64, 32}));
  EXPECT_EQ(ItemShape(Find(llama, "down_proj")), (Shape{64, 48}));
  EXPECT_EQ(ItemShape(Find(llama, "input_layernorm")), (Shape{64}));
  const ModelInventory gpt = Cut(Model(ArchitectureKind::kGpt2), axis);
  EXPECT_EQ(Find(gpt, "attn.c_attn.weight").cut.dim, 1);
  EXPECT_EQ(Find(gpt, "attn.c_attn.weight").cut.parts, (std::array<int64_t, 4>{64, 64, 64, 0}));
  EXPECT_EQ(ItemShape(Find(gpt, "attn.c_attn.weight")), (Shape{64, 96}));
  EXPECT_EQ(ItemShape(Find(gpt, "attn.c_attn.bias")), (Shape{96}));
  EXPECT_EQ(ItemShape(Find(gpt, "attn.c_proj.weight")), (Shape{32, 64}));
  EXPECT_EQ(ItemShape(Find(gpt, "attn.c_proj.bias")), (Shape{64}));
  EXPECT_EQ(ItemShape(Find(gpt, "mlp.c_fc.weight")), (Shape{64, 48}));
  EXPECT_EQ(ItemShape(Find(gpt, "mlp.c_proj.weight")), (Shape{48, 64}));
  EXPECT_EQ(ItemShape(Find(gpt, "wpe")), (Shape{32, 64}));
  const ModelInventory qwen = Cut(Model(ArchitectureKind::kQwen2), axis);
  EXPECT_EQ(ItemShape(Find(qwen, "q_proj.bias")), (Shape{32}));
}

// Norms of cut heads are sums over the axis always, other replicated tensors where tokens are cut.
TEST(TensorCuts, GradientsOfWhatIsNotCutMayBeAddends) {
  for (const bool sequence_parallel : {false, true}) {
    const TensorCut axis = {.parts = 2, .degree = 2, .sequence = sequence_parallel};
    const ModelInventory qwen = Cut(Model(ArchitectureKind::kQwen3), axis);
    EXPECT_TRUE(Find(qwen, "q_norm").cut.partial_gradient);
    EXPECT_TRUE(Find(qwen, "k_norm").cut.partial_gradient);
    EXPECT_EQ(Find(qwen, "input_layernorm").cut.partial_gradient, sequence_parallel);
    EXPECT_EQ(Find(qwen, "model.norm").cut.partial_gradient, sequence_parallel);
    EXPECT_FALSE(Find(qwen, "q_proj").cut.partial_gradient);
    const ModelInventory gpt = Cut(Model(ArchitectureKind::kGpt2), axis);
    EXPECT_EQ(Find(gpt, "c_proj.bias").cut.partial_gradient, sequence_parallel);
    EXPECT_FALSE(Find(gpt, "c_attn.bias").cut.partial_gradient);
    EXPECT_FALSE(Find(gpt, "wpe").cut.partial_gradient);
  }
  const ModelInventory one = Cut(Model(ArchitectureKind::kQwen3), {});
  EXPECT_FALSE(Find(one, "q_norm").cut.partial_gradient);
}

// The vocabulary of 97 rows is in blocks of 32; key heads are copied; nothing else differs by rank.
TEST(TensorCuts, LastRanksHaveFewerRowsOfAVocabularyOrNone) {
  ModelConfig config = Model(ArchitectureKind::kLlama, 8, 2);
  const ModelInventory inventory = Cut(config, {.parts = 4, .degree = 4});
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(RankShape(Find(inventory, "lm_head"), rank), (Shape{rank < 3 ? 32 : 1, 64}));
    EXPECT_EQ(RankShape(Find(inventory, "k_proj"), rank), (Shape{8, 64}));
    EXPECT_EQ(RankShape(Find(inventory, "o_proj"), rank), (Shape{64, 16}));
    EXPECT_EQ(RankShape(Find(inventory, "input_layernorm"), rank), (Shape{64}));
  }
  config.vocab_size = 9;
  const ModelInventory small = Cut(config, {.parts = 4, .degree = 4});
  EXPECT_EQ(RankShape(Find(small, "embed_tokens"), 1), (Shape{1, 64}));
  EXPECT_EQ(RankShape(Find(small, "embed_tokens"), 2), (Shape{0, 64}));
  EXPECT_EQ(RankShape(Find(small, "embed_tokens"), 3), (Shape{0, 64}));
  const ModelInventory whole = Cut(config, {.parts = 4});
  EXPECT_EQ(RankShape(Find(whole, "embed_tokens"), 0), (Shape{9, 64}));
}

TEST(TensorCuts, KeyHeadsFewerThanRanksAreCopied) {
  const ModelInventory inventory =
      Cut(Model(ArchitectureKind::kLlama, 8, 2), {.parts = 8, .degree = 8});
  EXPECT_EQ(Find(inventory, "k_proj").cut.copies, 4);
  EXPECT_TRUE(Find(inventory, "k_proj").cut.partial_gradient);
  EXPECT_EQ(ItemShape(Find(inventory, "k_proj")), (Shape{8, 64}));
  EXPECT_EQ(Find(inventory, "q_proj").cut.copies, 1);
  EXPECT_EQ(ItemShape(Find(inventory, "q_proj")), (Shape{8, 64}));
}

// A bundle is one for all T of a P: its scale would else be another.
TEST(TensorCuts, BundlesAreThoseOfTheFinestCut) {
  for (const int64_t ranks : {1, 2, 4, 8}) {
    const auto bundles = [&](int64_t key_heads) {
      return Cut(Model(ArchitectureKind::kLlama, 8, key_heads), {.parts = 8, .degree = ranks})
          .bundles.size();
    };
    EXPECT_EQ(bundles(8), 2u) << ranks;
    EXPECT_EQ(bundles(2), 1u) << ranks;  // gate and up alone
  }
}

TEST(TensorCuts, VocabulariesAreCutInBlocksOfP) {
  EXPECT_EQ(VocabularyBlockRows(50257, 1), 50257);
  EXPECT_EQ(VocabularyBlockRows(50257, 4), 12568);
  EXPECT_EQ(VocabularyBlockRows(9, 4), 8);
  EXPECT_EQ(VocabularyCut(50257, {.parts = 4, .degree = 2}).chunk, 25136);
  EXPECT_EQ(VocabularyCut(50257, {.parts = 4, .degree = 4}).chunk, 12568);
  EXPECT_EQ(VocabularyCut(50257, {}).chunk, 0);
  const ModelInventory inventory = Cut(Model(ArchitectureKind::kLlama), {.parts = 4, .degree = 2});
  EXPECT_EQ(ItemShape(Find(inventory, "embed_tokens")), (Shape{64, 64}));
  EXPECT_EQ(ItemShape(Find(inventory, "lm_head")), (Shape{64, 64}));
}

// Elements per token that a Llama-3-8B layer keeps.
TEST(TensorCuts, KeptActivationsOfALayer) {
  ModelConfig config;
  config.vocab_size = 1024;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  const auto kept = [&](int64_t ranks, bool sequence_parallel) {
    const ModelInventory inventory =
        Cut(config, {.parts = ranks, .degree = ranks, .sequence = sequence_parallel});
    int64_t elements = 0;
    for (const ActivationSpec& spec : inventory.units[UnitId(1)].saved) {
      elements += spec.shape.size() > 1 && spec.name != "lse" ? ElementCount(spec.shape) : 0;
    }
    return elements / (kCutsShape.sequences * kCutsShape.sequence_tokens);
  };
  EXPECT_EQ(kept(1, false), 55296);
  EXPECT_EQ(kept(2, false), 35840);
  EXPECT_EQ(kept(4, false), 26112);
  EXPECT_EQ(kept(8, false), 21248);
  EXPECT_EQ(kept(2, true), 27648);
  EXPECT_EQ(kept(4, true), 13824);
  EXPECT_EQ(kept(8, true), 6912);
}

struct Refusal {
  ModelConfig config;
  TensorCut axis;
  std::vector<std::string> texts;
};

TEST(TensorCuts, RefusalsNameFieldAndTensor) {
  ModelConfig odd_inner = Model(ArchitectureKind::kLlama);
  odd_inner.intermediate_size = 90;
  const ModelConfig llama = Model(ArchitectureKind::kLlama);
  const std::vector<Refusal> refusals = {
      {llama, {.parts = 3, .degree = 3}, {"parallelism.tensor", "a power of two up to 16, got 3"}},
      {llama, {.parts = 6, .degree = 4}, {"determinism.tensorParts", "a power of two", "got 6"}},
      {llama, {.parts = 2, .degree = 4}, {"determinism.tensorParts", "4 divides, got 2"}},
      {llama, {.sequence = true}, {"parallelism.sequenceParallel", "false"}},
      {llama,
       {.parts = 16, .degree = 16},
       {"parallelism.tensor", "8 heads of model.layers.0.self_attn.q_proj.weight, got 16"}},
      {Model(ArchitectureKind::kLlama, 12, 3),
       {.parts = 2, .degree = 2},
       {"parallelism.tensor",
        "a divisor or a multiple of the 3 key heads of model.layers.0.self_attn.k_proj.weight, got "
        "2"}},
      {odd_inner,
       {.parts = 4, .degree = 4},
       {"parallelism.tensor", "90, dimension 0 of model.layers.0.mlp.gate_proj.weight, got 4"}},
      {odd_inner, {.parts = 4, .degree = 2}, {"determinism.tensorParts", "gate_proj"}},
  };
  for (const Refusal& refusal : refusals) {
    const absl::Status degrees = CheckDegrees(refusal.axis);
    const absl::Status status =
        degrees.ok() ? CheckTensorAxis(Cut(refusal.config, refusal.axis), 32, false) : degrees;
    ASSERT_FALSE(status.ok()) << refusal.texts.back();
    for (const std::string& text : refusal.texts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    }
  }
  const TensorCut tokens = {.parts = 4, .degree = 4, .sequence = true};
  EXPECT_TRUE(CheckTensorAxis(Cut(llama, tokens), 32, false).ok());
  EXPECT_THAT(std::string(CheckTensorAxis(Cut(llama, tokens), 30, false).message()),
              HasSubstr("training.microBatch: expected times data.sequenceLength a multiple of 4"));
}

// Scales are of blocks of the whole tensor: a cut inside one would need two ranks for it.
TEST(TensorCuts, CutsFallBetweenBlocksThatShareAScale) {
  const TensorCut axis = {.parts = 4, .degree = 4};
  ModelInventory inventory = Cut(Model(ArchitectureKind::kLlama), axis);
  EXPECT_TRUE(CheckTensorAxis(inventory, 32, false).ok());
  EXPECT_THAT(std::string(CheckTensorAxis(inventory, 32, true).message()),
              HasSubstr("training.optimizer.stateDtype: expected fp32 or bf16, or parts of "
                        "model.layers.0.self_attn.o_proj.weight that are multiples of 128"));
  for (TensorSpec& tensor : inventory.tensors) {
    tensor.recipe = tensor.name.find("_proj") != std::string::npos ? Recipe::kMxFp8 : Recipe::kNone;
  }
  EXPECT_THAT(std::string(CheckTensorAxis(inventory, 32, false).message()),
              HasSubstr("precision.recipe: expected parts of "
                        "model.layers.0.self_attn.q_proj.weight that are multiples of 32, got 16"));
}

}  // namespace
}  // namespace ravel::plan
