// S3 as Swift speaks it, without a proxy that fails: errors of a real service, pages, and servers
// of it that are stopped or killed.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/store/s3_store.h"
#include "common/store/store_refusal.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "tests/testing/required.h"
#include "tests/testing/s3_server.h"

namespace ravel::store {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr char kWrongSecret[] = "not-hush-hush";

class SwiftStoreTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ =
        new absl::StatusOr<std::unique_ptr<testing::S3Server>>(testing::S3Server::Start("swift"));
  }
  static void TearDownTestSuite() { delete server_; }
  void SetUp() override {
    if (absl::IsNotFound(server_->status())) {
      testing::SkipWithout("swift", server_->status().message());
      return;
    }
    ASSERT_TRUE(server_->ok()) << server_->status();
    swift().UseSwiftHere("conditional");
  }
  void TearDown() override {
    for (const char* name : {"RAVEL_S3_REGION",
                             "RAVEL_S3_ACCESS_KEY_ID",
                             "RAVEL_S3_SECRET_ACCESS_KEY",
                             kKeysOfJobVariable}) {
      unsetenv(name);
    }
  }
  static testing::S3Server& swift() { return ***server_; }

  static inline absl::StatusOr<std::unique_ptr<testing::S3Server>>* server_ = nullptr;
};

// Swift's own S3 answers 501 to a condition on a write.
TEST_F(SwiftStoreTest, AsItIsShippedItIsRefusedForWantOfConditions) {
  swift().UseSwiftHere("shipped");
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/shipped");
  const absl::Status refused = store->MakeRoot();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("HTTP 501 NotImplemented"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no writes with If-None-Match"));
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Put("COMMIT", "1")));
  EXPECT_TRUE(store->List("")->empty());
}

TEST_F(SwiftStoreTest, ListingsOfSeveralPagesAreWhole) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/pages");
  ASSERT_EQ(store->MakeRoot(), absl::OkStatus());
  std::vector<ListedEntry> expected;
  for (int i = 10; i < 26; ++i) {  // the server's pages hold 7
    const std::string name = absl::StrCat(i % 2 == 0 ? "file&<\"" : "folder'+", i);
    ASSERT_EQ(i % 2 == 0 ? store->Put(name, name) : store->MakeDirectory(name), absl::OkStatus());
    expected.push_back({name, i % 2 != 0, i % 2 == 0 ? static_cast<int64_t>(name.size()) : 0});
  }
  std::sort(expected.begin(), expected.end(), [](const ListedEntry& a, const ListedEntry& b) {
    return a.name < b.name;
  });
  EXPECT_EQ(*store->List(""), expected);
  EXPECT_EQ(*ReadFile(*store, "file&<\"10", 20), "file&<\"10");
  for (int i = 0; i < 9; ++i) {  // links have pages, too
    ASSERT_EQ(store->MakeDirectory(absl::StrCat("attempt-", i)), absl::OkStatus());
    ASSERT_EQ(store->Put(absl::StrCat("attempt-", i, "/f"), std::to_string(i)), absl::OkStatus());
    ASSERT_EQ(store->PublishIfAbsent(absl::StrCat("attempt-", i), absl::StrCat("step-", i)),
              absl::OkStatus());
  }
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(*ReadFile(*store, absl::StrCat("step-", i, "/f"), 10), std::to_string(i));
    EXPECT_EQ(*Exists(*store, absl::StrCat("attempt-", i)), false);
    ASSERT_EQ(store->Withdraw(absl::StrCat("step-", i)), absl::OkStatus());
  }
  EXPECT_EQ(*store->List(""), expected);
}

