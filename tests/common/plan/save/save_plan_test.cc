#include "common/plan/save/save_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/plan_pieces.h"
#include "common/plan/save/save_headers.h"
#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

using ::testing::HasSubstr;

class SavePlanTest : public ::testing::TestWithParam<testing::ModelCase> {};

TEST_P(SavePlanTest, EveryElementIsWrittenOnceByItsOwner) {
  for (const int64_t ranks : {1, 2, 3, 5, 8}) {
    const ShardingPlan plan = testing::PlanOf(GetParam().config, ranks, 8, true);
    const absl::StatusOr<SavePlan> save = BuildSavePlan(plan);
    ASSERT_TRUE(save.ok()) << save.status();
    EXPECT_TRUE(ProveCover(*save).ok());
    EXPECT_EQ(save->tensors.size(), 4 * plan.inventory.tensors.size());
    std::vector<std::set<int64_t>> written(save->tensors.size());
    for (const SaveFile& file : save->files) {
      EXPECT_EQ(file.header_bytes % 4096, 0);
      int64_t next = file.header_bytes;
      for (const SaveChunk& chunk : file.chunks) {
        EXPECT_EQ(chunk.file_offset, next) << "no hole in " << file.path;
        next += chunk.bytes;
        const StateTensor& tensor = save->tensors[static_cast<size_t>(chunk.tensor)];
        EXPECT_EQ(file.path.rfind(tensor.role == StateRole::kParam ? "model/" : "optim/", 0), 0u);
        if (tensor.role == StateRole::kStep) {
          continue;
        }
        // The bytes that the chunk names in the writer's shard are those of its box.
        const GroupLayout& group = plan.groups[static_cast<size_t>(chunk.group)];
        const TensorId parameter = plan.inventory.FindTensor(tensor.of_param);
        bool found = false;
        for (const OwnedPiece& piece : testing::OwnedPieces(plan.inventory, group, file.writer)) {
          if (piece.tensor == parameter) {
            const int64_t first = piece.range.begin + chunk.shard_offset - piece.shard_offset;
            const int64_t count = ElementCount(chunk.box.length);
            EXPECT_LE(first + count, piece.range.end);
            const std::vector<Box> boxes = RangeToBoxes(tensor.shape, first, first + count);
            ASSERT_EQ(boxes.size(), 1u);
            EXPECT_EQ(boxes[0], chunk.box);
            found = true;
          }
        }
        EXPECT_TRUE(found) << tensor.key;
      }
      EXPECT_EQ(next, file.size);
    }
  }
}

TEST_P(SavePlanTest, SmallLimitsCutChunksIntoLayers) {
  const ShardingPlan plan = testing::PlanOf(GetParam().config, 2, 2, true);
  int64_t largest = 0;
  for (const TensorSpec& tensor : plan.inventory.tensors) {
    largest = std::max(largest, ElementCount(tensor.shape) * 4);
  }
  const SaveLimits limits = {.chunk_bytes = largest / 4, .file_bytes = largest};
  const absl::StatusOr<SavePlan> save = BuildSavePlan(plan, limits);
  ASSERT_TRUE(save.ok()) << save.status();
  std::map<int, int> model_files;
  for (const SaveFile& file : save->files) {
    model_files[file.writer] += file.path.rfind("model/", 0) == 0 ? 1 : 0;
    EXPECT_LE(file.size - file.header_bytes, limits.file_bytes);
    for (const SaveChunk& chunk : file.chunks) {
      EXPECT_LE(chunk.bytes, limits.chunk_bytes);
    }
  }
  EXPECT_GE(model_files[0], 2);
}

