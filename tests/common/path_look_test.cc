#include "common/path_look.h"

#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/file_writer.h"

namespace ravel {
namespace {

class PathLookTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "path_look_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  void Write(const std::string& name, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(Path(name), text).ok());
  }
  PathFacts LookAtModel() const {
    return LookAtPaths({.model_directory = {"spec.model.from", folder_}});
  }

  std::string folder_;
};

TEST_F(PathLookTest, FactsComeInTheOrderOfTheQueryAndFaultsByFile) {
  Write("good", std::string("\1\0\5\0\3\0", 6));
  Write("odd", "odd");
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  std::vector<std::string> fields;
  const PathFacts facts =
      LookAtPaths({.token_files = {{"a", Path("odd")}, {"b", Path("good")}, {"c", Path("pipe")}},
                   .format = TokenFormat::kFlatU16,
                   .tokenizer = {"t", Path("good")}},
                  {.at = [&fields](const NamedPath& path) { fields.push_back(path.field); }});
  EXPECT_EQ(fields, (std::vector<std::string>{"t", "a", "b", "c"}));
  ASSERT_EQ(facts.token_files.size(), 3u);
  EXPECT_NE(facts.token_files[0].error.find("odd: expected a multiple of 2 bytes"),
            std::string::npos);
  EXPECT_EQ(facts.token_files[1].error, "");
  EXPECT_EQ(facts.token_files[1].tokens, 3);
  EXPECT_EQ(facts.token_files[1].largest_id, 5);
  EXPECT_NE(facts.token_files[2].error.find("expected a regular file"), std::string::npos);
  EXPECT_TRUE(facts.tokenizer);
  EXPECT_FALSE(LookAtPaths({.tokenizer = {"t", Path("absent")}}).tokenizer);
}

// A thousand files would take minutes to read as deep as one.
TEST_F(PathLookTest, ManyFilesShareWhatIsCheckedOfTheirIds) {
  constexpr std::size_t kIds = 1 << 17;
  std::string ids(2 * kIds, '\1');
  ids.back() = '\xff';  // the last id is larger than all before
  Write("ids", ids);
  PathQuery query{.format = TokenFormat::kFlatU16};
  query.token_files.assign(4, {"a", Path("ids")});
  EXPECT_EQ(LookAtPaths(query).token_files[3].largest_id, 0xFF01);
  query.token_files.assign(1000, {"a", Path("ids")});
  const PathFacts facts = LookAtPaths(query);
  EXPECT_EQ(facts.token_files[999].largest_id, 0x0101);
  EXPECT_EQ(facts.token_files[999].tokens, int64_t{kIds});
}

TEST_F(PathLookTest, AModelDirectoryIsReadWithinItsLimit) {
  EXPECT_NE(LookAtModel().model.error.find("config.json: No such file"), std::string::npos);
  ASSERT_EQ(mkfifo(Path("config.json").c_str(), 0600), 0);
  EXPECT_EQ(LookAtModel().model.error, "config.json, which is no regular file");
  std::filesystem::remove(Path("config.json"));
  Write("config.json", std::string(kMaxConfigBytes + 1, ' '));
  EXPECT_NE(LookAtModel().model.error.find("expected at most 1.0 MiB"), std::string::npos);
  Write("config.json", "{}");
  EXPECT_EQ(LookAtModel().model.error, "");
  EXPECT_EQ(LookAtModel().model.config, "{}");
  EXPECT_FALSE(LookAtModel().model.weights);
  Write("model.safetensors.index.json", "{}");
  EXPECT_TRUE(LookAtModel().model.weights);
}

}  // namespace
}  // namespace ravel
