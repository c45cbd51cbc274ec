#include "worker/daemon/launch_data_proto.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/store/file_store.h"
#include "proto/plan.pb.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kWeb[] = "ravel://127.0.0.1:7443/sets/web";
constexpr char kModel[] = "ravel://127.0.0.1:7443/models/tiny";

class LaunchDataTest : public ::testing::Test {
 protected:
  void SetUp() override {
    MakeSet("web", {"web.bin", "web.idx", "web.tokenizer.json"});
    MakeSet("tiny", {"config.json", "model.safetensors"});
    Open(1000000);
  }
  void Open(int64_t limit_bytes) {
    data_.reset();
    cache_.reset();
    cache_ = *DataCache::Open(
        {.folder = scratch_.path() + "/cache",
         .limit_bytes = limit_bytes,
         .keep_free_bytes = 0,
         .open =
             [this](const std::string& url) -> absl::StatusOr<std::unique_ptr<store::ObjectStore>> {
           held_ = hold_.load();
           EXPECT_TRUE(testing::Eventually(seconds(20), [this] { return !hold_; }));
           RETURN_IF_ERROR(fault_);
           return std::make_unique<store::FileStore>(scratch_.path() + "/stores" +
                                                     url.substr(url.rfind('/')));
         }});
    data_ = std::make_unique<LaunchData>(context_, cache_, seconds(60));
  }
  void MakeSet(const std::string& name, const std::vector<std::string>& files) {
    const std::string folder = scratch_.path() + "/stores/" + name;
    std::filesystem::create_directories(folder);
    store::DataManifest manifest;
    for (const std::string& file : files) {
      testing::WriteText(folder + "/" + file, file);
      manifest.files.push_back({file, std::ssize(file), Hex(Sha256(file))});
    }
    testing::WriteText(folder + "/" + store::kDataManifest, store::WriteDataManifest(manifest));
  }
  static v1::PlannedJob Job() {
    v1::PlannedJob job;
    job.set_name("tiny");
    job.add_train()->set_path(std::string(kWeb) + "/web");
    job.add_train()->set_path("/here/other");
    job.set_tokenizer(std::string(kWeb) + "/web.tokenizer.json");
    job.set_model_from(kModel);
    return job;
  }
  static v1::Launch Launch(const v1::PlannedJob& job, int64_t epoch = 1) {
    v1::Launch launch;
    launch.set_job_uid("uid");
    launch.set_epoch(epoch);
    for (int rank = 0; rank < 2; ++rank) {
      v1::StartTrainer& start = *launch.add_trainers();
      start.set_rank(rank);
      start.set_job(job.SerializeAsString());
    }
    return launch;
  }
  // A launch of another job, with a data set that needs more than 100 bytes.
  v1::Launch LargeLaunch() {
    const std::string name(150, 'a');
    MakeSet("large", {name});
    v1::PlannedJob job;
    job.add_train()->set_path("ravel://127.0.0.1:7443/sets/large/" + name);
    v1::Launch launch = Launch(job);
    launch.set_job_uid("other");
    return launch;
  }
  LaunchData::Done Into(std::optional<LaunchDataResult>& result) {
    return [&result](const LaunchDataResult& got) {
      EXPECT_FALSE(result.has_value()) << "answered once";
      result = got;
    };
  }
  void RunUntil(const std::function<bool()>& done) {
    context_.restart();
    while (!done() && context_.run_one_for(seconds(20)) > 0) {
    }
    ASSERT_TRUE(done());
  }
  LaunchDataResult Start(const v1::Launch& launch) {
    std::optional<LaunchDataResult> result;
    data_->Start(launch, Into(result));
    RunUntil([&result] { return result.has_value(); });
    return *result;
  }
  void Expect(const v1::PlannedJob& job, const std::string& reason, const std::string& text) {
    const LaunchDataResult result = Start(Launch(job));
    EXPECT_EQ(result.reason, reason) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr(text));
  }

  testing::ScratchFolder scratch_;
  absl::Status fault_;
  std::atomic<bool> hold_ = false;
  std::atomic<bool> held_ = false;
  boost::asio::io_context context_;
  std::shared_ptr<DataCache> cache_;
  std::unique_ptr<LaunchData> data_;
};

