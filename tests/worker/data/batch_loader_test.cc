#include "worker/data/batch_loader.h"

#include <filesystem>
#include <fstream>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/token_check.h"

namespace ravel::data {
namespace {

using ::testing::HasSubstr;

class BatchLoaderTest : public ::testing::Test {
 protected:
  BatchLoaderTest() : folder_(absl::StrCat(::testing::TempDir(), "/ravel_batch_loader")) {
    std::filesystem::create_directories(folder_);
    std::vector<uint16_t> ids;
    for (int i = 0; i < 1001; ++i) {
      ids.push_back(static_cast<uint16_t>(i % 500));
    }
    Write("train", ids);
    Write("validation", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20});
    plan::ModelConfig model;
    model.vocab_size = 500;
    spec_.model = model;
    spec_.data.sequence_length = 5;
    spec_.data.format = TokenFormat::kFlatU16;
    spec_.data.train = {{.path = folder_ + "/train", .weight = 1.0}};
    spec_.data.validation = {{.path = folder_ + "/validation", .weight = 1.0}};
    spec_.global_batch = 8;
    spec_.virtual_ranks = 4;
    spec_.seed = 3;
  }
  ~BatchLoaderTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::vector<uint16_t>& ids) {
    std::ofstream(folder_ + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(ids.data()),
               static_cast<std::streamsize>(2 * ids.size()));
  }
  absl::StatusOr<std::unique_ptr<BatchLoader>> Open() const {
    return BatchLoader::Open({.train = spec_.data.train,
                              .validation = spec_.data.validation,
                              .format = spec_.data.format},
                             {.lanes = spec_.virtual_ranks,
                              .sequences = spec_.global_batch / spec_.virtual_ranks,
                              .sequence_tokens = spec_.data.sequence_length,
                              .vocabulary = spec_.model->vocab_size},
                             spec_.seed);
  }
  static TensorView View(std::vector<int32_t>& ids) {
    TensorView view =
        VectorView(reinterpret_cast<float*>(ids.data()), static_cast<int64_t>(ids.size()));
    view.dtype = DType::kI32;
    return view;
  }

  const std::string folder_;
  plan::JobSpec spec_;
  std::vector<int32_t> ids_ = std::vector<int32_t>(10);
  std::vector<int32_t> targets_ = std::vector<int32_t>(10);
};

TEST_F(BatchLoaderTest, LanesAreTheSamplesOfTheStepInOrderAndTargetsAreTheNextIds) {
  auto loader = Open();
  ASSERT_TRUE(loader.ok()) << loader.status();
  for (const int64_t step : {0, 7, 30, 7}) {
    const std::vector<plan::SampleRef> samples = plan::SamplesOfStep(
        {.sources = {{.samples = 200, .weight = 1.0}}, .seed = 3, .global_batch = 8, .lanes = 4},
        step);
    for (int64_t lane = 0; lane < 4; ++lane) {
      ASSERT_TRUE(
          (*loader)
              ->LoadTraining(
                  {.batch = step, .lane = lane, .ids = View(ids_), .targets = View(targets_)})
              .ok());
      for (int64_t i = 0; i < 10; ++i) {
        const plan::SampleRef& sample = samples[static_cast<size_t>(lane * 2 + i / 5)];
        const int64_t position = sample.index * 5 + i % 5;
        EXPECT_EQ(ids_[static_cast<size_t>(i)], position % 500);
        EXPECT_EQ(targets_[static_cast<size_t>(i)], (position + 1) % 500);
      }
    }
    (*loader)->PrefetchTraining(step + 1, 2);
  }
}

TEST_F(BatchLoaderTest, ValidationIsReadInFileOrder) {
  auto loader = Open();
  ASSERT_TRUE(loader.ok()) << loader.status();
  EXPECT_TRUE((*loader)->has_validation());
  ASSERT_TRUE(
      (*loader)
          ->LoadValidation({.batch = 0, .lane = 0, .ids = View(ids_), .targets = View(targets_)})
          .ok());
  EXPECT_EQ(ids_, (std::vector<int32_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(targets_, (std::vector<int32_t>{2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST_F(BatchLoaderTest, AnIdBeyondTheVocabularyNamesFilePositionAndId) {
  std::vector<uint16_t> ids(1001, 7);
  ids[0] = 500;
  Write("train", ids);
  auto loader = Open();
  ASSERT_TRUE(loader.ok()) << loader.status();
  int errors = 0;
  for (int64_t step = 0; step < 25; ++step) {  // one pass: 200 samples
    for (int64_t lane = 0; lane < 4; ++lane) {
      const absl::Status status = (*loader)->LoadTraining(
          {.batch = step, .lane = lane, .ids = View(ids_), .targets = View(targets_)});
      if (!status.ok()) {
        ++errors;
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(folder_ + "/train: token 0 has id 500, expected 0 to 499"));
      }
    }
  }
  EXPECT_EQ(errors, 1);
}

TEST_F(BatchLoaderTest, AFileThatIsNoLongerTheSubmittedOneIsRefused) {
  spec_.data.train[0].tokens = 1001;
  EXPECT_TRUE(Open().ok());
  Write("train", std::vector<uint16_t>(1000, 7));
  EXPECT_THAT(std::string(Open().status().message()),
              HasSubstr("data.train[0]: " + folder_ +
                        "/train: expected 1001 ids as when the job was submitted, got 1000"));
}

TEST_F(BatchLoaderTest, AFileOfAsManyOtherIdsIsRefused) {
  const absl::StatusOr<TokenFileFacts> facts =
      CheckTokenFile(folder_ + "/train", TokenFormat::kFlatU16, {.sample = true});
  ASSERT_TRUE(facts.ok()) << facts.status();
  spec_.data.train[0].tokens = facts->tokens;
  spec_.data.train[0].sample_digest = facts->sample_digest;
  EXPECT_TRUE(Open().ok());
  std::vector<uint16_t> ids(1001);
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<uint16_t>((i + 1) % 500);
  }
  Write("train", ids);
  const absl::Status status = Open().status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("data.train[0]: " + folder_ +
                        "/train: expected the ids that the job was submitted with"));
  spec_.data.train[0].sample_digest.clear();  // of a job that was submitted without a look
  EXPECT_TRUE(Open().ok());
}

TEST_F(BatchLoaderTest, BadFilesNameTheField) {
  Write("validation", {1, 2, 3, 4, 5});
  EXPECT_THAT(std::string(Open().status().message()),
              HasSubstr("data.validation[0]: " + folder_ +
                        "/validation: expected at least 6 ids (sequenceLength + 1), got 5"));
  spec_.data.train.push_back({.path = folder_ + "/missing", .weight = 1.0});
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("data.train[1]"));
}

}  // namespace
}  // namespace ravel::data
