#include "coordinator/ctl/data_push.h"

#include <cstdlib>
#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/certificate.h"
#include "common/crypto.h"
#include "common/fault_point.h"
#include "common/net_address.h"
#include "common/store/file_store.h"
#include "coordinator/ctl/contexts.h"
#include "coordinator/ctl/data_prepare.h"
#include "coordinator/ctl/path_text.h"
#include "tests/testing/process.h"

namespace ravel::ctl {
namespace {

using ::testing::HasSubstr;

class DataPushTest : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteText(Path("text"), "to be or not to be\n");
    PrepareRequest request;
    request.inputs = {Path("text")};
    request.output = Path("web");
    request.validation_fraction = 0.4;
    request.document_separator = " ";
    ASSERT_TRUE(PrepareData(request, [](const char*, int64_t, int64_t) {}).ok());
  }
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  absl::StatusOr<DataPushResult> Push() const {
    return PushData({.source = Path("web"), .to = "file://" + Path("store/sets/web")}, nullptr);
  }
  absl::StatusOr<store::DataSet> Pushed() const {
    return store::ReadDataSet(store::FileStore(Path("store/sets/web")));
  }

  testing::ScratchFolder scratch_;
};

TEST_F(DataPushTest, AMistypedUrlIsNoFolder) {
  for (const char* url :
       {"http://x/y", "gs://b/c", "S3://b/c", "s3:/b/c", "ravel:/127.0.0.1:1/a"}) {
    const auto refused = PushData({.source = Path("web"), .to = url}, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << url << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(url));
    EXPECT_TRUE(absl::IsInvalidArgument(CheckIsPath("TO", url)));
  }
  for (const char* path : {"/a/b", "a:b", "./gs:/b", "file:///a", "a b/c:/d", "x"}) {
    EXPECT_EQ(CheckIsPath("TO", path), absl::OkStatus()) << path;
  }
  EXPECT_FALSE(CheckIsPath("TO", "file://a").ok()) << "a host, or a path that is not absolute";
  EXPECT_FALSE(CheckIsPath("TO", "").ok());
}

TEST_F(DataPushTest, AFolderIsNoPrefixOfFiles) {
  PrepareRequest request;
  request.inputs = {Path("text")};
  for (const std::string& output : {Path(""), std::string("/"), std::string("s3://b/c")}) {
    request.output = output;
    const auto refused = PrepareData(request, [](const char*, int64_t, int64_t) {});
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << output << refused.status();
    EXPECT_FALSE(std::filesystem::exists(output + ".bin")) << output;
  }
}

TEST(ContextNames, AnotherCoordinatorOfAHostDoesNotReplaceTheFirst) {
  const testing::ScratchFolder scratch;
  setenv("RAVEL_CONFIG_DIR", scratch.path().c_str(), 1);
  const auto name_of = [](const std::string& address) {
    return ContextNameOf(*ParseHostPort(address), address);
  };
  EXPECT_EQ(name_of("127.0.0.1:17170"), "127.0.0.1");
  const absl::StatusOr<Authority> made = MakeAuthority("ann", 0, int64_t{4'000'000'000} * 1000);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(SaveContext("127.0.0.1",
                        {.coordinator = "127.0.0.1:17170",
                         .authority = made->certificate,
                         .certificate = made->certificate,
                         .key = made->key}),
            absl::OkStatus());
  EXPECT_EQ(name_of("127.0.0.1:17170"), "127.0.0.1") << "it logs in again";
  EXPECT_EQ(name_of("127.0.0.1:17270"), "127.0.0.1-17270");
  EXPECT_EQ(name_of("[::1]:7070"), "coordinator");
  unsetenv("RAVEL_CONFIG_DIR");
}

TEST_F(DataPushTest, AllFilesAndTheirDigestsAreThere) {
  const absl::StatusOr<DataPushResult> result = Push();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->copied_files, 5);
  EXPECT_EQ(result->copied_bytes, result->manifest.total_bytes());
  const absl::StatusOr<store::DataSet> set = Pushed();
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->manifest, result->manifest);
  EXPECT_EQ(set->digest, result->digest);
  for (const store::DataFile& file : set->manifest.files) {
    const std::string content = testing::ReadText(Path("store/sets/web/" + file.name));
    EXPECT_EQ(content, testing::ReadText(Path(file.name)));
    EXPECT_EQ(file.sha256, Hex(Sha256(content)));
  }
  ASSERT_EQ(set->manifest.tokens.size(), 2u);
  EXPECT_EQ(set->manifest.tokens[1].prefix, "web.validation");
  EXPECT_EQ(set->manifest.tokens[0].largest_id, 256) << "of all ids";
}

TEST_F(DataPushTest, TheSameOnceMoreIsFine) {
  ASSERT_TRUE(Push().ok());
  const absl::StatusOr<DataPushResult> again = Push();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->was_there);
  EXPECT_EQ(again->copied_files, 0);
}

