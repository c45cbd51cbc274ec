// Weights that torch's distributed checkpoints wrote from a mesh of theirs.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model/architecture/model_config.h"
#include "common/plan/plan_pieces.h"
#include "tests/testing/saved_state.h"
#include "worker/checkpoint/loader.h"

namespace ravel::checkpoint {
namespace {

using ::testing::HasSubstr;

// Written by tests/interop/dcp_tensor_parallel.py: FSDP2 x tensor parallelism, 2 x 2, rows of 27
// and 67 uneven, _StridedShard on dp. Values are those of PlainState.
const char kGolden[] = RAVEL_CHECKPOINT_GOLDEN "/dcp_fsdp2_tp";

class DcpImportTest : public ::testing::Test {
 protected:
  DcpImportTest() {
    std::ifstream file(std::string(kGolden) + "/config.json");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto config = plan::ParseHuggingFaceConfig(text);
    EXPECT_TRUE(config.ok()) << config.status();
    inventory_ = plan::BuildInventory(*config, {.sequences = 1, .sequence_tokens = 8});
    state_ = testing::PlainState(inventory_, 0);
  }

  plan::ModelInventory inventory_;
  testing::TrainingState state_;
};

// Each rank of each mesh reads its own part. Fails when the box of a file is taken for rows of the
// tensor.
TEST_F(DcpImportTest, UnevenStridedShardsAreReadByAnyMesh) {
  for (const plan::ShardingPlan& world : {testing::WorldOf(inventory_, 1),
                                          testing::WorldOf(inventory_, 3),
                                          testing::CutWorld(inventory_, 1, 3),
                                          testing::CutWorld(inventory_, 2, 3)}) {
    SCOPED_TRACE(world.mesh.Text());
    int64_t bytes = 0;
    for (int64_t rank = 0; rank < world.ranks; ++rank) {
      auto loader = HuggingFaceLoader::Open(kGolden, &inventory_);
      ASSERT_TRUE(loader.ok()) << loader.status();
      for (const plan::GroupId group : world.groups.ids()) {
        const auto index = static_cast<size_t>(group.value());
        const std::vector<float> expected = testing::ShardOf(state_, world, index, rank, 0);
        std::vector<float> shard(expected.size(), -1.0f);
        const std::vector<plan::OwnedPiece> pieces = plan::StoredPieces(world, group, rank);
        ASSERT_TRUE(loader->ReadPieces(pieces, shard).ok());
        EXPECT_EQ(shard, expected) << rank << " " << index;
      }
      bytes += loader->bytes_read();
    }
    EXPECT_GE(bytes, inventory_.parameter_count() * 4);
  }
}

TEST_F(DcpImportTest, WhatIsMissingIsNamed) {
  std::string folder = (std::filesystem::temp_directory_path() / "ravel-dcp-XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  std::filesystem::copy(kGolden, folder, std::filesystem::copy_options::recursive);
  std::filesystem::remove(folder + "/shard-00003-model-00001-of-00001.safetensors");
  const auto partial = HuggingFaceLoader::Open(folder, &inventory_);
  EXPECT_THAT(std::string(partial.status().message()),
              HasSubstr("model.layers.0.mlp.gate_proj.weight: chunks hold 480 elements, shape "
                        "[27, 24] has 648"));
  std::filesystem::copy_file(folder + "/shard-00001-model-00001-of-00001.safetensors",
                             folder + "/shard-00003-model-00001-of-00001.safetensors");
  const auto twice = HuggingFaceLoader::Open(folder, &inventory_);
  EXPECT_THAT(std::string(twice.status().message()), HasSubstr("chunks overlap"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ravel::checkpoint