TEST_F(LaunchDataTest, TrainersGetLocalPaths) {
  const LaunchDataResult result = Start(Launch(Job()));
  ASSERT_TRUE(result.status.ok()) << result.status;
  for (const v1::StartTrainer& start : result.launch.trainers()) {
    v1::PlannedJob job;
    ASSERT_TRUE(job.ParseFromString(start.job()));
    EXPECT_EQ(job.name(), "tiny");
    EXPECT_EQ(testing::ReadText(job.train(0).path() + ".bin"), "web.bin");
    EXPECT_EQ(job.train(1).path(), "/here/other");
    EXPECT_EQ(testing::ReadText(job.tokenizer()), "web.tokenizer.json");
    EXPECT_EQ(testing::ReadText(job.model_from() + "/config.json"), "config.json");
  }
}

TEST_F(LaunchDataTest, AJobWithoutUrlsGoesOnAtOnce) {
  v1::PlannedJob job;
  job.add_train()->set_path("/here/other");
  std::optional<LaunchDataResult> result;
  data_->Start(Launch(job), Into(result));
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->launch.trainers(0).job(), job.SerializeAsString());
}

TEST_F(LaunchDataTest, WhoseFaultItIsFollowsFromTheError) {
  v1::PlannedJob job = Job();
  job.mutable_train(0)->set_path(std::string(kWeb) + "/absent");
  Expect(job, "DataError", "spec.data.train[0].path: ravel://127.0.0.1:7443/sets/web/absent");
  job.mutable_train(0)->set_path("ravel://127.0.0.1:7443/sets/nothing/web");
  Expect(job, "DataError", "no data set is there");
  job = Job();
  job.mutable_train(0)->set_path("ravel://127.0.0.1:7443/../web/web");
  Expect(job, "DataError", "spec.data.train[0].path");
  testing::WriteText(scratch_.path() + "/stores/tiny/model.safetensors", "model.safetensorz");
  Expect(Job(), "DataError", "spec.model.from");
  fault_ = absl::UnavailableError("connection refused");
  job = Job();
  job.set_model_from("ravel://127.0.0.1:7443/models/other");
  Expect(job, "StoreUnavailable", "connection refused");
  fault_ = absl::FailedPreconditionError("no keys");
  Expect(job, "PreflightFailed", "no keys");
  fault_ = absl::PermissionDeniedError("revoked");
  Expect(job, "PreflightFailed", "revoked");
  data_ = std::make_unique<LaunchData>(context_, nullptr, seconds(60));
  Expect(Job(), "PreflightFailed", "no data cache");
}

TEST_F(LaunchDataTest, ALaunchThatIsGivenUpAnswersAtOnceAndTheNextOneHasTheData) {
  hold_ = true;
  std::optional<LaunchDataResult> old;
  data_->Start(Launch(Job(), 1), Into(old));
  ASSERT_TRUE(testing::Eventually(seconds(20), [this] { return held_.load(); }));
  EXPECT_EQ(data_->MovedBytes("uid"), 0);
  data_->Stop("uid", 0);  // of an older epoch
  EXPECT_FALSE(old.has_value());
  data_->Stop("uid", 1);
  ASSERT_TRUE(old.has_value());
  EXPECT_TRUE(absl::IsCancelled(old->status));
  EXPECT_EQ(old->reason, "");
  EXPECT_EQ(data_->MovedBytes("uid"), -1);
  std::optional<LaunchDataResult> next;
  data_->Start(Launch(Job(), 2), Into(next));
  std::optional<LaunchDataResult> late;
  data_->Start(Launch(Job(), 1), Into(late));
  EXPECT_TRUE(late.has_value() && absl::IsCancelled(late->status));
  hold_ = false;
  RunUntil([&next] { return next.has_value(); });
  EXPECT_TRUE(next->status.ok()) << next->status;
  EXPECT_EQ(next->launch.epoch(), 2);
}