// Under every strategy: parameters of frozen tensors, no moments of theirs; where ranks hold the
// same the first writes, and everybody writes something.
TEST(SavePlanStrategies, EveryElementIsWrittenOnce) {
  struct StrategyAxes {
    Strategy shard;
    Strategy replicate;
    int64_t replicas;
  };
  for (const StrategyAxes& axes :
       {StrategyAxes{Strategy::kNoShard, Strategy::kNoShard, 1},
        StrategyAxes{Strategy::kOptim, Strategy::kNoShard, 2},
        StrategyAxes{Strategy::kOptimGradsParams, Strategy::kNoShard, 2},
        StrategyAxes{Strategy::kOptimGradsParams, Strategy::kOptim, 2}}) {
    JobSpec spec = testing::SpecOf(testing::Llama(64, 2, 96, 257), 8);
    spec.strategy = axes.shard;
    spec.replicate_strategy = axes.replicate;
    spec.replicas = axes.replicas;
    spec.freeze = {"model.layers.0.*"};
    const ShardingPlan plan =
        *BuildShardingPlan({.spec = spec, .ranks = 4, .shared_memory = false});
    const absl::StatusOr<SavePlan> save = BuildSavePlan(plan);
    ASSERT_TRUE(save.ok()) << save.status();
    std::set<int> writers;
    for (const SaveFile& file : save->files) {
      for (const SaveChunk& chunk : file.chunks) {
        if (chunk.group < 0) {
          continue;
        }
        writers.insert(file.writer);
        const ElementRange stored = StoredRange(plan, chunk.group, file.writer);
        EXPECT_LE(chunk.shard_offset + chunk.bytes / 4, stored.size());
        const StateTensor& tensor = save->tensors[static_cast<size_t>(chunk.tensor)];
        const auto parameter = static_cast<size_t>(plan.inventory.FindTensor(tensor.of_param));
        EXPECT_TRUE(tensor.role == StateRole::kParam ||
                    plan.inventory.tensors[parameter].trainable);
      }
    }
    const bool first_replica_alone = axes.replicas > 1 && axes.replicate == Strategy::kNoShard;
    EXPECT_EQ(writers.size(), first_replica_alone ? 2U : 4U);
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         SavePlanTest,
                         ::testing::ValuesIn(testing::ModelCases()),
                         testing::CaseName);

ShardingPlan WithBf16Moments(ShardingPlan plan) {
  plan.options.state_types = kBf16States;
  return plan;
}

// Payload of all files.
int64_t SavedBytes(const SavePlan& save) {
  int64_t bytes = 0;
  for (const SaveFile& file : save.files) {
    bytes += file.size - file.header_bytes;
  }
  return bytes;
}

// Weights take 4 bytes for each parameter, moments 2 where they live in 2.
TEST(SavePlanTypes, MomentsAreSavedInTheTypeThatTheyLiveIn) {
  for (const int64_t ranks : {1, 2, 5}) {
    const ShardingPlan plan = testing::PlanOf(testing::ModelCases()[1].config, ranks, 8, true);
    const SavePlan wide = *BuildSavePlan(plan);
    const absl::StatusOr<SavePlan> narrow = BuildSavePlan(WithBf16Moments(plan));
    ASSERT_TRUE(narrow.ok()) << narrow.status();
    int64_t parameters = 0;
    for (const TensorSpec& tensor : plan.inventory.tensors) {
      parameters += ElementCount(tensor.shape);
    }
    const auto steps = static_cast<int64_t>(4 * plan.inventory.tensors.size());
    EXPECT_EQ(SavedBytes(wide), 12 * parameters + steps);
    EXPECT_EQ(SavedBytes(*narrow), 8 * parameters + steps);
    EXPECT_NE(SavePlanHash(wide), SavePlanHash(*narrow));
    ASSERT_EQ(narrow->tensors.size(), wide.tensors.size());
    for (size_t i = 0; i < wide.tensors.size(); ++i) {
      const StateTensor& tensor = narrow->tensors[i];
      const bool moments = tensor.role == StateRole::kExpAvg || tensor.role == StateRole::kExpAvgSq;
      EXPECT_EQ(tensor.dtype, moments ? DType::kBF16 : DType::kF32) << tensor.key;
      EXPECT_EQ(wide.tensors[i].dtype, DType::kF32) << tensor.key;
    }
    for (const SaveFile& file : narrow->files) {
      int64_t next = file.header_bytes;
      const std::vector<ckpt::SafetensorsEntry> entries = FileEntries(*narrow, file);
      for (size_t i = 0; i < file.chunks.size(); ++i) {
        const StateTensor& tensor = narrow->tensors[static_cast<size_t>(file.chunks[i].tensor)];
        EXPECT_EQ(file.chunks[i].file_offset, next) << file.path;
        EXPECT_EQ(entries[i].dtype, tensor.dtype);
        EXPECT_EQ(file.chunks[i].bytes,
                  ElementCount(file.chunks[i].box.length) * DTypeBytes(tensor.dtype));
        next += file.chunks[i].bytes;
      }
      EXPECT_EQ(next, file.size);
    }
  }
}

// What is cut, and the file that is full, is measured in stored bytes.
TEST(SavePlanTypes, LimitsCountTheBytesThatAreStored) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 1, 2, true);
  const int64_t table = 257 * 64 * 4;
  const SaveLimits limits = {.chunk_bytes = table / 2, .file_bytes = table};
  const auto chunks_of = [&](const ShardingPlan& world, const std::string& key) {
    const SavePlan save = *BuildSavePlan(world, limits);
    int count = 0;
    for (const SaveFile& file : save.files) {
      for (const SaveChunk& chunk : file.chunks) {
        count += save.tensors[static_cast<size_t>(chunk.tensor)].key == key ? 1 : 0;
      }
    }
    return count;
  };
  const std::string weight = "model.embed_tokens.weight";
  for (const std::string& moment :
       {"state." + weight + ".exp_avg", "state." + weight + ".exp_avg_sq"}) {
    EXPECT_GE(chunks_of(plan, moment), 2);
    EXPECT_EQ(chunks_of(WithBf16Moments(plan), moment), 1);
  }
  EXPECT_EQ(chunks_of(WithBf16Moments(plan), weight), chunks_of(plan, weight));
}

