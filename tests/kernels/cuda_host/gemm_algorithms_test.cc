#include "kernels/cuda_host/gemm_algorithms.h"

#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/dtype.h"

namespace ravel::kernels::cuda {
namespace {

using ::testing::HasSubstr;

GemmChoice Choice(uint64_t word, double microseconds) {
  GemmChoice choice;
  choice.algorithm.words[0] = word;
  choice.algorithm.words[7] = ~uint64_t{0};
  choice.algorithm.workspace_bytes = 1024;
  choice.microseconds = microseconds;
  return choice;
}

TEST(GemmKeyTest, EveryFieldThatMattersIsInTheKey) {
  RavelCudaGemm gemm = {.m = 1,
                        .n = 2,
                        .k = 3,
                        .a_stride = 4,
                        .b_stride = 5,
                        .c_stride = 6,
                        .transpose_a = 0,
                        .transpose_b = 1,
                        .input_type = 3,
                        .output_type = 1,
                        .accumulate = 1,
                        .a_align = 16,
                        .b_align = 32,
                        .c_align = 64,
                        .multiprocessors = 100,
                        .b_type = 0,
                        .fast_accumulation = 0,
                        .a_form = 0,
                        .b_form = 0,
                        .reserved = 0};
  EXPECT_EQ(GemmKey(gemm), "1x2x3-nt-bf16-f32-b1-s4,5,6-a16,32,64-m100");
  gemm.accumulate = 0;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-b0-"));
  gemm.input_type = 15;
  gemm.b_type = 14;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-e5m2*e4m3-f32-"));
  gemm.fast_accumulation = 1;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-e5m2*e4m3+fast-f32-"));
  gemm.fast_accumulation = 0;
  gemm.a_form = 4;
  gemm.b_form = 5;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-e5m2*e4m3+scales4,5-f32-"));
  gemm.input_type = gemm.b_type = static_cast<int32_t>(DType::kU8);
  gemm.a_form = gemm.b_form = 1;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-e2m1*e2m1+scales1,1-f32-"));
}

// Four ranks with one part each, and one rank with all four, whose matrices are wider: one choice.
TEST(GemmOfPartTest, HasNothingOfTheNumberOfRanks) {
  const auto description = [](int64_t columns, int64_t stride) {
    RavelCudaGemm gemm = {};
    gemm.m = 64;
    gemm.n = columns;
    gemm.k = 128;
    gemm.a_stride = stride;
    gemm.b_stride = 128;
    gemm.c_stride = 3 * columns;
    gemm.transpose_b = 1;
    gemm.input_type = static_cast<int32_t>(DType::kBF16);
    gemm.output_type = gemm.input_type;
    gemm.a_align = static_cast<int32_t>(stride);
    gemm.b_align = 256;
    gemm.c_align = columns > 32 ? 64 : 16;
    return gemm;
  };
  const GemmPart part = {.rows = 64, .columns = 32};
  const std::string one = GemmKey(GemmOfPart(description(32, 128), part));
  EXPECT_EQ(one, "64x32x128-nt-bf16-bf16-b0-s128,128,32-a16,16,16-m0");
  EXPECT_EQ(GemmKey(GemmOfPart(description(128, 256), part)), one);
  EXPECT_EQ(GemmKey(GemmOfPart(description(24, 128), part)), one) << "a short last part";
  EXPECT_NE(GemmKey(GemmOfPart(description(128, 256), {.rows = 64, .columns = 64})), one);
  EXPECT_EQ(GemmKey(GemmOfPart(description(32, 128), {})), GemmKey(description(32, 128)));
}

TEST(GemmAlgorithmsTest, MeasuredChoicesReplaceProposalsOnly) {
  GemmAlgorithms table("device 1");
  table.Set("p", Choice(1, 0.0));
  table.Set("p", Choice(2, 0.0));
  EXPECT_EQ(table.Find("p")->algorithm.words[0], 1u);
  table.Set("p", Choice(3, 12.5));
  table.Set("p", Choice(4, 0.0));
  EXPECT_EQ(table.Find("p")->algorithm.words[0], 3u);
  EXPECT_FALSE(table.Find("q").has_value());
}

TEST(GemmAlgorithmsTest, FileGivesBackWhatWasWritten) {
  const std::string path = ::testing::TempDir() + "/ravel_gemm_algorithms";
  GemmAlgorithms table("device 1");
  table.Set("b", Choice(0xABCDEF, 7.25));
  table.Set("a", Choice(9, 0.5));
  ASSERT_TRUE(table.Save(path).ok());
  GemmAlgorithms other("device 1");
  ASSERT_TRUE(other.Load(path).ok());
  EXPECT_EQ(other.ToText(), table.ToText());
  EXPECT_EQ(other.Find("b")->algorithm.words[7], ~uint64_t{0});
  EXPECT_EQ(other.Find("b")->microseconds, 7.25);
  std::filesystem::remove(path);
}

TEST(GemmAlgorithmsTest, AnotherDeviceOrLibraryIsRefusedAndTakesNothing) {
  GemmAlgorithms table("device 1");
  table.Set("a", Choice(1, 1.0));
  GemmAlgorithms other("device 2");
  const absl::Status status = other.AddText(table.ToText(), "file");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("needs 'ravel-gemm-algorithms-2 device 2'"));
  EXPECT_EQ(other.size(), 0u);
}

TEST(GemmAlgorithmsTest, OneBadLineTakesNothingAndIsNamed) {
  GemmAlgorithms table("device 1");
  table.Set("a", Choice(1, 1.0));
  const std::string text = table.ToText();
  const size_t sum = text.rfind("sum ");
  const std::string lines = text.substr(0, sum);
  std::string flipped = text;
  flipped[lines.size() - 2] ^= 1;
  const std::pair<std::string, std::string> cases[] = {
      {lines + "b 1 2 3\n" + text.substr(sum), "some/file:3: expected a gemm"},
      {lines + lines.substr(lines.find('\n') + 1, 30) + "\n" + text.substr(sum),
       "some/file:3: expected a gemm"},
      {flipped, "some/file:3: expected the sum of all lines before"},
      {lines, "some/file:3: expected a gemm"},
      {text + "more\n", "some/file:3: expected the sum of all lines before, and no more"},
      {text.substr(0, text.size() - 3), "some/file:3: expected the sum"},
      {text.substr(0, text.find('\n')), "some/file:2: expected the sum"}};
  for (const auto& [bad, expected] : cases) {
    GemmAlgorithms other("device 1");
    const absl::Status status = other.AddText(bad, "some/file");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr(expected));
    EXPECT_EQ(other.size(), 0u);
  }
}

