// Plans whose mesh has a tensor axis: who owns what, and who saves it.

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/architecture.h"
#include "common/model/tensor_cuts.h"
#include "common/plan/check/program_checker.h"
#include "common/plan/plan_pieces.h"
#include "common/plan/plan_proto.h"
#include "common/plan/save/save_plan.h"
#include "tests/common/plan/plan_testing.h"
#include "tests/testing/cpu_time.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

ModelConfig ModelOf(ArchitectureKind kind, int64_t key_heads, bool tied) {
  ModelConfig config = ArchitectureOf(kind).defaults;
  config.vocab_size = 97;
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 8;
  config.num_key_value_heads = ArchitectureOf(kind).qkv.names.size() == 1 ? 8 : key_heads;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  config.tie_word_embeddings = tied;
  return config;
}

JobSpec CutSpec(const ModelConfig& config, int64_t tensor, int64_t replicas, Strategy strategy) {
  JobSpec spec = testing::SpecOf(config, 8);
  spec.tensor = tensor;
  spec.replicas = replicas;
  spec.strategy = strategy;
  return spec;
}

// Times that each element of each tensor is among the pieces of all ranks.
using Cover = std::vector<std::vector<int>>;
template <typename PiecesOfRank>
Cover CoverOf(const ShardingPlan& plan, const PiecesOfRank& pieces_of) {
  Cover cover;
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    cover.emplace_back(static_cast<size_t>(ElementCount(tensor.shape)), 0);
  }
  for (int64_t rank = 0; rank < plan.ranks; ++rank) {
    for (const GroupId group : plan.groups.ids()) {
      for (const OwnedPiece& piece : pieces_of(group, rank)) {
        piece.VisitRuns(plan.inventory.tensors[piece.tensor].shape, [&](const OwnedRun& run) {
          for (int64_t i = run.first; i < run.first + run.elements; ++i) {
            ++cover[static_cast<size_t>(piece.tensor)][static_cast<size_t>(i)];
          }
        });
      }
    }
  }
  return cover;
}

bool EachOnce(const Cover& cover) {
  for (const std::vector<int>& tensor : cover) {
    for (const int times : tensor) {
      if (times != 1) {
        return false;
      }
    }
  }
  return true;
}

// A step is saved from what ranks count, and the save plan proves that its chunks cover each tensor
// once. Fails when parts, copies or blocks of a vocabulary are given to no rank or to two.
TEST(TensorAxisPlan, OwnedBoxesCoverEveryTensorOnce) {
  std::mt19937_64 random(testing::kSeed);
  const auto any = [&](const std::vector<int64_t>& of) { return of[random() % of.size()]; };
  constexpr Strategy kStrategies[] = {
      Strategy::kNoShard, Strategy::kOptim, Strategy::kOptimGrads, Strategy::kOptimGradsParams};
  for (int round = 0; round < 60; ++round) {
    const auto kind =
        AllArchitectures()[static_cast<size_t>(round) % AllArchitectures().size()]->kind;
    const int64_t tensor = any({2, 4, 8});
    const int64_t replicas = any({1, 2});
    const int64_t shards = any({1, 2, 3, 4});
    const ModelConfig config = ModelOf(kind, any({1, 2, 4, 8}), random() % 2 == 0);
    JobSpec spec = CutSpec(config, tensor, replicas, kStrategies[random() % 4]);
    spec.sequence_parallel = random() % 2 == 0;
    SCOPED_TRACE(std::string(ArchitectureOf(kind).model_type) + ", replicas " +
                 std::to_string(replicas) + ", shards " + std::to_string(shards) + ", tensor " +
                 std::to_string(tensor) + ", key heads " +
                 std::to_string(config.num_key_value_heads));
    const absl::StatusOr<ShardingPlan> plan = BuildShardingPlan(
        {.spec = spec, .ranks = replicas * shards * tensor, .shared_memory = false});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->mesh.axes().back(), (MeshAxis{kTensorAxis, tensor}));
    EXPECT_EQ(plan->lanes.ranks, replicas * shards);
    EXPECT_TRUE(EachOnce(CoverOf(
        *plan, [&](GroupId group, int64_t rank) { return CountedPieces(*plan, group, rank); })));
    for (const std::vector<int>&times : CoverOf(*plan, [&](GroupId group, int64_t rank) {
           return StoredPieces(*plan, group, rank);
         })) {
      EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](int count) { return count >= 1; }));
    }
    const absl::StatusOr<SavePlan> save = BuildSavePlan(*plan);
    ASSERT_TRUE(save.ok()) << save.status();
    EXPECT_TRUE(ProveCover(*save).ok());
  }
}

// Rank t of T has blocks t * P / T ... of a vocabulary, as it would one by one at T = P.
TEST(TensorAxisPlan, VocabularyRowsOfARankAreWholeBlocks) {
  const ModelConfig config = ModelOf(ArchitectureKind::kLlama, 4, true);
  const ShardingPlan plan = *BuildShardingPlan(
      {.spec = CutSpec(config, 4, 1, Strategy::kNoShard), .ranks = 4, .shared_memory = false});
  const TensorId table = plan.inventory.FindTensor("model.embed_tokens.weight");
  std::vector<Box> rows;
  for (int64_t rank = 0; rank < 4; ++rank) {
    for (const GroupId group : plan.groups.ids()) {
      for (const OwnedPiece& piece : StoredPieces(plan, group, rank)) {
        if (piece.tensor == table) {
          rows.push_back(piece.item);
        }
      }
    }
  }
  // 97 rows in 4 blocks of RoundUp(25, 8).
  EXPECT_EQ(rows,
            (std::vector<Box>{
                {{0, 0}, {32, 64}}, {{32, 0}, {32, 64}}, {{64, 0}, {32, 64}}, {{96, 0}, {1, 64}}}));
}

