#include "common/plan/numerics.h"

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/sharding_plan.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

JobSpec Spec() {
  JobSpec spec;
  ModelConfig& model = spec.model.emplace();
  model.vocab_size = 97;
  model.hidden_size = 32;
  model.intermediate_size = 48;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 8;
  model.max_position_embeddings = 64;
  spec.data.sequence_length = 16;
  spec.steps = 4;
  spec.global_batch = 16;
  spec.micro_batch = 2;
  spec.virtual_ranks = 8;
  spec.device_count = 4;
  spec.elastic.sizes = {1, 2, 4};
  return spec;
}

using Edit = std::function<void(JobSpec&)>;

std::string After(const Edit& edit) {
  JobSpec spec = Spec();
  edit(spec);
  return NumericsOf(spec);
}

TEST(Numerics, TheTextIsCanonical) {
  // On disk, in every manifest: a job that is resumed by a later release finds the same text.
  EXPECT_EQ(NumericsOf(Spec()),
            "compute=fp32 determinism=exact device=cpu gradientWire=fp32 layerDrop=0 "
            "layerSharing=false logitsChunk=1024 microBatch=2 recipe=none "
            "stateDtype=fp32 tensorParts=1 virtualRanks=8");
}

TEST(Numerics, WhateverChangesBitsChangesItsOwnEntry) {
  const std::vector<std::pair<std::string, Edit>> edits = {
      {"compute was fp32 and is bf16", [](JobSpec& s) { s.compute = ComputeType::kBF16; }},
      {"compute was fp32 and is fp16", [](JobSpec& s) { s.compute = ComputeType::kF16; }},
      {"determinism was exact and is fast",
       [](JobSpec& s) { s.determinism = DeterminismMode::kFast; }},
      {"device was cpu and is gpu; logitsChunk was 1024 and is 4096",
       [](JobSpec& s) { s.cpu_devices = false; }},
      {"recipe was none and is nvfp4,keepBf16:a*",
       [](JobSpec& s) { s.recipe = {.recipe = Recipe::kNvFp4, .keep_bf16 = {"a*"}}; }},
      {"gradientWire was fp32 and is bf16", [](JobSpec& s) { s.gradient_wire = WireType::kBF16; }},
      {"stateDtype was fp32 and is bf16",
       [](JobSpec& s) { s.optimizer.state_types = kBf16States; }},
      {"virtualRanks was 8 and is 16", [](JobSpec& s) { s.virtual_ranks = 16; }},
      {"logitsChunk was 1024 and is 256", [](JobSpec& s) { s.model->vocab_size = 200'000; }},
      {"layerSharing was false and is true", [](JobSpec& s) { s.model->layer_sharing = true; }},
      {"layerDrop was 0 and is 0.1", [](JobSpec& s) { s.layer_drop = 0.1; }},
      {"tensorParts was 1 and is 4", [](JobSpec& s) { s.tensor_parts = 4; }},
      {"microBatch was 2 and is 1", [](JobSpec& s) { s.micro_batch = 1; }}};
  for (const auto& [change, edit] : edits) {
    EXPECT_EQ(NumericsChange(NumericsOf(Spec()), After(edit)), change);
  }
}

TEST(Numerics, OfFp16TheyHaveTheLossScale) {
  JobSpec spec = Spec();
  spec.loss_scale.growth_interval = 100;
  EXPECT_EQ(NumericsOf(spec), NumericsOf(Spec()));
  const JobSpec saved = [] {
    JobSpec fp16 = Spec();
    fp16.compute = ComputeType::kF16;
    return fp16;
  }();
  spec.compute = ComputeType::kF16;
  EXPECT_EQ(NumericsChange(NumericsOf(saved), NumericsOf(spec)),
            "lossScale was 1024/2/0.5/2000/1/32768 and is 1024/2/0.5/100/1/32768");
}

TEST(Numerics, SizeStrategyTransportAndMemoryAreNotInIt) {
  const std::vector<Edit> edits = {
      [](JobSpec& s) { s.device_count = 2; },
      [](JobSpec& s) { s.elastic.sizes = {1}; },
      [](JobSpec& s) { s.strategy = Strategy::kNoShard; },
      [](JobSpec& s) { s.replicate_strategy = Strategy::kOptim; },
      [](JobSpec& s) { s.replicas = 2; },
      [](JobSpec& s) { s.recompute = RecomputePolicy::kBlock; },
      [](JobSpec& s) { s.transport = Transport::kGloo; },
      [](JobSpec& s) { s.communication_blocks = 4; },
      [](JobSpec& s) { s.gather_window_bytes = 1; },
      [](JobSpec& s) { s.staging_window_bytes = 1; },
      [](JobSpec& s) { s.algorithms = AlgorithmChoice::kProposed; },
      [](JobSpec& s) { s.optimizer.main_weights = MainWeightForm::kBF16Remainder; },
      [](JobSpec& s) { s.optimizer.lr = 1; },
      [](JobSpec& s) { s.checkpoint.allow_numerics_change = true; }};
  for (size_t i = 0; i < edits.size(); ++i) {
    EXPECT_EQ(After(edits[i]), NumericsOf(Spec())) << i;
  }
}

// The text states what the plan was made with.
TEST(Numerics, TheTextIsOfThePlan) {
  for (const int64_t vocabulary : {97, 200'000}) {
    JobSpec spec = Spec();
    spec.model->vocab_size = vocabulary;
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = 2, .shared_memory = true});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_THAT(NumericsOf(spec),
                HasSubstr(absl::StrCat("logitsChunk=", plan->options.logits_chunk_tokens, " ")));
    EXPECT_EQ(plan->lanes.lanes, 8);
    EXPECT_EQ(plan->micro_batch.sequences, 2);
  }
}

TEST(Numerics, WhatOneSideDoesNotSayIsNotKnown) {
  const std::string now = NumericsOf(Spec());
  for (const char* saved : {"", "f32", "cpu", "=", "=3", "compute=", "lanes=4", "  "}) {
    EXPECT_EQ(NumericsChange(saved, now), "") << saved;
  }
  EXPECT_EQ(NumericsChange("fresh=1 virtualRanks=4", now), "virtualRanks was 4 and is 8");
  EXPECT_EQ(NumericsChange("device=a=b", now), "device was a=b and is cpu");
}

TEST(Numerics, BeforeThereWereTensorPartsThereWasOne) {
  const std::string parts = After([](JobSpec& s) { s.tensor_parts = 2; });
  EXPECT_EQ(NumericsChange("virtualRanks=8", parts), "tensorParts was 1 and is 2");
  EXPECT_EQ(NumericsChange("", parts), "");
}

TEST(Numerics, ARefusalNamesTheStepBothValuesAndTheWayOut) {
  const std::string text =
      NumericsRefusal("/s/job/step-0000000020", "compute was bf16 and is fp32");
  EXPECT_THAT(text, HasSubstr("/s/job/step-0000000020 was computed with other numerics: compute "));
  EXPECT_THAT(text, HasSubstr("checkpoint.allowNumericsChange: true"));
  EXPECT_THAT(text, HasSubstr("--allow-numerics-change"));
}

}  // namespace
}  // namespace ravel::plan
