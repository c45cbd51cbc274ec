// Does not compile when a struct of a plan has a field more or less: the codec must know it
// (plan_proto_test), and then it is named here.

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/plan_proto.h"
#include "common/plan/sharding_plan.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

TEST(PlanProto, EveryFieldOfTheStructIsKnown) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 3, 4, false);
  const auto& [ranks,
               lanes,
               micro_batch,
               options,
               inventory,
               mesh,
               groups,
               roles,
               moves,
               buffers,
               memory,
               programs] = plan;
  const auto& [lane_count, lane_ranks, replicas, blocks, micro_batches] = lanes;
  const auto& [sequences, sequence_tokens] = micro_batch;
  const auto& [group_unit, group_trainable, group_recipe, layout, tensors, tensor_offsets] =
      groups.front();
  const auto& [width, shard_elements, offsets, padding_elements] = layout;
  const auto& [stored, parameter, used, staged, between, measured, at_step] = roles.front();
  const auto& [buffer_name,
               buffer_kind,
               buffer_memory,
               buffer_unit,
               buffer_group,
               buffer_call,
               slot,
               bytes,
               dtype,
               persistent,
               inside] = buffers.front();
  const auto& [buffer_offsets,
               private_bytes,
               symmetric_bytes,
               common_bytes,
               offload_bytes,
               lower_bound] = memory;
  EXPECT_EQ(lane_ranks, ranks);
  EXPECT_EQ(options.ranks, ranks);
  EXPECT_EQ(group_recipe, Recipe::kNone);
  EXPECT_EQ(offload_bytes, 0);
  EXPECT_EQ(sequences, 2);
  EXPECT_EQ(group_unit, 0);
  EXPECT_EQ(width, 3);
  EXPECT_TRUE(group_trainable);
  EXPECT_NE(staged, between);
  EXPECT_GT(bytes, 0);
  EXPECT_GT(private_bytes, 0);
}

TEST(PlanProto, EveryFieldOfTheOptionsIsKnown) {
  const ProgramOptions options =
      testing::PlanOf(testing::Llama(64, 2, 96, 257), 3, 4, false).options;
  const auto& [option_ranks,
               gather_in_place,
               read_peers_in_place,
               gather_window,
               staging_window,
               prefetch,
               option_replicas,
               recompute,
               weight_type,
               main_type,
               optimizer,
               state_types,
               gradient_wire,
               staged_type,
               communication_blocks,
               attention_workspace_bytes,
               logits_chunk_tokens,
               option_layer_drop,
               amax_history,
               amax_margin,
               offload_fraction,
               offload_copies,
               gemm_path,
               fast_accumulation,
               amax_algorithm,
               first_scale,
               amax_epsilon,
               tensor_parts] = options;
  EXPECT_EQ(option_ranks, 3);
  EXPECT_EQ(option_replicas, 1);
  EXPECT_EQ(option_layer_drop, 0);
  EXPECT_EQ(amax_history, 0);
  EXPECT_EQ(amax_margin, 0);
  EXPECT_EQ(offload_fraction, 0);
  EXPECT_FALSE(offload_copies);
  EXPECT_EQ(gemm_path, GemmPath::kNone);
  EXPECT_EQ(fast_accumulation, FastAccumulation::kForward);
  EXPECT_EQ(amax_algorithm, AmaxAlgorithm::kMax);
  EXPECT_EQ(first_scale, FirstScale::kCurrent);
  EXPECT_EQ(amax_epsilon, 0);
  EXPECT_EQ(tensor_parts, 1);
}

TEST(PlanProto, PlansOfFp16RoundTripAndOthersDoNotChange) {
  JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
  const auto plan_of = [&](ComputeType compute) {
    spec.compute = compute;
    return *BuildShardingPlan({.spec = spec, .ranks = 2});
  };
  const ShardingPlan fp16 = plan_of(ComputeType::kF16);
  const ShardingPlan bf16 = plan_of(ComputeType::kBF16);
  EXPECT_FALSE(ToProto(bf16).options().fp16_weights());
  const absl::StatusOr<ShardingPlan> back = ParsePlan(SerializePlan(fp16));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(SerializePlan(*back), SerializePlan(fp16));
  EXPECT_NE(SerializePlan(fp16), SerializePlan(bf16));
  EXPECT_EQ(back->options.weight_type, DType::kF16);
  EXPECT_TRUE(back->buffers == fp16.buffers);
  EXPECT_EQ(fp16.memory.private_bytes, bf16.memory.private_bytes);
  EXPECT_EQ(fp16.memory.symmetric_bytes, bf16.memory.symmetric_bytes);
  v1::ShardingPlan odd = ToProto(fp16);
  odd.mutable_options()->set_weight_element_bytes(4);
  EXPECT_THAT(std::string(FromProto(odd).status().message()), ::testing::HasSubstr("fp16_weights"));
}

TEST(Fp16Plan, IsRefusedByFieldWhereItCannotWork) {
  const auto refusal = [](const auto& edit) {
    JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 4);
    spec.compute = ComputeType::kF16;
    edit(spec);
    return std::string(BuildShardingPlan({.spec = spec, .ranks = 2}).status().message());
  };
  EXPECT_EQ(refusal([](JobSpec&) {}), "");
  EXPECT_EQ(refusal([](JobSpec& spec) { spec.cpu_devices = false; }), "");
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.recipe.recipe = Recipe::kMxFp8; }),
              ::testing::HasSubstr("fp16"));
  EXPECT_THAT(
      refusal([](JobSpec& spec) { spec.optimizer.main_weights = MainWeightForm::kBF16Remainder; }),
      ::testing::HasSubstr("training.optimizer.mainWeights"));
  EXPECT_THAT(refusal([](JobSpec& spec) { spec.loss_scale.initial = 3; }),
              ::testing::HasSubstr("precision.lossScale.initial"));
}

}  // namespace
}  // namespace ravel::plan
