#include "coordinator/ctl/data_prepare.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include "common/fault_point.h"
#include "common/token_file.h"
#include "coordinator/ctl/data_batch.h"
#include "coordinator/ctl/tokenizer.h"

namespace ravel::ctl {
namespace {

class DataPrepareTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "prepare_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    request_.output = folder_ + "/out";
    request_.inputs = {folder_ + "/in.txt"};
  }
  void TearDown() override {
    ASSERT_TRUE(fault::Configure("").ok());
    std::filesystem::remove_all(folder_);
  }
  void WriteInput(const std::string& text) { std::ofstream(request_.inputs[0]) << text; }
  absl::StatusOr<PrepareResult> Prepare() {
    return PrepareData(request_, [](const char*, int64_t, int64_t) {});
  }
  std::vector<int32_t> Tokens(const std::string& prefix) {
    const auto file = TokenFile::Open(prefix, TokenFormat::kMegatron);
    EXPECT_TRUE(file.ok()) << file.status();
    std::vector<int32_t> ids(static_cast<std::size_t>((*file)->tokens()));
    (*file)->Read(0, ids);
    return ids;
  }
  int Files() const {
    int count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder_)) {
      ++count;
    }
    return count;
  }

  std::string folder_;
  PrepareRequest request_;
};

TEST_F(DataPrepareTest, BytesEndWithTheEndOfTheDocument) {
  WriteInput("ab\n");
  const auto result = Prepare();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->vocabulary, 257);
  EXPECT_EQ(Tokens(request_.output), (std::vector<int32_t>{'a', 'b', '\n', 256}));
  EXPECT_TRUE(std::filesystem::exists(request_.output + ".tokenizer.json"));
}

TEST_F(DataPrepareTest, LeftoversOfAKilledRunGoAndWhatAnotherWritesStays) {
  WriteInput("ab\n");
  for (const char* end : {".bin.tmp-1-1", ".validation.idx.tmp-1-2", ".tokenizer.json.tmp-9-3"}) {
    std::ofstream(request_.output + end) << "half";
  }
  const auto other = MegatronWriter::Create(request_.output, 257);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE(Prepare().ok());
  EXPECT_EQ(Files(), 5) << "the text, three results, and the file of the other writer";
}

TEST_F(DataPrepareTest, ARunThatIsInterruptedLeavesNothing) {
  WriteInput("ab\n");
  request_.cancelled = [] { return true; };
  EXPECT_TRUE(absl::IsCancelled(Prepare().status()));
  EXPECT_EQ(Files(), 1);
}

TEST_F(DataPrepareTest, DocumentsAreCutAtTheSeparator) {
  WriteInput("one\n\ntwo\n\n\n\n");
  request_.document_separator = "\n\n";
  const auto result = Prepare();
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->documents, 2);
  EXPECT_EQ(Tokens(request_.output),
            (std::vector<int32_t>{'o', 'n', 'e', 256, 't', 'w', 'o', 256}));
}

TEST_F(DataPrepareTest, TheEndOfTheTextIsForValidation) {
  WriteInput("aaaa\nbbbb\ncccc\ndddd\n");
  request_.validation_fraction = 0.4;
  const auto result = Prepare();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tokens, 16);
  EXPECT_EQ(Tokens(request_.output + ".validation"),
            (std::vector<int32_t>{'d', 'd', 'd', 'd', '\n', 256}));
}

// They would be taken for the validation text of this run, and may be part of what it trains on.
TEST_F(DataPrepareTest, OldValidationFilesAreNoneOfARunWithoutThem) {
  WriteInput("one\ntwo\nthree\nfour\n");
  request_.validation_fraction = 0.5;
  ASSERT_TRUE(Prepare().ok());
  const std::vector<int32_t> before = Tokens(request_.output);
  request_.validation_fraction = 0;
  const absl::Status refused = Prepare().status();
  EXPECT_TRUE(absl::IsAlreadyExists(refused)) << refused;
  EXPECT_NE(refused.message().find(request_.output + ".validation.bin"), std::string::npos);
  EXPECT_EQ(Tokens(request_.output), before) << "nothing was written";
  std::filesystem::remove(request_.output + ".validation.bin");
  EXPECT_TRUE(absl::IsAlreadyExists(Prepare().status())) << "its index is still there";
  std::filesystem::remove(request_.output + ".validation.idx");
  EXPECT_TRUE(Prepare().ok());
}

TEST_F(DataPrepareTest, LongTextsInBlocksGiveTheIdsOfTheWhole) {
  std::string text;
  for (int line = 0; line < 40000; ++line) {
    text += "the word of line " + std::to_string(line * 7919 % 1000) + "\nand more, it's\n\n  ok ";
  }
  WriteInput(text);
  request_.tokenizer = "train-bpe:400";
  const auto result = Prepare();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->vocabulary, 400);
  const auto tokenizer = Tokenizer::FromFile(request_.output + ".tokenizer.json");
  ASSERT_TRUE(tokenizer.ok());
  std::vector<int32_t> expected;
  ASSERT_TRUE((*tokenizer)->Encode(text, expected).ok());
  expected.push_back((*tokenizer)->end_of_document());
  EXPECT_EQ(Tokens(request_.output), expected);
}

