// Save on N ranks, load on M: the same bits.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/ckpt/digest.h"
#include "common/ckpt/manifest_proto.h"
#include "common/plan/plan_pieces.h"
#include "common/store/committed_step.h"
#include "common/store/memory_store.h"
#include "common/store/step_verifier.h"
#include "tests/testing/saved_state.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20240607;
constexpr plan::OptimizerKind kOptimizer = plan::OptimizerKind::kAdamW;

// Of both types that moments may live in.
class MomentsRoundTrip : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Moments,
                         MomentsRoundTrip,
                         ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& tested) { return std::string(DTypeName(tested.param)); });

TEST_P(MomentsRoundTrip, AnyRanksSaveAndAnyRanksLoadTheSameBits) {
  for (uint64_t seed = kSeed; seed < kSeed + 30; ++seed) {
    SCOPED_TRACE(seed);
    const plan::ModelInventory inventory = testing::InventoryOf(testing::RandomShapes(seed));
    const auto writers = static_cast<int64_t>(1 + seed % 8);
    const auto readers = static_cast<int64_t>(1 + (seed / 8) % 7);
    const testing::SavedWorld saved = testing::MakeWorld(inventory, writers, seed, GetParam());
    store::MemoryStore store;
    const auto committed = testing::Save(store, saved, {.step = 20, .epoch = 1, .attempt = 1});
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_TRUE(store::VerifyStep(store, committed->directory, store::VerifyDepth::kDeep).ok());
    const auto loaded = testing::Load(store, committed->directory, inventory, readers);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->SameAs(saved.state)) << writers << " writers, " << readers << " readers";
  }
}

TEST_P(MomentsRoundTrip, TensorsOfSeveralBlocksKeepTheirBits) {
  const plan::ModelInventory inventory = testing::InventoryOf({{2063, 1100}, {7}, {3000001}});
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 3, kSeed, GetParam());
  store::MemoryStore store;
  ASSERT_TRUE(testing::Save(store, saved, {.step = 1, .epoch = 1, .attempt = 1}).ok());
  for (const int64_t readers : {1, 2, 5}) {
    const auto loaded = testing::Load(store, "step-0000000001", inventory, readers);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->SameAs(saved.state)) << readers;
  }
}

TEST_P(MomentsRoundTrip, StateDigestDoesNotDependOnTheNumberOfWriters) {
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}, {64}, {5, 3, 2}});
  Sha256Digest first = {};
  for (const int64_t ranks : {1, 2, 3, 8}) {
    store::MemoryStore store;
    const testing::SavedWorld saved = testing::MakeWorld(inventory, ranks, kSeed, GetParam());
    ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
    const auto step = store::CommittedStep::Open(&store, "step-0000000004");
    ASSERT_TRUE(step.ok()) << step.status();
    first = ranks == 1 ? step->manifest().state_digest : first;
    EXPECT_EQ(step->manifest().state_digest, first) << ranks;
  }
}

// Digests are those of the stored values, whoever wrote them.
TEST(Bf16MomentsTest, TheManifestHasTheTypeAndTheDigestOfStoredValues) {
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}, {64}, {5, 3, 2}});
  for (const int64_t ranks : {1, 3}) {
    const testing::SavedWorld saved = testing::MakeWorld(inventory, ranks, kSeed, DType::kBF16);
    store::MemoryStore store;
    const auto committed = testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1});
    ASSERT_TRUE(committed.ok()) << committed.status();
    auto step = store::CommittedStep::Open(&store, committed->directory);
    ASSERT_TRUE(step.ok()) << step.status();
    for (size_t role = 0; role < testing::kShardRoles.size(); ++role) {
      for (size_t t = 0; t < inventory.tensors.size(); ++t) {
        const std::vector<float>& values = saved.state.values[role][t];
        const std::string key =
            plan::StateKey(inventory.tensors[t].name, testing::kShardRoles[role]);
        const ckpt::TensorRecord& record = *step->manifest().FindTensor(key);
        EXPECT_EQ(record.dtype, role == 0 ? DType::kF32 : DType::kBF16) << key;
        EXPECT_EQ(record.stored_dtype, record.dtype) << key;
        std::vector<uint16_t> narrow;
        for (const float value : values) {
          narrow.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
        }
        const std::span<const std::byte> bytes =
            role == 0 ? std::as_bytes(std::span(values)) : std::as_bytes(std::span(narrow));
        EXPECT_EQ(record.digest64, ckpt::DigestRange(record.dtype, bytes, 0)) << key;
        std::vector<std::byte> stored(bytes.size());
        ASSERT_TRUE(
            step->ReadElements(record, 0, static_cast<int64_t>(values.size()), stored).ok());
        EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), stored.begin())) << key;
      }
    }
  }
}