// A manifest of a release that did not sample ids stays as it is.
TEST_F(DataPushTest, TheSameFilesInAnOlderManifestAreFine) {
  ASSERT_TRUE(Push().ok());
  store::DataManifest older = Pushed()->manifest;
  ASSERT_EQ(older.tokens[0].sample_digest.size(), 64u);
  for (store::DataTokens& tokens : older.tokens) {
    tokens.sample_digest.clear();
  }
  const std::string text = store::WriteDataManifest(older);
  testing::WriteText(Path("store/sets/web/ravel-data.json"), text);
  const absl::StatusOr<DataPushResult> again = Push();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->was_there);
  EXPECT_EQ(again->digest, Hex(Sha256(text))) << "that of what is there";
  EXPECT_EQ(testing::ReadText(Path("store/sets/web/ravel-data.json")), text);
  older.tokens[0].tokens += 1;
  testing::WriteText(Path("store/sets/web/ravel-data.json"), store::WriteDataManifest(older));
  EXPECT_TRUE(absl::IsAlreadyExists(Push().status()));
}

TEST_F(DataPushTest, AnInterruptedPushGoesOn) {
  ASSERT_TRUE(Push().ok());
  std::filesystem::remove(Path("store/sets/web/ravel-data.json"));
  std::filesystem::remove(Path("store/sets/web/web.idx"));
  const absl::StatusOr<DataPushResult> again = Push();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->copied_files, 1);
  EXPECT_TRUE(Pushed().ok());
}

TEST_F(DataPushTest, AnotherContentIsRefusedAndNothingIsReplaced) {
  ASSERT_TRUE(Push().ok());
  const std::string before = testing::ReadText(Path("store/sets/web/ravel-data.json"));
  testing::WriteText(Path("web.tokenizer.json"), "{\"other\": 1}");
  EXPECT_TRUE(absl::IsAlreadyExists(Push().status()));
  EXPECT_EQ(testing::ReadText(Path("store/sets/web/ravel-data.json")), before);
  // The same while only its files are there.
  std::filesystem::remove(Path("store/sets/web/ravel-data.json"));
  const absl::Status refused = Push().status();
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("web.tokenizer.json"));
  // And where it has as many bytes.
  std::string bytes = testing::ReadText(Path("web.bin"));
  bytes[0] ^= 1;
  testing::WriteText(Path("store/sets/web/web.bin"), bytes);
  EXPECT_THAT(std::string(Push().status().message()), HasSubstr("web.bin"));
  EXPECT_EQ(testing::ReadText(Path("store/sets/web/web.bin")), bytes);
  EXPECT_TRUE(absl::IsNotFound(Pushed().status()));
}

TEST_F(DataPushTest, AFileThatChangesMeanwhileNeverGetsItsNameNorTheSetItsManifest) {
  bool changed = false;
  const absl::Status cut =
      PushData({.source = Path("web"), .to = Path("store/sets/web")},
               [&](const std::string& phase, int64_t /*done*/, int64_t /*all*/) {
                 if (phase == "copying" && !changed) {
                   changed = true;
                   std::string bytes = testing::ReadText(Path("web.idx"));
                   bytes.back() ^= 1;
                   testing::WriteText(Path("web.idx"), bytes);
                 }
               })
          .status();
  EXPECT_TRUE(absl::IsAborted(cut)) << cut;
  EXPECT_THAT(std::string(cut.message()), HasSubstr("web.idx"));
  EXPECT_TRUE(std::filesystem::exists(Path("store/sets/web/web.bin")));
  EXPECT_FALSE(std::filesystem::exists(Path("store/sets/web/web.idx")));
  EXPECT_TRUE(absl::IsNotFound(Pushed().status()));
}

TEST_F(DataPushTest, WhatIsWrongWithTheDataIsSaidBeforeAnythingIsWritten) {
  std::filesystem::resize_file(Path("web.bin"), 1);
  EXPECT_THAT(std::string(Push().status().message()), HasSubstr("web"));
  std::filesystem::remove(Path("web.idx"));
  EXPECT_FALSE(Push().ok());
  EXPECT_FALSE(std::filesystem::exists(Path("store")));
}

TEST_F(DataPushTest, ADestinationThatIsNoneIsNamed) {
  for (const char* url : {"ravel://nowhere", "ravel://127.0.0.1:1/../x"}) {
    const absl::Status refused = PushData({.source = Path("web"), .to = url}, nullptr).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("URL"));
  }
}

TEST_F(DataPushTest, AModelIsWhatItsReadersOpen) {
  std::filesystem::create_directories(Path("model/original"));
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "README.md"}) {
    testing::WriteText(Path("model/" + std::string(name)), name);
  }
  const absl::StatusOr<DataPushResult> result = PushData(
      {.source = Path("model"), .to = Path("store/model"), .kind = store::DataSetKind::kModel},
      nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->url, Path("store/model"));
  EXPECT_EQ(result->copied_files, 3);
  EXPECT_EQ(result->manifest.FindFile("README.md"), nullptr);
  std::filesystem::remove(Path("model/model.safetensors"));
  const absl::Status refused =
      PushData(
          {.source = Path("model"), .to = Path("store/other"), .kind = store::DataSetKind::kModel},
          nullptr)
          .status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("model.safetensors"));
}

}  // namespace
}  // namespace ravel::ctl
