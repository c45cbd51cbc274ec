// Whatever happens to a file of a committed step is named and never accepted.

#include "common/store/step_verifier.h"

#include <map>
#include <random>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/committed_step.h"
#include "common/store/memory_store.h"
#include "tests/testing/saved_state.h"

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

constexpr char kStep[] = "step-0000000020";

class StepVerifierTest : public ::testing::Test {
 protected:
  StepVerifierTest() : inventory_(testing::InventoryOf({{33, 7}, {64}, {1 << 15, 2}, {5, 3, 2}})) {
    saved_ = testing::MakeWorld(inventory_, 3, 20240607);
    const auto committed = testing::Save(store_, saved_, {.step = 20, .epoch = 1, .attempt = 1});
    EXPECT_TRUE(committed.ok()) << committed.status();
  }

  std::string Path(const std::string& file) const { return JoinPath(kStep, file); }
  std::string Read(const std::string& file) const { return *ReadFile(store_, Path(file), 1 << 30); }
  std::vector<std::string> Files() const {
    std::vector<std::string> files = {"COMMIT", "manifest.pb"};
    for (const std::string folder : {"model", "optim", "hf"}) {
      const absl::StatusOr<std::vector<ListedEntry>> entries = store_.List(Path(folder));
      for (const ListedEntry& entry : *entries) {
        files.push_back(JoinPath(folder, entry.name));
      }
    }
    return files;
  }
  // Both verifications and a load refuse the step; returns what verify --deep says.
  std::string ExpectRefused() const {
    const VerifyReport report = VerifyStep(store_, kStep, VerifyDepth::kDeep);
    EXPECT_FALSE(report.ok());
    EXPECT_FALSE(testing::Load(store_, kStep, inventory_, 2).ok());
    return report.ok() ? "" : report.problems.front().Text();
  }

  MemoryStore store_;
  plan::ModelInventory inventory_;
  testing::SavedWorld saved_;
};

TEST_F(StepVerifierTest, AWholeStepIsAccepted) {
  for (const VerifyDepth depth : {VerifyDepth::kQuick, VerifyDepth::kDeep}) {
    const VerifyReport report = VerifyStep(store_, kStep, depth);
    EXPECT_TRUE(report.ok()) << report.problems.front().Text();
    EXPECT_EQ(report.step, 20);
    EXPECT_EQ(report.files, 7);
    EXPECT_EQ(report.tensors, 16);
    EXPECT_TRUE(report.stray.empty());
  }
}

TEST_F(StepVerifierTest, ADeletedFileIsNamed) {
  for (const std::string& file : Files()) {
    SCOPED_TRACE(file);
    const std::string before = Read(file);
    ASSERT_TRUE(store_.Withdraw(Path(file)).ok());
    const VerifyReport quick = VerifyStep(store_, kStep, VerifyDepth::kQuick);
    ASSERT_FALSE(quick.ok());
    EXPECT_THAT(quick.problems.front().Text(), HasSubstr(file));
    ASSERT_TRUE(store_.Put(Path(file), before).ok());
  }
  EXPECT_TRUE(VerifyStep(store_, kStep, VerifyDepth::kDeep).ok());
}

TEST_F(StepVerifierTest, ATruncatedOrExtendedFileIsNamed) {
  for (const std::string& file : Files()) {
    const std::string before = Read(file);
    for (const std::string& contents : {before.substr(0, before.size() - 1),
                                        before.substr(0, before.size() / 2),
                                        std::string(),
                                        before + std::string(1, '\0')}) {
      SCOPED_TRACE(file);
      if (file == "COMMIT" && contents.size() >= before.size() - 1) {
        continue;  // the last byte is a newline: the record is whole without it
      }
      ASSERT_TRUE(store_.Overwrite(Path(file), contents).ok());
      const VerifyReport quick = VerifyStep(store_, kStep, VerifyDepth::kQuick);
      ASSERT_FALSE(quick.ok());
      EXPECT_THAT(quick.problems.front().Text(), HasSubstr(file));
    }
    ASSERT_TRUE(store_.Overwrite(Path(file), before).ok());
  }
}

TEST_F(StepVerifierTest, AFlippedBitIsNamedWithItsTensor) {
  std::mt19937_64 random(7);
  for (const std::string& file : Files()) {
    const auto size = static_cast<int64_t>(Read(file).size());
    for (int i = 0; i < 12; ++i) {
      const auto byte = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
      const int bit = static_cast<int>(random() % 8);
      ASSERT_TRUE(store_.FlipBit(Path(file), byte, bit).ok());
      const VerifyReport deep = VerifyStep(store_, kStep, VerifyDepth::kDeep);
      // COMMIT's white space carries nothing; everything else must be noticed.
      if (file != "COMMIT") {
        ASSERT_FALSE(deep.ok()) << file << " byte " << byte << " bit " << bit;
        EXPECT_THAT(deep.problems.front().Text(), HasSubstr(file));
        if (absl::StartsWith(file, "model/") && byte >= 4096) {
          EXPECT_NE(deep.problems.front().tensor, "");
          EXPECT_GE(deep.problems.front().block, 0);
        }
      }
      ASSERT_TRUE(store_.FlipBit(Path(file), byte, bit).ok());
    }
  }
  EXPECT_TRUE(VerifyStep(store_, kStep, VerifyDepth::kDeep).ok());
}

