// S3: AWS's published signatures; the tree over objects; and two servers (moto, from PyPI, and
// Swift, from Debian), each behind a proxy that fails on purpose.

#include "common/store/s3_store.h"

#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/store/blob_tree.h"
#include "common/store/s3_signature.h"
#include "tests/testing/http_client.h"
#include "tests/testing/memory_blobs.h"
#include "tests/testing/process.h"
#include "tests/testing/required.h"
#include "tests/testing/s3_server.h"

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

const S3Keys kExampleKeys = {"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
constexpr char kExampleTime[] = "20130524T000000Z";

S3Request Example(const std::string& method, const std::string& path, const std::string& payload) {
  S3Request request;
  request.method = method;
  request.host = "examplebucket.s3.amazonaws.com";
  request.path = path;
  request.payload_sha256 = Hex(Sha256(payload));
  return request;
}

TEST(S3SignatureTest, IsThatOfTheExamplesThatAwsPublishes) {
  S3Request get = Example("GET", "/test.txt", "");
  get.headers["range"] = "bytes=0-9";
  EXPECT_EQ(SignS3(kExampleKeys, "us-east-1", kExampleTime, get),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  S3Request put = Example("PUT", "/test$file.text", "Welcome to Amazon S3.");
  put.headers["date"] = "Fri, 24 May 2013 00:00:00 GMT";
  put.headers["x-amz-storage-class"] = "REDUCED_REDUNDANCY";
  EXPECT_THAT(SignS3(kExampleKeys, "us-east-1", kExampleTime, put),
              HasSubstr("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"));
  S3Request flag = Example("GET", "/", "");
  flag.query["lifecycle"] = "";
  EXPECT_THAT(SignS3(kExampleKeys, "us-east-1", kExampleTime, flag),
              HasSubstr("fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"));
  S3Request list = Example("GET", "/", "");
  list.query = {{"prefix", "J"}, {"max-keys", "2"}};
  EXPECT_THAT(SignS3(kExampleKeys, "us-east-1", kExampleTime, list),
              HasSubstr("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"));
}

TEST(BlobTreeTest, AStoreThatReplacesIsRefused) {
  BlobTree tree(std::make_unique<testing::MemoryBlobs>(false), "p");
  const absl::Status refused = tree.MakeRoot();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("If-None-Match"));
}

TEST(BlobTreeTest, APublishedFolderIsSeenOnceAndAPublicationThatWasCutOffIsFinished) {
  auto blobs = std::make_unique<testing::MemoryBlobs>();
  testing::MemoryBlobs& raw = *blobs;
  BlobTree tree(std::move(blobs), "p");
  ASSERT_TRUE(tree.MakeRoot().ok());
  ASSERT_TRUE(tree.MakeDirectory("attempt").ok());
  ASSERT_TRUE(tree.Put("attempt/f", "1").ok());
  ASSERT_TRUE(tree.PublishIfAbsent("attempt", "step").ok());
  const std::vector<ListedEntry> root = {{"step", true, 0}};
  EXPECT_EQ(*tree.List(""), root);
  EXPECT_TRUE(absl::IsNotFound(tree.Open("attempt/f").status()));
  EXPECT_TRUE(absl::IsNotFound(tree.Put("attempt/late", "x"))) << "by a writer that is late";
  // The next name is there, the old one not gone yet.
  ASSERT_TRUE(raw.PutIfAbsent("p/.links/other", "attempt").ok());
  ASSERT_TRUE(tree.PublishIfAbsent("step", "other").ok());
  EXPECT_FALSE(*Exists(tree, "step"));
  EXPECT_EQ(*ReadFile(tree, "other/f", 10), "1");
  ASSERT_TRUE(tree.Withdraw("other").ok());
  EXPECT_TRUE(raw.List("p/", BlobStore::Depth::kAll)->blobs.empty());
}

// Runs `hook` once, before a link gets that name.
class HookedBlobs : public testing::MemoryBlobs {
 public:
  absl::Status PutIfAbsent(const std::string& key, std::string_view content) override {
    if (hook && absl::EndsWith(key, link)) {
      std::exchange(hook, nullptr)();
    }
    return MemoryBlobs::PutIfAbsent(key, content);
  }

  std::string link;
  std::function<void()> hook;
};

TEST(BlobTreeTest, OfTwoNamesThatAFolderGetsAtOnceTheSecondIsTakenBack) {
  for (const std::string second : {"step", "removed"}) {
    SCOPED_TRACE(second);
    const std::string first = second == "step" ? "removed" : "step";
    auto blobs = std::make_unique<HookedBlobs>();
    HookedBlobs& raw = *blobs;
    BlobTree tree(std::move(blobs), "p");
    ASSERT_TRUE(tree.MakeDirectory("attempt").ok());
    ASSERT_TRUE(tree.Put("attempt/f", "1").ok());
    raw.link = ".links/" + second;
    raw.hook = [&] { ASSERT_EQ(tree.PublishIfAbsent("attempt", first), absl::OkStatus()); };
    const absl::Status refused = tree.PublishIfAbsent("attempt", second);
    EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("it is renamed to " + first));
    EXPECT_FALSE(*Exists(tree, second));
    EXPECT_EQ(*ReadFile(tree, first + "/f", 10), "1");
    EXPECT_TRUE(absl::IsNotFound(tree.PublishIfAbsent("attempt", second)));
  }
}