// The same values saved as fp32, as all moments once were.
TEST(Bf16MomentsTest, SavesOfEitherTypeLoadTheSameValues) {
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}, {64}, {5, 3, 2}});
  const testing::SavedWorld narrow = testing::MakeWorld(inventory, 3, kSeed, DType::kBF16);
  testing::SavedWorld wide = testing::MakeWorld(inventory, 2, kSeed);
  wide.state = narrow.state;
  store::MemoryStore store;
  ASSERT_TRUE(testing::Save(store, narrow, {.step = 1, .epoch = 1, .attempt = 1}).ok());
  ASSERT_TRUE(testing::Save(store, wide, {.step = 2, .epoch = 1, .attempt = 1}).ok());
  for (const char* directory : {"step-0000000001", "step-0000000002"}) {
    const auto loaded = testing::Load(store, directory, inventory, 2);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_TRUE(loaded->SameAs(narrow.state)) << directory;
  }
}

TEST(Bf16MomentsTest, AFlippedBitIsNamed) {
  store::MemoryStore store;
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}});
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 1, kSeed, DType::kBF16);
  ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  const std::string file = "optim/shard-00001-model-00001-of-00001.safetensors";
  // The last of the file's values: exp_avg_sq.
  const int64_t last = saved.save_plan.files.back().size - 1;
  ASSERT_TRUE(store.FlipBit("step-0000000004/" + file, last, 3).ok());
  const auto loaded = testing::Load(store, "step-0000000004", inventory, 2);
  EXPECT_TRUE(absl::IsDataLoss(loaded.status()));
  EXPECT_THAT(std::string(loaded.status().message()),
              HasSubstr(file + ": tensor state.unit.0.tensor.0.weight.exp_avg_sq, block 0"));
}

TEST(Bf16MomentsTest, OtherTypesAreRefusedByName) {
  struct Case {
    const char* key;
    DType dtype;
    const char* expected;
  };
  for (const Case& tested :
       {Case{"state.unit.0.tensor.0.weight.exp_avg",
             DType::kF16,
             "F16 stored as F16, expected F32, BF16 or F8_E4M3"},
        Case{"state.unit.0.tensor.0.weight.exp_avg_sq",
             DType::kI16,
             "I16 stored as I16, expected F32, BF16 or U8"},
        Case{"unit.0.tensor.0.weight", DType::kI32, "I32 stored as I32, expected F32"},
        Case{
            "state.unit.0.tensor.0.weight.step", DType::kI32, "I32 stored as I32, expected F32"}}) {
    store::MemoryStore store;
    const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}});
    testing::SavedWorld saved = testing::MakeWorld(inventory, 1, kSeed, DType::kBF16);
    for (plan::StateTensor& tensor : saved.save_plan.tensors) {
      tensor.dtype = tensor.key == tested.key ? tested.dtype : tensor.dtype;
    }
    ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
    const auto loader = StepLoader::Open(&store, "step-0000000004", &inventory, kOptimizer);
    ASSERT_TRUE(absl::IsFailedPrecondition(loader.status())) << loader.status();
    EXPECT_THAT(std::string(loader.status().message()),
                ::testing::EndsWith(absl::StrCat(tested.key, ": ", tested.expected)));
  }
}

// A rank that has another type in mind than who commits.
TEST(Bf16MomentsTest, ASealOfAnotherTypeIsNotCommitted) {
  store::MemoryStore store;
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}});
  const ckpt::AttemptKey key = {.step = 4, .epoch = 1, .attempt = 1};
  const testing::SavedWorld narrow = testing::MakeWorld(inventory, 1, kSeed, DType::kBF16);
  const testing::SavedWorld wide = testing::MakeWorld(inventory, 1, kSeed);
  const auto seals = testing::WriteAllRanks(store, narrow, key);
  ASSERT_TRUE(seals.ok()) << seals.status();
  const auto committed =
      coordinator::CommitSave(store, wide.save_plan, testing::ContextOf(wide, key), *seals);
  EXPECT_THAT(std::string(committed.status().message()),
              HasSubstr("seal of writer 0: was made with another save plan"));
}