TEST_F(LaunchDataTest, ANewerLaunchEndsTheOlderOne) {
  hold_ = true;
  std::optional<LaunchDataResult> old;
  std::optional<LaunchDataResult> next;
  data_->Start(Launch(Job(), 1), Into(old));
  data_->Start(Launch(Job(), 2), Into(next));
  ASSERT_TRUE(old.has_value());
  EXPECT_TRUE(absl::IsCancelled(old->status));
  hold_ = false;
  RunUntil([&next] { return next.has_value(); });
  EXPECT_EQ(next->launch.epoch(), 2);
}

TEST_F(LaunchDataTest, TheSameLaunchAgainSharesTheFetch) {
  hold_ = true;
  std::optional<LaunchDataResult> first;
  std::optional<LaunchDataResult> again;
  data_->Start(Launch(Job()), Into(first));
  data_->Start(Launch(Job()), Into(again));
  hold_ = false;
  RunUntil([&] { return first.has_value() && again.has_value(); });
  EXPECT_TRUE(first->status.ok() && again->status.ok());
}

TEST_F(LaunchDataTest, AStoreThatStandsStillEndsTheWait) {
  data_ = std::make_unique<LaunchData>(context_, cache_, milliseconds(50));
  hold_ = true;
  const LaunchDataResult result = Start(Launch(Job()));
  hold_ = false;
  EXPECT_EQ(result.reason, "StoreUnavailable");
  EXPECT_THAT(std::string(result.status.message()), HasSubstr("no byte came"));
}

TEST_F(LaunchDataTest, ASetThatNoRoomWouldBeEnoughForIsNamedWithTheFlag) {
  Open(10);
  const LaunchDataResult result = Start(Launch(Job()));
  EXPECT_EQ(result.reason, "DataCacheTooSmall");
  for (const char* part : {"spec.data.train[0].path: ",
                           "more than the whole data cache",
                           "(10 B)",
                           "--data-cache-bytes"}) {
    EXPECT_THAT(std::string(result.status.message()), HasSubstr(part));
  }
}

TEST_F(LaunchDataTest, DataOfJobsThatRunStays) {
  ASSERT_TRUE(Start(Launch(Job())).status.ok());
  Open(cache_->bytes() + 100);
  ASSERT_TRUE(Start(Launch(Job())).status.ok());
  EXPECT_EQ(Start(LargeLaunch()).reason, "PreflightFailed") << "no room beside what the job uses";
  data_->Keep({"uid"});
  EXPECT_EQ(Start(LargeLaunch()).reason, "PreflightFailed");
  data_->Keep({});
  EXPECT_TRUE(Start(LargeLaunch()).status.ok());
}

// A node that is refused starts nothing that was fetched for it meanwhile.
TEST_F(LaunchDataTest, AllLaunchesAreGivenUpTogether) {
  hold_ = true;
  v1::Launch other = Launch(Job(), 7);
  other.set_job_uid("other");
  std::optional<LaunchDataResult> one;
  std::optional<LaunchDataResult> two;
  data_->Start(Launch(Job()), Into(one));
  data_->Start(other, Into(two));
  data_->StopAll();
  EXPECT_TRUE(one.has_value() && absl::IsCancelled(one->status));
  EXPECT_TRUE(two.has_value() && absl::IsCancelled(two->status));
  EXPECT_EQ(data_->MovedBytes("other"), -1);
  hold_ = false;
}

TEST_F(LaunchDataTest, DataOfALaunchThatWasGivenUpMayGo) {
  ASSERT_TRUE(Start(Launch(Job())).status.ok());
  const int64_t all = cache_->bytes();
  Open(all + 100);
  std::optional<LaunchDataResult> result;
  data_->Start(Launch(Job()), Into(result));
  // The thread has ended, and its answer waits for the loop.
  ASSERT_TRUE(testing::Eventually(seconds(20), [&] { return data_->threads() == 0; }));
  data_->Stop("uid", 1);
  EXPECT_TRUE(result.has_value() && absl::IsCancelled(result->status));
  EXPECT_TRUE(
      testing::Eventually(seconds(20), [this] { return Start(LargeLaunch()).status.ok(); }));
}

}  // namespace
}  // namespace ravel::daemon