// Whoever made the second name was cut off before it looked.
TEST(BlobTreeTest, AFolderThatIsLeftWithTwoNamesLosesNothingWithOneOfThem) {
  auto blobs = std::make_unique<testing::MemoryBlobs>();
  testing::MemoryBlobs& raw = *blobs;
  BlobTree tree(std::move(blobs), "p");
  ASSERT_TRUE(tree.MakeDirectory("attempt").ok());
  ASSERT_TRUE(tree.Put("attempt/f", "1").ok());
  ASSERT_TRUE(tree.PublishIfAbsent("attempt", "step").ok());
  ASSERT_TRUE(raw.PutIfAbsent("p/.links/removed", "attempt").ok());
  EXPECT_TRUE(absl::IsUnavailable(tree.PublishIfAbsent("attempt", "step")));
  ASSERT_TRUE(tree.Withdraw("removed").ok());
  EXPECT_EQ(*ReadFile(tree, "step/f", 10), "1");
  EXPECT_TRUE(absl::IsNotFound(tree.PublishIfAbsent("attempt", "step")));
}

// One server of each kind for the whole program; the environment points to it.
class S3StoreTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void TearDownTestSuite() { servers_.clear(); }
  void SetUp() override {
    auto found = servers_.find(GetParam());
    if (found == servers_.end()) {
      found = servers_.emplace(GetParam(), testing::S3Server::Start(GetParam())).first;
    }
    if (absl::IsNotFound(found->second.status())) {
      testing::SkipWithout(GetParam(), found->second.status().message());
      return;
    }
    ASSERT_TRUE(found->second.ok()) << found->second.status();
    (*found->second)->UseHere();
  }

  static inline std::map<std::string, absl::StatusOr<std::unique_ptr<testing::S3Server>>> servers_;
};
INSTANTIATE_TEST_SUITE_P(Server, S3StoreTest, ::testing::Values("moto", "swift"));

// Uploads in parts that nobody has finished, as the server lists them.
std::string UnfinishedUploads() {
  const std::string endpoint = std::getenv("RAVEL_S3_ENDPOINT");
  const std::string host = endpoint.substr(endpoint.find("://") + 3);
  S3Request request;
  request.method = "GET";
  request.host = host;
  request.path = "/bucket";
  request.query["uploads"] = "";
  request.payload_sha256 = Hex(Sha256(""));
  const std::time_t now = std::time(nullptr);
  char time[32];
  std::strftime(time, sizeof(time), "%Y%m%dT%H%M%SZ", std::gmtime(&now));
  const std::string authorization =
      SignS3({"test:tester", "hush-hush"}, "us-east-1", time, request);
  std::string text = absl::StrCat("GET /bucket?", S3Query(request.query), " HTTP/1.1");
  for (const auto& [name, value] : request.headers) {
    absl::StrAppend(&text, "\r\n", name, ": ", value);
  }
  absl::StrAppend(&text, "\r\nAuthorization: ", authorization, "\r\nConnection: close\r\n\r\n");
  return testing::SendHttp(std::stoi(host.substr(host.rfind(':') + 1)), text).body;
}

