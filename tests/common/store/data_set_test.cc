#include "common/store/data_set.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/crypto.h"
#include "common/store/data_set_look.h"
#include "common/store/memory_store.h"

namespace ravel::store {
namespace {

using ::testing::HasSubstr;

constexpr char kDataSetUrl[] = "ravel://127.0.0.1:7443/sets/web";

std::string Sum(const std::string& content) {
  return Hex(Sha256(content));
}

DataManifest TwoFiles() {
  DataManifest manifest;
  manifest.files = {{"web.bin", 4, Sum("abcd")}, {"web.idx", 2, Sum("ef")}};
  manifest.tokens = {{"web", 2, 77, Sum("ids")}};
  return manifest;
}

// The text of the manifest with one piece of it replaced.
std::string Changed(const std::string& from, const std::string& to) {
  std::string text = WriteDataManifest(TwoFiles());
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

void ExpectRefused(const std::string& text, const std::string& what) {
  const absl::StatusOr<DataManifest> parsed = ParseDataManifest(text);
  EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << text;
  EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(what));
}

TEST(DataSetTest, AManifestIsReadAsItWasWritten) {
  DataManifest manifest = TwoFiles();
  EXPECT_EQ(*ParseDataManifest(WriteDataManifest(manifest)), manifest);
  manifest.kind = DataSetKind::kModel;
  manifest.tokens.clear();
  EXPECT_EQ(*ParseDataManifest(WriteDataManifest(manifest)), manifest);
  EXPECT_EQ(manifest.total_bytes(), 6);
}

TEST(DataSetTest, AnOldManifestIsStillRead) {
  const std::string text = R"({"schemaVersion": "ravel-data/v1", "kind": "tokens", "files": [)"
                           R"({"name": "a.bin", "bytes": 9, "sha256": ")" +
                           Sum("x") + R"("}, {"name": "a.idx", "bytes": 8, "sha256": ")" +
                           Sum("y") +
                           R"("}], "tokens": [{"prefix": "a", "tokens": 3, "largestId": 5}]})";
  const absl::StatusOr<DataManifest> manifest = ParseDataManifest(text);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->files[1], (DataFile{"a.idx", 8, Sum("y")}));
  EXPECT_EQ(*manifest->FindTokens("a"), (DataTokens{"a", 3, 5}));
  EXPECT_EQ(manifest->FindTokens("b"), nullptr);
}

TEST(DataSetTest, NamesThatLeadElsewhereAreRefused) {
  for (const char* name : {"..",
                           "../web.bin",
                           "a/b",
                           "/etc/passwd",
                           "",
                           ".hidden",
                           "a b",
                           "x.part",
                           "ravel-data.json",
                           "a\\u0000b"}) {
    ExpectRefused(Changed("\"web.bin\"", "\"" + std::string(name) + "\""), "name");
  }
  EXPECT_TRUE(IsDataName("web-2.validation.bin"));
  EXPECT_FALSE(IsDataName(std::string(201, 'a')));
}

TEST(DataSetTest, WhatIsNotAsExpectedIsNamed) {
  ExpectRefused("{", "ravel-data.json");
  ExpectRefused("[]", "schemaVersion");
  ExpectRefused(Changed("ravel-data/v1", "ravel-data/v2"), "schemaVersion");
  ExpectRefused(Changed("\"tokens\",", "\"pictures\","), "kind");
  ExpectRefused(Changed("\"bytes\": 4", "\"bytes\": -4"), "bytes");
  ExpectRefused(Changed("\"bytes\": 4", "\"bytes\": 9223372036854775807"), "bytes");
  ExpectRefused(Changed("\"web.bin\"", "\"web.idx\""), "once");
  ExpectRefused(Changed(Sum("abcd"), Sum("abcd").substr(1)), "sha256");
  ExpectRefused(Changed(Sum("abcd"), std::string(64, 'G')), "sha256");
  ExpectRefused(Changed(Sum("ids"), Sum("ids").substr(1)), "sampleDigest");
  ExpectRefused(Changed('"' + Sum("ids") + '"', "7"), "sampleDigest");
  ExpectRefused(Changed("\"prefix\": \"web\"", "\"prefix\": \"other\""), "prefix");
  ExpectRefused(R"({"schemaVersion": "ravel-data/v1", "kind": "model", "files": []})", "at least");
  ExpectRefused(std::string(kMaxDataManifestBytes + 1, ' '), "size");
  DataManifest many;
  for (size_t i = 0; i <= kMaxDataFiles; ++i) {
    many.files.push_back({"f" + std::to_string(i), 1, Sum("x")});
  }
  ExpectRefused(WriteDataManifest(many), "at most 4096");
}