TEST(GemmAlgorithmsTest, AGemmWithoutAnAlgorithmStaysOne) {
  GemmAlgorithms table("device 1");
  table.Put("a", {.algorithm = {}, .microseconds = 0.0, .none = true});
  table.Put("b", Choice(2, 3.0));
  GemmAlgorithms other("device 1");
  ASSERT_TRUE(other.AddText(table.ToText(), "text").ok());
  EXPECT_TRUE(other.Find("a")->none);
  EXPECT_FALSE(other.Find("b")->none);
  EXPECT_EQ(other.ToText(), table.ToText());
}

TEST(GemmAlgorithmsTest, FilesOfOneFolderAreNamedForTheirIdentity) {
  EXPECT_EQ(GemmAlgorithms("device 1").FileName(), GemmAlgorithms("device 1").FileName());
  EXPECT_NE(GemmAlgorithms("device 1").FileName(), GemmAlgorithms("device 2").FileName());
}

// Processes that save at once: a reader sees one of the files, whole, at any moment.
TEST(GemmAlgorithmsTest, ManyMaySaveAtOnce) {
  const std::string folder = ::testing::TempDir() + "/ravel_gemm_saved";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string path = folder + "/table";
  constexpr int kWriters = 4;
  constexpr int kSaves = 25;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([&path, writer] {
      GemmAlgorithms table("device 1");
      for (int i = 0; i < 100 * (writer + 1); ++i) {
        table.Set(std::to_string(i), Choice(static_cast<uint64_t>(writer), 1.0));
      }
      for (int save = 0; save < kSaves; ++save) {
        const absl::Status saved = table.Save(path);
        EXPECT_TRUE(saved.ok()) << saved;
        GemmAlgorithms read("device 1");
        const absl::Status loaded = read.Load(path);
        EXPECT_TRUE(loaded.ok()) << loaded;
        EXPECT_EQ(read.size() % 100, 0u);
      }
    });
  }
  for (std::thread& writer : writers) {
    writer.join();
  }
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++files;
  }
  EXPECT_EQ(files, 1u);
  std::filesystem::remove_all(folder);
}

TEST(GemmAlgorithmsTest, MissingFileIsNotFound) {
  GemmAlgorithms table("device 1");
  EXPECT_EQ(table.Load("/nonexistent/table").code(), absl::StatusCode::kNotFound);
  const absl::Status saved = table.Save("/nonexistent/table");
  EXPECT_THAT(std::string(saved.message()), HasSubstr("cannot write: /nonexistent/table.new-"));
  EXPECT_EQ(table.Load("/").code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ravel::kernels::cuda