TEST_P(S3StoreTest, EveryActHappensOnceThrough503sAndAnswersThatAreLost) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/team/job");
  ASSERT_EQ(store->MakeRoot(), absl::OkStatus());
  for (int i = 0; i < 6; ++i) {
    const std::string name = std::to_string(i);
    ASSERT_EQ(MakeDirectories(*store, "attempt-" + name + "/model"), absl::OkStatus());
    ASSERT_EQ(store->Put("attempt-" + name + "/COMMIT", name), absl::OkStatus());
    EXPECT_TRUE(absl::IsAlreadyExists(store->Put("attempt-" + name + "/COMMIT", "again")));
  }
  ASSERT_EQ(store->PublishIfAbsent("attempt-0", "step"), absl::OkStatus());
  for (int i = 1; i < 6; ++i) {
    EXPECT_TRUE(
        absl::IsAlreadyExists(store->PublishIfAbsent("attempt-" + std::to_string(i), "step")));
  }
  EXPECT_EQ(*ReadFile(*store, "step/COMMIT", 10), "0");
  EXPECT_EQ(store->List("")->size(), 6u);
  ASSERT_EQ(store->Withdraw("step"), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(store->Open("step/COMMIT").status()));
  EXPECT_TRUE(absl::IsNotFound(store->Withdraw("step")));
}

TEST_P(S3StoreTest, ALongFileGoesInPartsAndComesBack) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/parts");
  std::string content((17 << 20) + 17, '\0');
  for (size_t i = 0; i < content.size(); ++i) {
    content[i] = static_cast<char>(i * 7 % 251);
  }
  auto writer = store->Create("long", static_cast<int64_t>(content.size()));
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_EQ((*writer)->Append(std::as_bytes(std::span(content.data(), content.size()))),
            absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(store->Open("long").status())) << "not before it is whole";
  ASSERT_EQ((*writer)->Finish(), absl::OkStatus());
  EXPECT_TRUE(*ReadFile(*store, "long", 64 << 20) == content);
  const auto reader = store->Open("long");
  std::string middle(15 << 20, '\0');
  ASSERT_EQ(
      (*reader)->ReadAt(1'234'567, std::as_writable_bytes(std::span(middle.data(), middle.size()))),
      absl::OkStatus());
  EXPECT_TRUE(middle == content.substr(1'234'567, middle.size()));
  EXPECT_TRUE(absl::IsAlreadyExists(store->Create("long", 1).status()));
}

TEST_P(S3StoreTest, EveryPartOfALongFileComesThroughConflictsAndLateErrors) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/conflicts");
  const std::string content((16 << 20) + 1, 'c');
  for (int i = 0; i < 5; ++i) {  // the completion meets each of the proxy's turns
    const std::string name = absl::StrCat("long-", i);
    auto writer = store->Create(name, 0);
    ASSERT_EQ((*writer)->Append(std::as_bytes(std::span(content.data(), content.size()))),
              absl::OkStatus());
    ASSERT_EQ((*writer)->Finish(), absl::OkStatus()) << name;
    EXPECT_TRUE(*ReadFile(*store, name, 64 << 20) == content);
    for (int more = 0; more < i % 2; ++more) {
      ASSERT_EQ(store->Put(absl::StrCat("small-", i), "x"), absl::OkStatus());
    }
  }
}

TEST_P(S3StoreTest, WhatAKilledWriterHasSentGoesWithItsFolder) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/killed");
  for (const char* folder : {"attempt", "attempt-2"}) {
    ASSERT_EQ(store->MakeDirectory(folder), absl::OkStatus());
    auto writer = store->Create(absl::StrCat(folder, "/model"), 0);
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::string content(17 << 20, 'k');
    ASSERT_EQ((*writer)->Append(std::as_bytes(std::span(content.data(), content.size()))),
              absl::OkStatus());
    static auto* const killed = new std::vector<std::unique_ptr<FileWriter>>;  // no goodbye
    killed->push_back(std::move(*writer));
  }
  ASSERT_THAT(UnfinishedUploads(), HasSubstr("killed/attempt/model"));
  ASSERT_EQ(store->Withdraw("attempt"), absl::OkStatus());
  EXPECT_THAT(UnfinishedUploads(), ::testing::Not(HasSubstr("killed/attempt/model")));
  EXPECT_THAT(UnfinishedUploads(), HasSubstr("killed/attempt-2/model")) << "of another folder";
}

TEST_P(S3StoreTest, OfPublishersThatRaceOneWins) {
  const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/race");
  constexpr int kPublishers = 4;
  for (int i = 0; i < kPublishers; ++i) {
    ASSERT_EQ(store->MakeDirectory("attempt-" + std::to_string(i)), absl::OkStatus());
    ASSERT_EQ(store->Put(absl::StrCat("attempt-", i, "/COMMIT"), std::to_string(i)),
              absl::OkStatus());
  }
  std::vector<absl::Status> results(kPublishers);
  std::vector<std::thread> publishers;
  for (int i = 0; i < kPublishers; ++i) {
    publishers.emplace_back([&results, i] {
      results[static_cast<size_t>(i)] =
          (*OpenS3Store("s3://bucket/race"))->PublishIfAbsent(absl::StrCat("attempt-", i), "step");
    });
  }
  for (std::thread& publisher : publishers) {
    publisher.join();
  }
  const std::string winner = *ReadFile(*store, "step/COMMIT", 10);
  for (int i = 0; i < kPublishers; ++i) {
    EXPECT_EQ(results[static_cast<size_t>(i)].ok(), winner == std::to_string(i))
        << i << ": " << results[static_cast<size_t>(i)];
  }
}