TEST(DataSetTest, UrlsOfDataSetsEndInANameOfThem) {
  const absl::StatusOr<DataUrl> split = SplitDataUrl(std::string(kDataSetUrl) + "/web.validation");
  ASSERT_TRUE(split.ok()) << split.status();
  EXPECT_EQ(split->folder, kDataSetUrl);
  EXPECT_EQ(split->member, "web.validation");
  EXPECT_EQ(*DataFolderUrl(std::string(kDataSetUrl) + "//"), kDataSetUrl);
  for (const char* wrong : {"ravel://127.0.0.1:7443",
                            "ravel://127.0.0.1:7443/sets/..",
                            "ravel://127.0.0.1:7443/../web",
                            "ravel://host/sets/web",
                            "ravel://127.0.0.1:7443/sets/web/",
                            "/data/web"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(SplitDataUrl(wrong).status())) << wrong;
  }
  EXPECT_TRUE(IsDataUrl("s3://bucket/web"));
  EXPECT_FALSE(IsDataUrl("file:///data/web"));
  EXPECT_FALSE(IsDataUrl("/data/web"));
}

// A look at data sets in one store, whichever URL is asked.
class DataSetLookTest : public ::testing::Test {
 protected:
  // Owned by the caller of OpenFunction, so each has a store of its own.
  OpenFunction Open() {
    return [this](const std::string& /*url*/) -> absl::StatusOr<std::unique_ptr<ObjectStore>> {
      ++opened_;
      RETURN_IF_ERROR(fault_);
      auto store = std::make_unique<MemoryStore>();
      for (const auto& [name, content] : contents_) {
        RETURN_IF_ERROR(store->Put(name, content));
      }
      return store;
    };
  }
  PathFacts Look() { return LookAtJobPathsBy(Open(), query_, {}); }

  absl::Status fault_;
  std::vector<std::pair<std::string, std::string>> contents_ = {
      {kDataManifest, WriteDataManifest(TwoFiles())}};
  PathQuery query_ = {
      .token_files = {{"spec.data.train[0].path", std::string(kDataSetUrl) + "/web"},
                      {"spec.data.train[1].path", "/not/there"}},
      .tokenizer = {"spec.data.train[0].path", std::string(kDataSetUrl) + "/web.tokenizer.json"}};
  int opened_ = 0;
};

TEST_F(DataSetLookTest, FactsComeFromTheManifestInTheOrderOfTheQuery) {
  const PathFacts facts = Look();
  ASSERT_EQ(facts.token_files.size(), 2u);
  EXPECT_EQ(facts.token_files[0].error, "");
  EXPECT_EQ(facts.token_files[0].tokens, 2);
  EXPECT_EQ(facts.token_files[0].largest_id, 77);
  EXPECT_EQ(facts.token_files[0].sample_digest, Sum("ids"));
  EXPECT_THAT(facts.token_files[1].error, HasSubstr("/not/there"));
  EXPECT_FALSE(facts.tokenizer);
  EXPECT_EQ(opened_, 1) << "one manifest, however many paths name the data set";
}

TEST_F(DataSetLookTest, WhatTheDataSetHasNotIsAnErrorOfItsPath) {
  query_.token_files[0].path += "2";
  EXPECT_THAT(Look().token_files[0].error, HasSubstr("no token files of this name"));
  query_.token_files[0].path.pop_back();
  query_.format = TokenFormat::kFlatU16;
  EXPECT_THAT(Look().token_files[0].error, HasSubstr("format megatron"));
  contents_.clear();
  EXPECT_THAT(Look().token_files[0].error, HasSubstr("no data set is there"));
}

TEST_F(DataSetLookTest, AStoreThatCannotBeAskedIsSilent) {
  fault_ = absl::UnavailableError("connection refused");
  const PathFacts facts = Look();
  EXPECT_EQ(facts.silent_field, "spec.data.train[0].path");
  EXPECT_THAT(facts.silence, HasSubstr("connection refused"));
  EXPECT_THAT(facts.silence, HasSubstr(kDataSetUrl));
}

TEST_F(DataSetLookTest, AConfigMustBeTheManifests) {
  DataManifest manifest{.kind = DataSetKind::kModel};
  manifest.files = {{"config.json", 2, Sum("{}")}, {"model.safetensors", 1, Sum("x")}};
  contents_ = {{kDataManifest, WriteDataManifest(manifest)}, {"config.json", "{}"}};
  query_ = {.model_directory = {"spec.model.from", kDataSetUrl}};
  EXPECT_EQ(Look().model.config, "{}");
  EXPECT_TRUE(Look().model.weights);
  contents_[1].second = "[]";
  EXPECT_THAT(Look().model.error, HasSubstr("config.json has not the SHA-256"));
}

}  // namespace
}  // namespace ravel::store
