#include "kernels/cuda/gemm_algorithms.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
                        .reserved = 0};
  EXPECT_EQ(GemmKey(gemm), "1x2x3-nt-bf16-f32-b1-s4,5,6-a16,32,64-m100");
  gemm.accumulate = 0;
  EXPECT_THAT(GemmKey(gemm), HasSubstr("-b0-"));
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
  EXPECT_THAT(std::string(status.message()), HasSubstr("needs 'ravel-gemm-algorithms-1 device 2'"));
  EXPECT_EQ(other.size(), 0u);
}

TEST(GemmAlgorithmsTest, OneBadLineTakesNothingAndIsNamed) {
  GemmAlgorithms table("device 1");
  table.Set("a", Choice(1, 1.0));
  std::string text = table.ToText();
  for (const std::string& bad :
       {std::string("b 1 2 3\n"), text.substr(text.find('\n') + 1, 30) + "\n"}) {
    GemmAlgorithms other("device 1");
    const absl::Status status = other.AddText(text + bad, "some/file");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("some/file:3: expected"));
    EXPECT_EQ(other.size(), 0u);
  }
}

TEST(GemmAlgorithmsTest, MissingFileIsNotFound) {
  GemmAlgorithms table("device 1");
  EXPECT_EQ(table.Load("/nonexistent/table").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table.Save("/nonexistent/table").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace ravel::kernels::cuda