TEST(RoundTripTest, TheSameStateGivesTheSameBytes) {
  const plan::ModelInventory inventory = testing::InventoryOf({{33, 7}, {64}, {5, 3, 2}});
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 3, kSeed);
  store::MemoryStore a;
  store::MemoryStore b;
  ASSERT_TRUE(testing::Save(a, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  ASSERT_TRUE(testing::Save(b, saved, {.step = 4, .epoch = 2, .attempt = 7}).ok());
  const auto step = store::CommittedStep::Open(&a, "step-0000000004");
  ASSERT_TRUE(step.ok());
  for (const ckpt::FileRecord& file : step->manifest().files) {
    const std::string path = store::JoinPath("step-0000000004", file.path);
    EXPECT_EQ(*store::ReadFile(a, path, 1 << 30), *store::ReadFile(b, path, 1 << 30)) << path;
  }
}

TEST(RoundTripTest, BlobsAndSmallFilesComeBack) {
  const plan::ModelInventory inventory = testing::InventoryOf({{3, 3}});
  store::MemoryStore store;
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 2, kSeed);
  ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  const auto loader = StepLoader::Open(&store, "step-0000000004", &inventory, kOptimizer);
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_EQ(*loader->Blob("rng"), "seed 7");
  EXPECT_TRUE(absl::IsNotFound(loader->Blob("schedule").status()));
  EXPECT_EQ(*store::ReadFile(store, "step-0000000004/hf/config.json", 100), "{}");
}

TEST(RoundTripTest, AnotherModelIsRefusedWithEveryDifference) {
  store::MemoryStore store;
  const testing::SavedWorld saved =
      testing::MakeWorld(testing::InventoryOf({{3, 3}, {5}, {4}}), 2, kSeed);
  ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  const plan::ModelInventory other = testing::InventoryOf({{3, 4}, {5}, {4}, {9}});
  const auto loader = StepLoader::Open(&store, "step-0000000004", &other, kOptimizer);
  ASSERT_TRUE(absl::IsFailedPrecondition(loader.status())) << loader.status();
  const std::string message(loader.status().message());
  EXPECT_THAT(message, HasSubstr("unit.0.tensor.0.weight: shape [3, 3], the job has [3, 4]"));
  EXPECT_THAT(message, HasSubstr("state.unit.0.tensor.0.weight.exp_avg: shape"));
  EXPECT_THAT(message, HasSubstr("unit.1.tensor.1.weight: missing"));
  EXPECT_THAT(message, HasSubstr("7 difference(s)"));
}

TEST(RoundTripTest, ATensorTheModelDoesNotHaveIsRefused) {
  store::MemoryStore store;
  const testing::SavedWorld saved =
      testing::MakeWorld(testing::InventoryOf({{3, 3}, {5}, {4}}), 2, kSeed);
  ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  const plan::ModelInventory other = testing::InventoryOf({{3, 3}, {5}});
  const auto loader = StepLoader::Open(&store, "step-0000000004", &other, kOptimizer);
  EXPECT_THAT(std::string(loader.status().message()),
              HasSubstr("unit.1.tensor.0.weight: not a tensor of the job's model"));
}

TEST(RoundTripTest, DigestsOfAllRanksMustAddUp) {
  store::MemoryStore store;
  const plan::ModelInventory inventory = testing::InventoryOf({{3, 3}, {5}});
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 2, kSeed);
  ASSERT_TRUE(testing::Save(store, saved, {.step = 4, .epoch = 1, .attempt = 1}).ok());
  auto loader = StepLoader::Open(&store, "step-0000000004", &inventory, kOptimizer);
  ASSERT_TRUE(loader.ok());
  // Half of the first tensor only: a piece that nobody read.
  std::vector<float> shard(9);
  const std::vector<plan::OwnedPiece> pieces = {
      {.tensor = 0, .item = WholeBox({3, 3}), .range = {0, 4}, .shard_offset = 0}};
  ASSERT_TRUE(loader->ReadPieces(plan::StateRole::kParam, pieces, shard).ok());
  const absl::Status status = loader->CheckDigests(loader->digest_sums());
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("unit.0.tensor.0.weight: digest64"));
}

// Tensors that a tensor axis cuts by rows, by columns and not at all.
plan::ModelInventory CutInventory() {
  plan::ModelInventory inventory =
      testing::InventoryOf({{13, 8}, {12, 5}, {7}, {6, 4, 3}, {5, 3, 2}});
  inventory.tensors[size_t{0}].cut.dim = 1;  // row-parallel: boxes of strided rows
  inventory.tensors[size_t{1}].cut.dim = 0;
  inventory.tensors[size_t{3}].cut.dim = 1;
  return inventory;
}

