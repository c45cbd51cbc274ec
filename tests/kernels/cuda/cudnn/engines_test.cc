// What the installed cuDNN does with our graphs, on a driver that computes nothing: an engine is
// found for the models' shapes in our layout, compiles, finalises and tells its workspace. What the
// kernels compute needs a device (tests/gpu).

#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

namespace ravel::kernels::cuda::testing {
namespace {

struct Line {
  int64_t engine = -1;
  int unified = -1;
  uint64_t workspace_bytes = 0;
  std::string failure;
};

struct Answer {
  std::string missing;
  bool done = false;
  std::map<std::string, Line> lines;  // by model and pass
  std::string text;
};

std::string OutputOf(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string text;
  std::array<char, 4096> buffer;
  while (fgets(buffer.data(), buffer.size(), pipe.get()) != nullptr) {
    text += buffer.data();
  }
  return text;
}

Answer Probe(const std::string& compute) {
  Answer answer;
  answer.text =
      OutputOf(std::string("LD_LIBRARY_PATH=") + RAVEL_FAKE_DRIVER_FOLDER + ":" +
               RAVEL_TOOLKIT_LIBRARIES + " " + RAVEL_PROBE + " " + compute + " 2>/dev/null");
  std::istringstream lines(answer.text);
  for (std::string text; std::getline(lines, text);) {
    std::istringstream words(text);
    std::string model, pass, word;
    words >> model >> pass;
    if (model == "missing") {
      answer.missing = text;
    } else if (model == "done") {
      answer.done = true;
    } else if (model != "version") {
      Line& line = answer.lines[model + " " + pass];
      words >> word >> line.engine >> word >> line.unified >> word >> line.workspace_bytes;
      std::getline(words, line.failure);
    }
  }
  return answer;
}

class CudnnEngines : public ::testing::TestWithParam<const char*> {};

TEST_P(CudnnEngines, TakeTheShapesOfOurModelsWithinTheDesignsWorkspace) {
  const Answer answer = Probe(GetParam());
  if (!answer.missing.empty()) {
    GTEST_SKIP() << answer.missing;
  }
  ASSERT_TRUE(answer.done) << answer.text;
  EXPECT_EQ(answer.lines.size(), std::string(GetParam()) == "90" ? 12u : 5u) << answer.text;
  for (const auto& [name, line] : answer.lines) {
    SCOPED_TRACE(name);
    EXPECT_EQ(line.failure, "");
    EXPECT_GE(line.engine, 0);
  }
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  constexpr uint64_t kTokens = 8192;
  constexpr uint64_t kRows = 32 * kTokens * 4;
  EXPECT_LE(answer.lines.at("8B forward").workspace_bytes, kMiB);
  // The accumulator of dq; gradients of keys and values per query head.
  const uint64_t fast = answer.lines.at("8B backward").workspace_bytes;
  EXPECT_GE(fast, kRows * 128 + kRows);
  EXPECT_LE(fast, 2 * (kRows * 128 + kRows) + kMiB);
  // Gradients of all scores in bf16.
  const uint64_t exact = answer.lines.at("8B deterministic").workspace_bytes;
  EXPECT_GE(exact, 2 * 32 * kTokens * kTokens);
  EXPECT_LE(exact, 2 * 32 * kTokens * kTokens + fast);
}

INSTANTIATE_TEST_SUITE_P(Devices, CudnnEngines, ::testing::Values("90", "100"));

}  // namespace
}  // namespace ravel::kernels::cuda::testing
