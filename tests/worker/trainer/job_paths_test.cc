#include "worker/trainer/job_paths.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace ravel::trainer {
namespace {

using ::testing::HasSubstr;

class JobPathsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(At("/data/model"));
    std::filesystem::create_directories(At("/stores/job/step-1"));
    std::filesystem::create_directories(At("/outside"));
    std::ofstream(At("/outside/secret")) << "x";
    good_.checkpoint_root = At("/stores/job");
    good_.restore_path = At("/stores/job/step-1");
    good_.spec.model_from = At("/data/model");
    good_.spec.data.tokenizer = At("/data/tokenizer.json");
    good_.spec.data.train = {{.path = At("/data/tokens")}};
    good_.spec.data.validation = {{.path = At("/data/tokens.validation")}};
    good_.spec.optimizer.offload.path = At("/stores/offload");
    good_.spec.trace_directory = At("/stores/trace");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string At(const std::string& rest) const { return folder_ + rest; }
  absl::Status Check(const Assignment& assignment) const {
    return CheckJobPaths(assignment, {.read = {At("/data")}, .write = {At("/stores")}});
  }

  const std::string folder_ = ::testing::TempDir() + "job-paths-" + std::to_string(::getpid());
  Assignment good_;
};

TEST_F(JobPathsTest, PathsBeneathTheRootsPass) {
  EXPECT_EQ(Check(good_), absl::OkStatus());
  Assignment remote = good_;
  remote.checkpoint_root = "ravel://store:7080/team/job";
  remote.restore_path = "s3://bucket/team/step-1";
  EXPECT_EQ(Check(remote), absl::OkStatus());
}

TEST_F(JobPathsTest, EachFieldIsNamedWhenItsPathLiesOutside) {
  const std::string outside = At("/outside/secret");
  struct Case {
    const char* field;
    std::function<void(Assignment&)> change;
  };
  const std::vector<Case> cases = {
      {"checkpoint.store: ", [&](Assignment& job) { job.checkpoint_root = At("/data/job"); }},
      {"checkpoint.resumeFrom: ", [&](Assignment& job) { job.restore_path = outside; }},
      {"model.from: ", [&](Assignment& job) { job.spec.model_from = outside; }},
      {"data.tokenizer: ", [&](Assignment& job) { job.spec.data.tokenizer = outside; }},
      {"data.train[0].path: ", [&](Assignment& job) { job.spec.data.train[0].path = outside; }},
      {"data.validation[0].path: ",
       [&](Assignment& job) { job.spec.data.validation[0].path = outside; }},
      {"training.optimizer.offload.path: ",
       [&](Assignment& job) { job.spec.optimizer.offload.path = At("/data"); }},
      {"observability.trace.directory: ",
       [&](Assignment& job) { job.spec.trace_directory = outside; }}};
  for (const Case& one : cases) {
    Assignment job = good_;
    one.change(job);
    const absl::Status refused = Check(job);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << one.field << refused;
    EXPECT_EQ(std::string(refused.message()).find(one.field), 0u) << refused;
    EXPECT_EQ(CheckJobPaths(job, {}), absl::OkStatus()) << "without roots";
  }
}

TEST_F(JobPathsTest, LinksBesideTheNamedFilesAreFollowed) {
  std::filesystem::create_symlink("../outside/secret", At("/data/tokens.idx"));
  EXPECT_THAT(std::string(Check(good_).message()), HasSubstr("data.train[0].path: "));
  std::filesystem::remove(At("/data/tokens.idx"));
  std::filesystem::create_symlink("../../outside/secret", At("/data/model/tokenizer.json"));
  EXPECT_THAT(std::string(Check(good_).message()), HasSubstr("model.from: "));
}

}  // namespace
}  // namespace ravel::trainer
