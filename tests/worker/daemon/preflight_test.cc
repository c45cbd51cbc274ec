#include "worker/daemon/preflight.h"

#include <filesystem>
#include <fstream>
#include <future>
#include <optional>
#include <set>
#include <string>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "proto/plan.pb.h"
#include "tests/testing/process.h"
#include "worker/daemon/preflight_paths_proto.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class PreflightTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteText(Path("tokens.bin"), std::string(100, '\1'));
    testing::WriteText(Path("tokenizer.json"), "{}");
    std::filesystem::create_directories(Path("model"));
    testing::WriteText(Path("model/config.json"), "{}");
    testing::WriteText(Path("model/model.safetensors"), "x");
  }
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  PreflightPaths Good() const {
    return {.token_files = {Path("tokens.bin")},
            .format = TokenFormat::kFlatU16,
            .tokenizer = Path("tokenizer.json"),
            .model_directory = Path("model"),
            .checkpoint_root = Path("store/not/there/yet"),
            .offload_folder = Path("model")};
  }
  static void Expect(const PreflightPaths& paths, const char* reason, const std::string& text) {
    const PreflightResult result = CheckPaths(paths);
    EXPECT_EQ(result.reason, reason) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr(text));
  }

  testing::ScratchFolder scratch_;
};

TEST_F(PreflightTest, WhatIsThereIsFoundAndNothingIsWritten) {
  const PreflightResult result = CheckPaths(Good());
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_EQ(result.reason, "");
  EXPECT_FALSE(std::filesystem::exists(Path("store")));
  EXPECT_TRUE(CheckPaths({}).status.ok());
}

TEST_F(PreflightTest, EachPathThatIsMissingOrNoFileIsNamed) {
  PreflightPaths paths = Good();
  paths.token_files.push_back(Path("absent.bin"));
  Expect(paths, "DataError", "absent.bin");
  paths = Good();
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  paths.token_files = {Path("pipe")};
  Expect(paths, "DataError", "regular file");
  paths = Good();
  paths.tokenizer = Path("pipe");
  Expect(paths, "DataError", "tokenizer: " + Path("pipe") + ": not a regular file");
  // It would be copied into checkpoints, for everybody who reads them.
  testing::WriteText(Path("secret"), "TOKEN=secret");
  for (const std::string& other : {Path("secret"), std::string("/proc/self/environ")}) {
    paths.tokenizer = other;
    Expect(paths, "DataError", "tokenizer: " + other + ": expected a tokenizer.json");
  }
  paths = Good();
  paths.model_directory = Path("absent");
  Expect(paths, "DataError", "model.from: " + Path("absent/config.json"));
  paths = Good();
  std::filesystem::remove(Path("model/model.safetensors"));
  Expect(paths, "DataError", "model.safetensors.index.json");
  paths = Good();
  std::filesystem::rename(Path("model/config.json"), Path("model/model.safetensors"));
  paths.checkpoint_root = Path("tokens.bin/job");
  Expect(paths, "DataError", "config.json");
  paths.model_directory.clear();
  Expect(paths, "StoreUnavailable", "checkpoint.store");
  for (const char* other : {"absent", "tokens.bin"}) {
    paths.offload_folder = Path(other);
    Expect(paths, "DataError", "training.optimizer.offload.path: " + Path(other));
  }
}

TEST_F(PreflightTest, APathOutsideOfTheRootsIsRefusedByItsFieldBeforeItIsOpened) {
  const PathRoots roots = *PathRoots::Create({.read = {Path("model")}});
  for (const std::string& outside : {Path("tokens.bin"), Path("absent.bin")}) {
    PreflightPaths paths;
    paths.token_files = {outside};
    paths.named = {{"data.train", outside, PathUse::kRead, PathShape::kTokens}};
    const PreflightResult refused = CheckPathsBeneath(roots, paths);
    EXPECT_EQ(refused.reason, "DataError");
    EXPECT_EQ(std::string(refused.status.message()),
              "data.train: " + outside +
                  ": outside of the folders that this node opens for jobs (--read-root, "
                  "--write-root)");
  }
  EXPECT_TRUE(CheckPathsBeneath(PathRoots(), Good()).status.ok());
  PreflightPaths model = {.model_directory = Path("model")};
  model.named = {{"model.from", Path("model"), PathUse::kRead, PathShape::kFolderOfFiles}};
  EXPECT_TRUE(CheckPathsBeneath(roots, model).status.ok());
}

TEST_F(PreflightTest, EveryPathOfALaunchIsNamed) {
  v1::PlannedJob job;
  job.set_model_from("/m");
  job.set_tokenizer("/t");
  job.set_offload_path("/o");
  job.set_trace_directory("/d");
  job.add_train()->set_path("/a");
  job.add_validation()->set_path("/b");
  v1::StartTrainer start;
  start.set_job(job.SerializeAsString());
  start.set_checkpoint_root("/s");
  start.set_restore_path("/r");
  std::set<std::string> paths;
  for (const RootedPath& path : PathsOf(start).named) {
    paths.insert(absl::StrCat(path.path, path.use == PathUse::kWrite ? " write" : " read"));
  }
  EXPECT_THAT(paths,
              ::testing::UnorderedElementsAre("/m read",
                                              "/t read",
                                              "/a read",
                                              "/b read",
                                              "/r read",
                                              "/o write",
                                              "/d write",
                                              "/s write"));
}

// The result when `look` is what happens on the thread.
std::optional<PreflightResult> Ask(Preflight& preflight, boost::asio::io_context& context) {
  std::optional<PreflightResult> answer;
  preflight.Start({}, [&](PreflightResult result) {
    EXPECT_FALSE(answer.has_value()) << "answered once";
    answer = std::move(result);
  });
  context.restart();
  while (!answer && context.run_one_for(std::chrono::seconds(20)) > 0) {
  }
  return answer;
}

TEST(PreflightThreadTest, AFileSystemThatHangsFailsTheCheckInTimeAndOnlySoManyMayHang) {
  std::promise<void> server_is_back;
  const std::shared_future<void> back = server_is_back.get_future().share();
  boost::asio::io_context context;
  {
    Preflight preflight(context, milliseconds(20), [back](const PreflightPaths&) {
      back.wait();
      return PreflightResult();
    });
    for (int i = 0; i < Preflight::kMostHanging; ++i) {
      const std::optional<PreflightResult> answer = Ask(preflight, context);
      ASSERT_TRUE(answer.has_value());
      EXPECT_EQ(answer->reason, "PreflightFailed");
      EXPECT_THAT(std::string(answer->status.message()), HasSubstr("did not answer within 20 ms"));
    }
    EXPECT_THAT(std::string(Ask(preflight, context)->status.message()), HasSubstr("still hang"));
  }
  server_is_back.set_value();  // after their owner's end: they find the gate closed
}

TEST(PreflightThreadTest, AnAnswerInTimeIsTheAnswer) {
  boost::asio::io_context context;
  Preflight preflight(context, std::chrono::seconds(20), [](const PreflightPaths&) {
    return PreflightResult{absl::NotFoundError("absent.bin"), "DataError"};
  });
  for (int i = 0; i < 3 * Preflight::kMostHanging; ++i) {
    EXPECT_EQ(Ask(preflight, context)->reason, "DataError") << "threads that end are not counted";
  }
}

}  // namespace
}  // namespace ravel::daemon