// A server of a site: its own authority, and either place of the bucket.
TEST(S3SecureTest, ServersOfAnAuthorityThatIsNamedAreSpokenToInEitherStyle) {
  const auto server = testing::S3Server::StartSecure();
  if (absl::IsNotFound(server.status())) {
    testing::SkipWithout("moto", server.status().message());
    return;
  }
  ASSERT_TRUE(server.ok()) << server.status();
  (*server)->UseHere();
  std::string content((17 << 20) + 5, 's');
  for (const char* style : {"path", "virtual"}) {
    setenv("RAVEL_S3_STYLE", style, 1);
    const std::unique_ptr<ObjectStore> store = *OpenS3Store(absl::StrCat("s3://bucket/", style));
    ASSERT_EQ(store->MakeRoot(), absl::OkStatus()) << style;
    ASSERT_EQ(store->Put("small", style), absl::OkStatus());
    auto writer = store->Create("long", 0);
    ASSERT_EQ((*writer)->Append(std::as_bytes(std::span(content.data(), content.size()))),
              absl::OkStatus());
    ASSERT_EQ((*writer)->Finish(), absl::OkStatus()) << style;
  }
  // Each sees what the other has written: one bucket.
  for (const char* style : {"virtual", "path"}) {
    setenv("RAVEL_S3_STYLE", style, 1);
    const std::string other = std::string(style) == "path" ? "virtual" : "path";
    const std::unique_ptr<ObjectStore> store = *OpenS3Store("s3://bucket/" + other);
    EXPECT_EQ(*ReadFile(*store, "small", 10), other);
    EXPECT_TRUE(*ReadFile(*store, "long", 64 << 20) == content);
    EXPECT_EQ(store->List("")->size(), 2u);
  }
  unsetenv("RAVEL_S3_STYLE");
  unsetenv("RAVEL_S3_CA");  // the system does not know it
  const absl::Status unknown = (*OpenS3Store("s3://bucket/path"))->Open("small").status();
  EXPECT_TRUE(absl::IsUnavailable(unknown)) << unknown;
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("certificate"));
}

TEST(S3UrlTest, WhatIsWrongIsNamedAndKeysAreNeverShown) {
  const testing::ScratchFolder scratch;
  const std::string keys = scratch.path() + "/credentials";
  testing::WriteText(keys,
                     "[default]\naws_access_key_id = id\naws_secret_access_key = hush-hush\n");
  setenv("RAVEL_S3_CREDENTIALS", keys.c_str(), 1);
  unsetenv("RAVEL_S3_ENDPOINT");
  EXPECT_EQ((*OpenS3Store("s3://bucket/a/b/"))->Locate("c"), "s3://bucket/a/b/c");
  for (const char* url :
       {"s3://", "s3://B", "s3://bucket//a", "s3://bucket/../a", "s3://bu_cket/a"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(OpenS3Store(url).status())) << url;
  }
  setenv("RAVEL_S3_ENDPOINT", "http://s3.example:9000", 1);
  EXPECT_TRUE(absl::IsInvalidArgument(OpenS3Store("s3://bucket/a").status())) << "in clear";
  setenv("RAVEL_S3_ENDPOINT", "http://127.0.0.1:1", 1);
  const absl::Status away = (*OpenS3Store("s3://bucket/a"))->Open("x").status();
  EXPECT_TRUE(absl::IsUnavailable(away)) << away;
  EXPECT_FALSE(absl::StrContains(std::string(away.message()), "hush"));
  unsetenv("RAVEL_S3_CREDENTIALS");
  setenv("AWS_ACCESS_KEY_ID", "id", 1);
  setenv("AWS_SECRET_ACCESS_KEY", "hush-hush", 1);
  const absl::Status none = OpenS3Store("s3://bucket/a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(none)) << "trainers would not have the variables";
  EXPECT_THAT(std::string(none.message()), HasSubstr("AWS_* are not read"));
}

}  // namespace
}  // namespace ravel::store