// Boxes of a tensor axis are saved as they lie in memory, and every mesh reads them back. Fails
// when a chunk, a read or a digest takes a part of an item for a part of the tensor.
TEST_P(MomentsRoundTrip, StridedBoxesAreReadByAnyMesh) {
  const plan::ModelInventory inventory = CutInventory();
  for (const auto& [shards, cuts] : {std::pair(1, 2), std::pair(3, 2), std::pair(2, 4)}) {
    SCOPED_TRACE(absl::StrCat(shards, " x ", cuts));
    const testing::SavedWorld cut =
        testing::SaveOf(testing::CutWorld(inventory, shards, cuts), kSeed, GetParam());
    testing::SavedWorld whole = testing::MakeWorld(inventory, 3, kSeed, GetParam());
    store::MemoryStore store;
    ASSERT_TRUE(testing::Save(store, cut, {.step = 1, .epoch = 1, .attempt = 1}).ok());
    ASSERT_TRUE(testing::Save(store, whole, {.step = 2, .epoch = 1, .attempt = 1}).ok());
    Sha256Digest first = {};
    for (const char* directory : {"step-0000000001", "step-0000000002"}) {
      EXPECT_TRUE(store::VerifyStep(store, directory, store::VerifyDepth::kDeep).ok());
      const auto step = store::CommittedStep::Open(&store, directory);
      ASSERT_TRUE(step.ok()) << step.status();
      first = first == Sha256Digest{} ? step->manifest().state_digest : first;
      EXPECT_EQ(step->manifest().state_digest, first) << directory;
      for (const plan::ShardingPlan& reader : {testing::WorldOf(inventory, 1),
                                               testing::WorldOf(inventory, 4),
                                               testing::CutWorld(inventory, 2, 2),
                                               testing::CutWorld(inventory, shards, cuts)}) {
        const auto loaded = testing::Load(store, directory, reader);
        ASSERT_TRUE(loaded.ok()) << loaded.status();
        EXPECT_TRUE(loaded->SameAs(cut.state)) << directory << ", " << reader.mesh.Text();
      }
    }
  }
}

// A rank that reads the boxes that it saved reads no other byte; one that reads its columns of
// tensors that were saved whole reads each block that has some of them once.
TEST(RoundTripTest, ReadsOfStridedBoxesAreBounded) {
  plan::ModelInventory inventory = testing::InventoryOf({{4096, 640}});
  inventory.tensors[size_t{0}].cut.dim = 1;
  const plan::ShardingPlan world = testing::CutWorld(inventory, 2, 2);
  const testing::SavedWorld cut = testing::SaveOf(world, kSeed);
  const testing::SavedWorld whole = testing::MakeWorld(inventory, 1, kSeed);
  store::MemoryStore store;
  ASSERT_TRUE(testing::Save(store, cut, {.step = 1, .epoch = 1, .attempt = 1}).ok());
  ASSERT_TRUE(testing::Save(store, whole, {.step = 2, .epoch = 1, .attempt = 1}).ok());
  for (int64_t rank = 0; rank < world.ranks; ++rank) {
    const std::vector<plan::OwnedPiece> pieces = plan::StoredPieces(world, 0, rank);
    ASSERT_EQ(pieces.size(), 1u);
    ASSERT_EQ(pieces[0].item, (Box{{0, rank % 2 * 320}, {4096, 320}}));
    std::vector<float> shard(static_cast<size_t>(plan::StoredRange(world, 0, rank).size()));
    const auto bytes_read = [&](const char* directory) {
      auto loader = StepLoader::Open(&store, directory, &inventory, kOptimizer);
      EXPECT_TRUE(loader.ok()) << loader.status();
      EXPECT_TRUE(loader->ReadPieces(plan::StateRole::kParam, pieces, shard).ok());
      return loader->bytes_read();
    };
    EXPECT_EQ(bytes_read("step-0000000001"), pieces[0].elements() * 4);
    // Half of the rows: their blocks of 4 MiB, of which one is shared with the other half.
    EXPECT_LE(bytes_read("step-0000000002"), 2 * pieces[0].elements() * 4 + ckpt::kBlockBytes);
  }
}

TEST(RoundTripTest, RanksThatOwnNothingSealToo) {
  store::MemoryStore store;
  const plan::ModelInventory inventory = testing::InventoryOf({{3}});
  const testing::SavedWorld saved = testing::MakeWorld(inventory, 6, kSeed);
  const auto seals = testing::WriteAllRanks(store, saved, {.step = 4, .epoch = 1, .attempt = 1});
  ASSERT_TRUE(seals.ok()) << seals.status();
  EXPECT_EQ(seals->size(), 6u);
  const auto committed =
      coordinator::CommitSave(store,
                              saved.save_plan,
                              testing::ContextOf(saved, {.step = 4, .epoch = 1, .attempt = 1}),
                              *seals);
  ASSERT_TRUE(committed.ok()) << committed.status();
  const auto loaded = testing::Load(store, committed->directory, inventory, 2);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->SameAs(saved.state));
}

}  // namespace
}  // namespace ravel::checkpoint