TEST(SavePlan, FileNamesCountWritersAndLayersFromOne) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 2, true);
  const SavePlan save = *BuildSavePlan(plan);
  std::vector<std::string> paths;
  for (const SaveFile& file : save.files) {
    paths.push_back(file.path);
  }
  EXPECT_EQ(paths,
            (std::vector<std::string>{"model/shard-00001-model-00001-of-00001.safetensors",
                                      "optim/shard-00001-model-00001-of-00001.safetensors",
                                      "model/shard-00002-model-00001-of-00001.safetensors",
                                      "optim/shard-00002-model-00001-of-00001.safetensors"}));
}

TEST(SavePlan, TooManyRectanglesOfATensorAreRefusedByName) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 1, 2, true);
  const absl::StatusOr<SavePlan> save = BuildSavePlan(plan, {.chunk_bytes = 1024});
  ASSERT_FALSE(save.ok());
  EXPECT_THAT(std::string(save.status().message()), HasSubstr("model.embed_tokens.weight"));
}

TEST(ProveCover, NamesTheTensorThatIsNotCoveredOnce) {
  const ShardingPlan plan = testing::PlanOf(testing::Llama(64, 2, 96, 257), 2, 2, true);
  const SavePlan good = *BuildSavePlan(plan);
  ASSERT_TRUE(ProveCover(good).ok());
  for (size_t f = 0; f < good.files.size(); ++f) {
    for (size_t c = 0; c < good.files[f].chunks.size(); ++c) {
      const std::string key = good.tensors[static_cast<size_t>(good.files[f].chunks[c].tensor)].key;
      SavePlan missing = good;
      missing.files[f].chunks.erase(missing.files[f].chunks.begin() +
                                    static_cast<std::ptrdiff_t>(c));
      EXPECT_THAT(std::string(ProveCover(missing).message()), HasSubstr(key));
      SavePlan twice = good;
      twice.files[(f + 2) % 4].chunks.push_back(good.files[f].chunks[c]);
      EXPECT_FALSE(ProveCover(twice).ok()) << key;
      SavePlan moved = good;
      Box& box = moved.files[f].chunks[c].box;
      if (!box.offset.empty()) {
        box.offset[0] += 1;
        EXPECT_THAT(std::string(ProveCover(moved).message()), HasSubstr(key));
      }
    }
  }
}

}  // namespace
}  // namespace ravel::plan