// q|k|v of one [in, out] matrix: each part is cut, and a matrix of its own in the buffer.
TEST(TensorAxisPlan, PartsOfAFusedMatrixAreCutEach) {
  const ModelConfig config = ModelOf(ArchitectureKind::kGpt2, 8, true);
  const ShardingPlan plan = *BuildShardingPlan(
      {.spec = CutSpec(config, 2, 1, Strategy::kNoShard), .ranks = 2, .shared_memory = false});
  const TensorId fused = plan.inventory.FindTensor("transformer.h.0.attn.c_attn.weight");
  ASSERT_GE(fused, 0);
  std::vector<OwnedPiece> pieces;
  for (const GroupId group : plan.groups.ids()) {
    for (const OwnedPiece& piece : StoredPieces(plan, group, 1)) {
      if (piece.tensor == fused) {
        pieces.push_back(piece);
      }
    }
  }
  ASSERT_EQ(pieces.size(), 3u);
  for (int64_t part = 0; part < 3; ++part) {
    const OwnedPiece& piece = pieces[static_cast<size_t>(part)];
    EXPECT_EQ(piece.item, (Box{{0, 64 * part + 32}, {64, 32}}));
    EXPECT_EQ(piece.shard_offset, pieces[0].shard_offset + part * 64 * 32);
  }
}

// Groups do not mix gradients that are reduced over the axis with others: a reduce moves whole
// buffers.
TEST(TensorAxisPlan, AddendsHaveGroupsOfTheirOwn) {
  JobSpec spec =
      CutSpec(ModelOf(ArchitectureKind::kQwen3, 2, false), 4, 1, Strategy::kOptimGradsParams);
  spec.sequence_parallel = true;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 8, .shared_memory = false});
  for (const GroupLayout& group : plan.groups) {
    const DimensionCut& first = plan.inventory.tensors[group.tensors.front()].cut;
    for (const TensorId id : group.tensors) {
      const DimensionCut& cut = plan.inventory.tensors[id].cut;
      EXPECT_EQ(cut.partial_gradient, first.partial_gradient);
      EXPECT_EQ(cut.partial_gradient ? cut.copies : 0, first.partial_gradient ? first.copies : 0);
    }
  }
}

TEST(TensorAxisPlan, SurvivesItsBytes) {
  JobSpec spec = CutSpec(ModelOf(ArchitectureKind::kGpt2, 8, true), 4, 2, Strategy::kOptim);
  spec.sequence_parallel = true;
  const ShardingPlan plan = *BuildShardingPlan({.spec = spec, .ranks = 16, .shared_memory = false});
  const std::string bytes = SerializePlan(plan);
  const absl::StatusOr<ShardingPlan> back = ParsePlan(bytes);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->mesh, plan.mesh);
  EXPECT_EQ(back->inventory.cut, plan.inventory.cut);
  EXPECT_EQ(SerializePlan(*back), bytes);
  const absl::StatusOr<JobSpec> job = ParseJob(SerializeJob(spec));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->tensor, 4);
  EXPECT_TRUE(job->sequence_parallel);
}

TEST(TensorAxisPlan, RefusesWhatItCannotCut) {
  const ModelConfig config = ModelOf(ArchitectureKind::kLlama, 4, true);
  const auto refusal = [&](JobSpec spec, int64_t ranks) {
    return std::string(BuildShardingPlan({.spec = spec, .ranks = ranks, .shared_memory = false})
                           .status()
                           .message());
  };
  const JobSpec spec = CutSpec(config, 4, 1, Strategy::kOptim);
  EXPECT_THAT(refusal(spec, 6),
              HasSubstr("devices.count: expected a multiple of parallelism.tensor 4, got 6"));
  EXPECT_THAT(refusal(spec, 64),
              HasSubstr("determinism.virtualRanks 8 times parallelism.tensor, got 64"));
  JobSpec wide = spec;
  wide.tensor = 16;
  EXPECT_THAT(refusal(wide, 16), HasSubstr("determinism.tensorParts"));
}

// 70 B parameters on 512 devices as 64 x 8: in half a second of processor time, where the build is
// optimised and has no sanitizer.
TEST(TensorAxisPlan, Llama70bOn64Times8) {
  JobSpec spec = CutSpec(testing::Llama70b(), 8, 1, Strategy::kOptimGradsParams);
  spec.virtual_ranks = 64;
  spec.global_batch = 128;
  spec.data.sequence_length = 8192;
  spec.sequence_parallel = true;
  spec.allow_padding = false;
  const double before = ravel::testing::ProcessCpuMs();
  const absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = 512, .shared_memory = false});
  const double seconds = 1e-3 * (ravel::testing::ProcessCpuMs() - before);
  ASSERT_TRUE(plan.ok()) << plan.status();
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_LT(seconds, RAVEL_MOST_PLAN_SECONDS);
  EXPECT_EQ(plan->mesh.Text(), "shard 64 x tensor 8");
}

}  // namespace
}  // namespace ravel::plan