void ExpectRefused(const absl::Status& status,
                   absl::StatusCode code,
                   RefusalCause cause,
                   const std::vector<std::string>& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(RefusalOf(status), cause) << status;
  for (const std::string& word : words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
  EXPECT_FALSE(absl::StrContains(std::string(status.message()), kWrongSecret));
}

// All that a program does with a store, which is refused.
std::vector<absl::Status> Uses(const std::string& url) {
  const absl::StatusOr<std::unique_ptr<ObjectStore>> store = OpenS3Store(url);
  if (!store.ok()) {
    return {store.status()};
  }
  return {(*store)->MakeRoot(),
          (*store)->Put("x", "1"),
          (*store)->Open("x").status(),
          (*store)->List("").status(),
          (*store)->Withdraw("x")};
}

TEST_F(SwiftStoreTest, ABucketThatIsMissingIsToldWithWhatNamesIt) {
  for (const absl::Status& refused : Uses("s3://no-such-bucket/a")) {
    ExpectRefused(refused,
                  absl::StatusCode::kFailedPrecondition,
                  RefusalCause::kSettings,
                  {"s3://no-such-bucket/a",
                   "HTTP 404 NoSuchBucket: there is no such bucket at http://127.0.0.1:",
                   "correct the URL or RAVEL_S3_ENDPOINT"});
  }
}

TEST_F(SwiftStoreTest, KeysThatAreWrongAreToldWithWhereTheyStand) {
  const testing::ScratchFolder scratch;
  const std::string file = scratch.path() + "/credentials";
  for (const auto& [key, secret] :
       {std::pair("test:tester", kWrongSecret), std::pair("test:nobody", "hush-hush")}) {
    testing::WriteText(
        file,
        absl::StrCat(
            "[default]\naws_access_key_id = ", key, "\naws_secret_access_key = ", secret, "\n"));
    setenv("RAVEL_S3_CREDENTIALS", file.c_str(), 1);
    for (const absl::Status& refused : Uses("s3://bucket/a")) {
      ExpectRefused(refused,
                    absl::StatusCode::kPermissionDenied,
                    RefusalCause::kKeys,
                    {"s3://bucket/",
                     "HTTP 403 SignatureDoesNotMatch: the secret key is not that of the access key",
                     "correct aws_secret_access_key in " + file + " (RAVEL_S3_CREDENTIALS)"});
    }
  }
  setenv("RAVEL_S3_ACCESS_KEY_ID", "test:tester", 1);
  setenv("RAVEL_S3_SECRET_ACCESS_KEY", kWrongSecret, 1);
  setenv(kKeysOfJobVariable, "1", 1);
  for (const absl::Status& refused : Uses("s3://bucket/a")) {
    ExpectRefused(refused,
                  absl::StatusCode::kPermissionDenied,
                  RefusalCause::kJobKeys,
                  {"correct RAVEL_S3_SECRET_ACCESS_KEY of the job's environment"});
  }
}

TEST_F(SwiftStoreTest, AWrongRegionIsToldWithTheRightOne) {
  setenv("RAVEL_S3_REGION", "eu-west-1", 1);
  for (const absl::Status& refused : Uses("s3://bucket/a")) {
    ExpectRefused(refused,
                  absl::StatusCode::kFailedPrecondition,
                  RefusalCause::kSettings,
                  {"HTTP 400 AuthorizationHeaderMalformed: requests are signed for the region "
                   "eu-west-1: set RAVEL_S3_REGION to us-east-1"});
  }
}

TEST_F(SwiftStoreTest, AClockThatIsWrongIsToldWithItsDistance) {
  swift().UseSwiftHere("late");
  for (const absl::Status& refused : Uses("s3://bucket/a")) {
    ExpectRefused(refused,
                  absl::StatusCode::kFailedPrecondition,
                  RefusalCause::kSettings,
                  {"HTTP 403 RequestTimeTooSkewed: the clock of this host is not the server's",
                   "set it, best by NTP"});
  }
}

// The proxy answers 503 while the server of objects hangs.
TEST_F(SwiftStoreTest, WritesWaitForAServerOfObjectsThatIsStoppedAndGiveUpInTime) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/stopped");
  ASSERT_EQ(store->MakeRoot(), absl::OkStatus());
  ASSERT_EQ(store->Put("before", "1"), absl::OkStatus());
  ASSERT_EQ(swift().SignalSwift("object", SIGSTOP), absl::OkStatus());
  const absl::Status away = store->Put("never", "1");
  EXPECT_TRUE(absl::IsUnavailable(away)) << away;
  EXPECT_THAT(std::string(away.message()), HasSubstr("HTTP 503"));
  EXPECT_THAT(std::string(away.message()), HasSubstr("s3://bucket/stopped/never"));
  const size_t seen = swift().SwiftLog().size();
  absl::Status put;
  std::thread writer([&] { put = store->Put("late", "2"); });
  EXPECT_TRUE(testing::Eventually(seconds(30), [&] {
    return absl::StrContains(swift().SwiftLog().substr(seen), "Object server");
  })) << swift().SwiftLog();
  EXPECT_EQ(swift().SignalSwift("object", SIGCONT), absl::OkStatus());
  writer.join();
  ASSERT_EQ(put, absl::OkStatus());
  EXPECT_EQ(*ReadFile(*store, "late", 10), "2");
  EXPECT_EQ(*ReadFile(*store, "before", 10), "1");
}

// Each kill meets a part that is under way.
TEST_F(SwiftStoreTest, AnUploadInPartsSurvivesKillsOfTheProxy) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/kills");
  std::string content((5 << 24) + 5, '\0');
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<char>(i * 11 % 253);
  }
  auto writer = store->Create("long", 0);
  ASSERT_TRUE(writer.ok()) << writer.status();
  absl::Status done;
  std::thread upload([&] {
    done = (*writer)->Append(std::as_bytes(std::span(content.data(), content.size())));
    done.Update((*writer)->Finish());
  });
  for (int kill = 0; kill < 3; ++kill) {
    EXPECT_TRUE(testing::Eventually(seconds(30), [&] { return swift().SwiftWritesPart(); }));
    EXPECT_EQ(swift().SignalSwift("conditional", SIGKILL), absl::OkStatus());
  }
  upload.join();
  ASSERT_EQ(done, absl::OkStatus());
  EXPECT_TRUE(*ReadFile(*store, "long", 128 << 20) == content);
  ASSERT_EQ(store->Withdraw("long"), absl::OkStatus());
}

}  // namespace
}  // namespace ravel::store
