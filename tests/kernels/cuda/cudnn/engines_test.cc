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

#include "common/model/attention_workspace.h"
#include "tests/testing/required.h"

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

// Those of engines_probe.cc.
struct Shape {
  const char* model;
  plan::AttentionPass pass;
};
const Shape kShapes[] = {
    {"8B",
     {.sequences = 1, .sequence_tokens = 8192, .query_heads = 32, .kv_heads = 8, .head_dim = 128}},
    {"fp16",
     {.sequences = 1, .sequence_tokens = 8192, .query_heads = 32, .kv_heads = 8, .head_dim = 128}},
    {"3B",
     {.sequences = 2, .sequence_tokens = 4096, .query_heads = 24, .kv_heads = 8, .head_dim = 128}},
    {"1.5B",
     {.sequences = 4, .sequence_tokens = 2048, .query_heads = 12, .kv_heads = 2, .head_dim = 128}},
    {"124M",
     {.sequences = 64, .sequence_tokens = 1024, .query_heads = 12, .kv_heads = 12, .head_dim = 64}},
    {"odd",
     {.sequences = 3, .sequence_tokens = 200, .query_heads = 4, .kv_heads = 2, .head_dim = 72}}};

class CudnnEngines : public ::testing::TestWithParam<const char*> {};

TEST_P(CudnnEngines, TakeTheShapesOfOurModelsWithinTheDesignsWorkspace) {
  const Answer answer = Probe(GetParam());
  if (!answer.missing.empty()) {
    ravel::testing::SkipWithout("cuda", answer.missing);
    return;
  }
  ASSERT_TRUE(answer.done) << answer.text;
  EXPECT_EQ(answer.lines.size(), std::string(GetParam()) == "90" ? 15u : 5u) << answer.text;
  for (const auto& [name, line] : answer.lines) {
    SCOPED_TRACE(name);
    EXPECT_EQ(line.failure, "");
    EXPECT_GE(line.engine, 0);
  }
  // What plans give to attention is what the engines ask for, or more, and not much more.
  for (const Shape& shape : kShapes) {
    for (const char* pass : {"forward", "backward", "deterministic"}) {
      const auto line = answer.lines.find(std::string(shape.model) + " " + pass);
      if (line == answer.lines.end()) {
        continue;
      }
      plan::AttentionPass whole = shape.pass;
      whole.exact = line->first.ends_with("deterministic");
      const auto planned = static_cast<uint64_t>(plan::AttentionEngineBytes(whole));
      EXPECT_GE(planned, line->second.workspace_bytes) << line->first;
      if (!line->first.ends_with("forward") && std::string(shape.model) != "odd") {
        EXPECT_LE(planned, 2 * line->second.workspace_bytes) << line->first;
      }
    }
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