TEST_F(DataPrepareTest, MistakesAreNamed) {
  EXPECT_NE(Prepare().status().message().find("in.txt"), absl::string_view::npos);
  WriteInput("");
  EXPECT_NE(Prepare().status().message().find("only empty files"), absl::string_view::npos);
  WriteInput("text");
  const auto error = [&] { return std::string(Prepare().status().message()); };
  request_.tokenizer = "words";
  EXPECT_EQ(error(), "--tokenizer: expected bytes, hf:FILE or train-bpe:VOCAB, got 'words'");
  request_.tokenizer = "train-bpe:10";
  EXPECT_NE(error().find("from 257 to"), std::string::npos);
  request_.tokenizer = "hf:" + folder_ + "/in.txt";
  EXPECT_NE(error().find("in.txt: line 1, column"), std::string::npos) << error();
  request_.tokenizer = "bytes";
  request_.end_of_document = "<|stop|>";
  EXPECT_NE(error().find("--end-of-document"), std::string::npos);
  request_.end_of_document = "";
  request_.validation_fraction = 0.9;
  EXPECT_NE(error().find("--validation-fraction"), std::string::npos);
  request_.validation_fraction = 0.1;
  EXPECT_NE(error().find("leaves no text for validation"), std::string::npos);
  request_.validation_fraction = 0;
  request_.output = folder_ + "/no/such/folder/out";
  EXPECT_NE(error().find("/no/such/folder/out.bin"), std::string::npos);
  EXPECT_EQ(Files(), 1);
}

TEST_F(DataPrepareTest, BytesThatAreNotUtf8AreKeptOrRefused) {
  WriteInput(
      "ab\xff"
      "cd");
  const auto result = Prepare();
  ASSERT_TRUE(result.ok());
  ASSERT_EQ(result->warnings.size(), 1u);
  EXPECT_NE(result->warnings[0].find("1 byte is not UTF-8 (the first at 2)"), std::string::npos);
  EXPECT_EQ(Tokens(request_.output)[2], 0xFF);
  request_.require_utf8 = true;
  EXPECT_NE(Prepare().status().message().find("in.txt: expected UTF-8, but byte 2 is not"),
            absl::string_view::npos);
}

TEST_F(DataPrepareTest, AFullDiskLeavesNothingHalfWritten) {
  WriteInput("some text\nand more\nlines\nof it\n");
  request_.validation_fraction = 0.3;
  for (int moment = 1; moment <= 5; ++moment) {
    ASSERT_TRUE(
        fault::Configure("file_writer.write@" + std::to_string(moment) + ":error=disk full").ok());
    const absl::Status status = Prepare().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << moment;
    EXPECT_NE(status.message().find(request_.output), absl::string_view::npos) << status;
    EXPECT_FALSE(std::filesystem::exists(request_.output + ".idx"));
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
    }
  }
}

TEST_F(DataPrepareTest, ABatchNamesEverySampleOnceAPass) {
  std::string text;
  for (int i = 0; i < 64; ++i) {
    text += static_cast<char>('0' + i);
  }
  WriteInput(text);
  ASSERT_TRUE(Prepare().ok());
  plan::JobSpec spec;
  spec.data.train = {{request_.output, 1.0}};
  spec.data.sequence_length = 4;
  spec.global_batch = 4;
  spec.virtual_ranks = 2;
  spec.steps = 4;
  std::vector<int> seen(16);
  for (int64_t step = 0; step < 4; ++step) {
    const auto batch = BatchDocument(spec, step);
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(batch->Find("step")->AsInt(), step);
    ASSERT_EQ(batch->Find("lanes")->AsArray().size(), 2u);
    for (const json::Value& lane : batch->Find("lanes")->AsArray()) {
      ASSERT_EQ(lane.Find("samples")->AsArray().size(), 2u);
      for (const json::Value& sample : lane.Find("samples")->AsArray()) {
        const int64_t index = sample.Find("index")->AsInt();
        ++seen[static_cast<std::size_t>(index)];
        ASSERT_EQ(sample.Find("tokens")->AsArray().size(), 5u);
        EXPECT_EQ(sample.Find("tokens")->AsArray()[0].AsInt(), '0' + index * 4);
      }
    }
  }
  EXPECT_EQ(seen, std::vector<int>(16, 1));
  EXPECT_FALSE(BatchDocument(spec, 4).ok());
  EXPECT_FALSE(BatchDocument(spec, -1).ok());
}

}  // namespace
}  // namespace ravel::ctl
