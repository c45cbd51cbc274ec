#include "common/file_writer.h"

#include <filesystem>

#include <gtest/gtest.h>

#include "common/fault_point.h"

namespace ravel {
namespace {

class FileWriterTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "file_writer_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override {
    ASSERT_TRUE(fault::Configure("").ok());
    std::filesystem::remove_all(folder_);
  }
  int Files() const {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) {
      ++count;
    }
    return count;
  }
  std::string folder_;
};

TEST_F(FileWriterTest, TheFileAppearsWholeOrNotAtAll) {
  const std::string path = folder_ + "/a";
  ASSERT_TRUE(WriteFileAtomically(path, "old").ok());
  {
    const auto writer = FileWriter::Create(path);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->Write(std::string(3 << 20, 'x')).ok());
    EXPECT_EQ(*ReadWholeFile(path, 100), "old");
  }
  EXPECT_EQ(*ReadWholeFile(path, 100), "old");
  EXPECT_EQ(Files(), 1);
}

TEST_F(FileWriterTest, LeftoversGoAndFilesThatAreWrittenStay) {
  const std::string path = folder_ + "/a";
  for (const char* name : {"/a.tmp-1-1", "/a.tmp-1-23", "/b.tmp-1-1", "/a.tmp-x-1", "/a.tmp-1"}) {
    ASSERT_TRUE(WriteFileAtomically(folder_ + name, "old").ok());
  }
  const auto writer = FileWriter::Create(path);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ(Files(), 6);
  EXPECT_EQ(RemoveUnfinished(path), 2);
  EXPECT_EQ(Files(), 4) << "another file's, two that are no writer's, and the one that is written";
  ASSERT_TRUE((*writer)->Write("new").ok());
  ASSERT_TRUE((*writer)->Publish().ok());
  EXPECT_EQ(*ReadWholeFile(path, 100), "new");
  EXPECT_EQ(RemoveUnfinished(path), 0);
  EXPECT_EQ(RemoveUnfinished(folder_ + "/absent/a"), 0);
}

TEST_F(FileWriterTest, ALeftoverOfTheSameProcessNumberIsInNobodysWay) {
  const std::string path = folder_ + "/a";
  std::string temporary;
  {
    const auto writer = FileWriter::Create(path);
    ASSERT_TRUE(writer.ok());
    temporary = std::filesystem::directory_iterator(folder_)->path().string();
  }
  const std::size_t dash = temporary.rfind('-');
  const int number = std::stoi(temporary.substr(dash + 1));
  ASSERT_TRUE(
      WriteFileAtomically(temporary.substr(0, dash + 1) + std::to_string(number + 2), "old").ok());
  EXPECT_TRUE(WriteFileAtomically(path, "new").ok());
}

TEST_F(FileWriterTest, AFullDiskNamesTheFileAndLeavesNothing) {
  ASSERT_TRUE(fault::Configure("file_writer.write:error=disk full").ok());
  const absl::Status status = WriteFileAtomically(folder_ + "/a", "text");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find(folder_ + "/a"), absl::string_view::npos) << status;
  EXPECT_EQ(Files(), 0);
}

TEST_F(FileWriterTest, AFailedRenameLeavesTheOldFile) {
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/a", "old").ok());
  ASSERT_TRUE(fault::Configure("file_writer.publish:error").ok());
  EXPECT_FALSE(WriteFileAtomically(folder_ + "/a", "new").ok());
  EXPECT_EQ(*ReadWholeFile(folder_ + "/a", 100), "old");
  EXPECT_EQ(Files(), 1);
}

TEST_F(FileWriterTest, ReadingNamesWhatIsWrong) {
  EXPECT_EQ(ReadWholeFile(folder_ + "/none", 10).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/a", "0123456789x").ok());
  EXPECT_NE(ReadWholeFile(folder_ + "/a", 10).status().message().find("at most 10 B"),
            absl::string_view::npos);
  EXPECT_FALSE(FileWriter::Create(folder_ + "/no/such/folder").ok());
}

}  // namespace
}  // namespace ravel
