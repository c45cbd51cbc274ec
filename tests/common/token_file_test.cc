#include "common/token_file.h"

#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/fault_point.h"
#include "common/file_writer.h"
#include "common/megatron_index.h"
#include "common/token_check.h"

namespace ravel {
namespace {

class TokenFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "token_file_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    prefix_ = folder_ + "/data";
  }
  void TearDown() override {
    ASSERT_TRUE(fault::Configure("").ok());
    std::filesystem::remove_all(folder_);
  }

  void WritePair(int64_t vocabulary, const std::vector<std::vector<int32_t>>& documents) {
    const auto writer = MegatronWriter::Create(prefix_, vocabulary);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const auto& document : documents) {
      ASSERT_TRUE((*writer)->AddDocument(document).ok());
    }
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  std::string ReadText(const std::string& path) { return *ReadWholeFile(path, 1 << 20); }
  void WriteText(const std::string& path, const std::string& text) {
    ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  }
  // The error of mapping the file; a check without mapping says the same.
  std::string OpenError(TokenFormat format = TokenFormat::kAuto) {
    const auto file = TokenFile::Open(prefix_, format);
    const auto checked = CheckTokenFile(prefix_, format, {.scanned_tokens = 1 << 20});
    EXPECT_EQ(file.ok(), checked.ok());
    EXPECT_EQ(file.status().message(), checked.status().message());
    return file.ok() ? "opened" : std::string(file.status().message());
  }

  std::string folder_;
  std::string prefix_;
};

TEST_F(TokenFileTest, WrittenDocumentsAreReadBackInBothWidths) {
  for (const int64_t vocabulary : {65535, 65536}) {
    WritePair(vocabulary, {{1, 2, 3}, {}, {static_cast<int32_t>(vocabulary - 1)}, {5, 6}});
    const auto file = TokenFile::Open(prefix_, TokenFormat::kAuto);
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ((*file)->tokens(), 6);
    const std::vector<int64_t> offsets((*file)->document_offsets().begin(),
                                       (*file)->document_offsets().end());
    EXPECT_EQ(offsets, (std::vector<int64_t>{0, 3, 3, 4, 6}));
    std::vector<int32_t> ids(4);
    (*file)->Read(2, ids);
    EXPECT_EQ(ids, (std::vector<int32_t>{3, static_cast<int32_t>(vocabulary - 1), 5, 6}));
    EXPECT_EQ((*file)->MaxToken(0, 6), vocabulary - 1);
    EXPECT_EQ((*file)->MaxToken(0, 3), 3);
    (*file)->Prefetch(1, 4);
    (*file)->Prefetch(6, 0);
  }
}

TEST_F(TokenFileTest, TheIndexHasMegatronsLayout) {
  WritePair(100, {{7, 8}, {9}});
  const std::string index = ReadText(prefix_ + ".idx");
  ASSERT_EQ(index.size(), 34u + 2 * 4 + 2 * 8 + 3 * 8);
  EXPECT_EQ(index.substr(0, 9), std::string("MMIDIDX\0\0", 9));
  EXPECT_EQ(index[9], 1);
  EXPECT_EQ(index[17], 8);
  EXPECT_EQ(ReadText(prefix_ + ".bin"), std::string("\7\0\10\0\11\0", 6));
}

TEST_F(TokenFileTest, FlatFilesNeedTheirFormat) {
  WriteText(prefix_, std::string("\1\0\2\0\3\0\4\0", 8));
  EXPECT_NE(OpenError().find("flat_u16"), std::string::npos);
  const auto narrow = TokenFile::Open(prefix_, TokenFormat::kFlatU16);
  ASSERT_TRUE(narrow.ok());
  EXPECT_EQ((*narrow)->tokens(), 4);
  EXPECT_TRUE((*narrow)->document_offsets().empty());
  const auto wide = TokenFile::Open(prefix_, TokenFormat::kFlatU32);
  ASSERT_TRUE(wide.ok());
  EXPECT_EQ((*wide)->tokens(), 2);
  EXPECT_EQ((*wide)->MaxToken(0, 2), 0x00040003);
  WriteText(prefix_, "odd");
  EXPECT_NE(OpenError(TokenFormat::kFlatU16).find("multiple of 2 bytes"), std::string::npos);
}