TEST(LargeTensorTest, TheBlockIsNamed) {
  MemoryStore store;
  const plan::ModelInventory inventory = testing::InventoryOf({{3 << 20}});  // 12 MiB
  ASSERT_TRUE(testing::Save(store,
                            testing::MakeWorld(inventory, 1, 1),
                            {.step = 20, .epoch = 1, .attempt = 1})
                  .ok());
  const std::string file = "model/shard-00001-model-00001-of-00001.safetensors";
  ASSERT_TRUE(store.FlipBit(JoinPath(kStep, file), 4096 + (8 << 20) + 17, 3).ok());
  EXPECT_TRUE(VerifyStep(store, kStep, VerifyDepth::kQuick).ok());
  const VerifyReport deep = VerifyStep(store, kStep, VerifyDepth::kDeep);
  ASSERT_EQ(deep.problems.size(), 1u);
  EXPECT_THAT(deep.problems.front().Text(),
              HasSubstr(file + ": tensor unit.0.tensor.0.weight, block 2: crc32c"));
  const auto loaded = testing::Load(store, kStep, inventory, 2);
  EXPECT_THAT(std::string(loaded.status().message()),
              HasSubstr(file + ": tensor unit.0.tensor.0.weight, block 2: crc32c"));
}

TEST_F(StepVerifierTest, SwappedFilesAreNamed) {
  const std::vector<std::string> files = Files();
  for (size_t i = 2; i < files.size(); ++i) {
    for (size_t j = i + 1; j < files.size(); ++j) {
      SCOPED_TRACE(files[i] + " " + files[j]);
      const std::string a = Read(files[i]);
      const std::string b = Read(files[j]);
      ASSERT_TRUE(store_.Overwrite(Path(files[i]), b).ok());
      ASSERT_TRUE(store_.Overwrite(Path(files[j]), a).ok());
      const VerifyReport report = VerifyStep(store_, kStep, VerifyDepth::kQuick);
      std::string text;
      for (const StepProblem& problem : report.problems) {
        text += problem.Text() + "\n";
      }
      EXPECT_THAT(text, HasSubstr(files[i]));
      EXPECT_THAT(text, HasSubstr(files[j]));
      ASSERT_TRUE(store_.Overwrite(Path(files[i]), a).ok());
      ASSERT_TRUE(store_.Overwrite(Path(files[j]), b).ok());
    }
  }
}

TEST_F(StepVerifierTest, AChangedSmallFileIsNamedByTheQuickCheck) {
  ASSERT_TRUE(store_.Overwrite(Path("hf/config.json"), "[]").ok());
  const VerifyReport quick = VerifyStep(store_, kStep, VerifyDepth::kQuick);
  ASSERT_FALSE(quick.ok());
  EXPECT_THAT(quick.problems.front().Text(), HasSubstr("hf/config.json: crc32c"));
}

TEST_F(StepVerifierTest, AZeroedBlockIsNamed) {
  const std::string file = Files()[2];
  std::string contents = Read(file);
  std::fill(contents.begin() + 4096, contents.end(), '\0');
  ASSERT_TRUE(store_.Overwrite(Path(file), contents).ok());
  EXPECT_THAT(ExpectRefused(), HasSubstr(file));
}

TEST_F(StepVerifierTest, AnotherStepsManifestIsRefused) {
  testing::SavedWorld other = saved_;
  other.state = testing::RandomState(inventory_, 99);
  ASSERT_TRUE(testing::Save(store_, other, {.step = 21, .epoch = 1, .attempt = 1}).ok());
  const std::string manifest = *ReadFile(store_, "step-0000000021/manifest.pb", 1 << 20);
  ASSERT_TRUE(store_.Overwrite(Path("manifest.pb"), manifest).ok());
  EXPECT_THAT(ExpectRefused(), HasSubstr("manifest.pb: "));
  const std::string commit = *ReadFile(store_, "step-0000000021/COMMIT", 1 << 20);
  ASSERT_TRUE(store_.Overwrite(Path("COMMIT"), commit).ok());
  EXPECT_THAT(ExpectRefused(), HasSubstr("COMMIT: step: is 21, expected 20"));
}

TEST_F(StepVerifierTest, AStrayFileIsReportedAndNotRead) {
  ASSERT_TRUE(store_.Put(Path("model/stray.safetensors"), "x").ok());
  const VerifyReport report = VerifyStep(store_, kStep, VerifyDepth::kDeep);
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.stray, std::vector<std::string>{"model/stray.safetensors"});
  EXPECT_TRUE(testing::Load(store_, kStep, inventory_, 2).ok());
}

TEST_F(StepVerifierTest, AnUnfinishedSaveIsNoStep) {
  ASSERT_TRUE(testing::WriteAllRanks(store_, saved_, {.step = 30, .epoch = 1, .attempt = 1}).ok());
  const VerifyReport report = VerifyStep(store_, "step-0000000030.e1.a1.tmp", VerifyDepth::kQuick);
  ASSERT_FALSE(report.ok());
  EXPECT_THAT(report.problems.front().Text(), HasSubstr("an unfinished save"));
}

TEST_F(StepVerifierTest, ADamagedBlockStopsAPartialReadOnlyWhereItIsTouched) {
  auto step = CommittedStep::Open(&store_, kStep);
  ASSERT_TRUE(step.ok());
  const ckpt::TensorRecord& tensor = *step->manifest().FindTensor("unit.1.tensor.0.weight");
  ASSERT_GE(tensor.chunks.size(), 2u);
  const ckpt::ChunkRecord& last = tensor.chunks.back();
  const std::string file = step->manifest().files[static_cast<size_t>(last.file)].path;
  ASSERT_TRUE(store_.FlipBit(Path(file), last.data_offset, 0).ok());
  std::vector<std::byte> out(400);
  EXPECT_TRUE(step->ReadElements(tensor, 0, 100, out).ok());
  const absl::Status status = step->ReadElements(tensor, (2 << 15) - 100, 2 << 15, out);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("tensor unit.1.tensor.0.weight, block 0"));
}

}  // namespace
}  // namespace ravel::store