TEST_F(TokenFileTest, ANegativeIdCountsAsAHugeOne) {
  WriteText(prefix_, std::string("\xff\xff\xff\xff", 4));
  const auto file = TokenFile::Open(prefix_, TokenFormat::kFlatU32);
  ASSERT_TRUE(file.ok());
  EXPECT_EQ((*file)->MaxToken(0, 1), 0xFFFFFFFFLL);
}

TEST_F(TokenFileTest, MissingAndTruncatedFilesAreNamed) {
  EXPECT_NE(OpenError().find(prefix_ + ".idx: not found"), std::string::npos);
  WritePair(100, {{1, 2, 3, 4}, {5}});
  const std::string data = ReadText(prefix_ + ".bin");
  const std::string index = ReadText(prefix_ + ".idx");

  WriteText(prefix_ + ".bin", data.substr(0, data.size() - 2));
  EXPECT_NE(OpenError().find(".bin: expected 10 bytes"), std::string::npos) << OpenError();
  WriteText(prefix_ + ".bin", data);
  for (std::size_t length = 0; length < index.size(); ++length) {
    WriteText(prefix_ + ".idx", index.substr(0, length));
    EXPECT_NE(OpenError(), "opened") << length;
    EXPECT_NE(OpenError().find(".idx"), std::string::npos);
  }
  std::filesystem::remove(prefix_ + ".bin");
  WriteText(prefix_ + ".idx", index);
  EXPECT_NE(OpenError().find(".bin"), std::string::npos);
}

// Whoever opened one in earnest would wait for a writer, for ever.
TEST_F(TokenFileTest, APipeIsRefusedAtOnce) {
  ASSERT_EQ(mkfifo((prefix_ + ".idx").c_str(), 0600), 0);
  EXPECT_NE(OpenError().find("expected a regular file"), std::string::npos) << OpenError();
  ASSERT_EQ(mkfifo(prefix_.c_str(), 0600), 0);
  EXPECT_NE(OpenError(TokenFormat::kFlatU16).find("expected a regular file"), std::string::npos);
}

TEST_F(TokenFileTest, HostileIndexesAreRefusedOrHarmless) {
  WritePair(100, {{1, 2, 3, 4}, {5}, {6, 7}});
  const std::string index = ReadText(prefix_ + ".idx");
  std::mt19937 random(1);
  for (int round = 0; round < 4000; ++round) {
    std::string damaged = index;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) {
      const std::size_t at = random() % damaged.size();
      damaged[at] = random() % 2 == 0 ? static_cast<char>(0xFF) : static_cast<char>(random());
    }
    const auto read =
        ReadMegatronIndex({reinterpret_cast<const uint8_t*>(damaged.data()), damaged.size()});
    if (!read.ok()) {
      EXPECT_FALSE(read.status().message().empty());
      continue;
    }
    int64_t previous = 0;
    for (const int64_t offset : read->document_offsets) {
      ASSERT_GE(offset, previous);
      previous = offset;
    }
  }
}

TEST_F(TokenFileTest, IdsOutsideTheVocabularyAreNotWritten) {
  const auto writer = MegatronWriter::Create(prefix_, 10);
  ASSERT_TRUE(writer.ok());
  EXPECT_FALSE((*writer)->AddDocument(std::vector<int32_t>{10}).ok());
  EXPECT_FALSE((*writer)->AddDocument(std::vector<int32_t>{-1}).ok());
}

TEST_F(TokenFileTest, NothingAppearsBeforeFinish) {
  {
    const auto writer = MegatronWriter::Create(prefix_, 10);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE((*writer)->AddDocument(std::vector<int32_t>(100000, 1)).ok());
    EXPECT_FALSE(std::filesystem::exists(prefix_ + ".bin"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));

  const auto writer = MegatronWriter::Create(prefix_, 10);
  ASSERT_TRUE((*writer)->AddDocument(std::vector<int32_t>{1}).ok());
  ASSERT_TRUE(fault::Configure("file_writer.write@2:error=disk full").ok());
  const absl::Status status = (*writer)->Finish();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_FALSE(std::filesystem::exists(prefix_ + ".bin"));
  EXPECT_FALSE(std::filesystem::exists(prefix_ + ".idx"));
}

}  // namespace
}  // namespace ravel
