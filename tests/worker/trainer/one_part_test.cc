// Jobs without a tensor axis, whose sums are in one part, have the bits that they had before sums
// were ordered in parts: golden/one_part.txt, with the commands that made it.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "tests/testing/strategy_cases.h"
#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

constexpr int64_t kOnePartSteps = 20;

// 64-bit FNV-1a of the bits of fp32 numbers.
class BitDigest {
 public:
  void Add(float value) { digest_ = (digest_ ^ std::bit_cast<uint32_t>(value)) * 0x100000001B3; }
  void Add(const std::map<std::string, std::vector<float>>& tensors) {
    for (const auto& [name, values] : tensors) {
      for (const float value : values) {
        Add(value);
      }
    }
  }
  std::string text() const {
    char buffer[20];
    std::snprintf(buffer, sizeof(buffer), "%016llx", static_cast<unsigned long long>(digest_));
    return buffer;
  }

 private:
  uint64_t digest_ = 0xCBF29CE484222325;
};

// "losses ... weights ... exp_avg ... exp_avg_sq ...".
std::string DigestsOf(const Recording& run) {
  BitDigest losses, weights, exp_avg, exp_avg_sq;
  for (const StepResult& step : run.steps) {
    losses.Add(step.loss);
  }
  for (const float loss : run.validation) {
    losses.Add(loss);
  }
  weights.Add(run.weights);
  exp_avg.Add(run.exp_avg);
  exp_avg_sq.Add(run.exp_avg_sq);
  return absl::StrCat("losses ",
                      losses.text(),
                      " weights ",
                      weights.text(),
                      " exp_avg ",
                      exp_avg.text(),
                      " exp_avg_sq ",
                      exp_avg_sq.text());
}

// The key is "MODEL micro-batches N".
std::map<std::string, std::string> GoldenDigests() {
  std::map<std::string, std::string> golden;
  std::ifstream file(RAVEL_ONE_PART_GOLDEN);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (!line.starts_with('#') && colon != std::string::npos) {
      golden[line.substr(0, colon)] = line.substr(colon + 2);
    }
  }
  return golden;
}

class OnePart : public ::testing::TestWithParam<std::tuple<StrategyCase, const char*>> {};

TEST_P(OnePart, HasTheBitsOfBefore) {
  const auto& [tested, model] = GetParam();
  RecordArgs args = ArgsOf(tested, JobOf(tested, model, OwnFolder("ravel_one_part")));
  args.last_step = kOnePartSteps;
  args.evaluate_every_step = true;
  const Recording run = Record(args);
  ASSERT_EQ(run.steps.size(), static_cast<size_t>(kOnePartSteps));
  const std::string key = absl::StrCat(model, " micro-batches ", tested.micro_batches);
  const std::string digests = DigestsOf(run);
  if (std::getenv("RAVEL_DIGESTS") != nullptr) {  // rows of the golden file
    std::printf("%s: %s\n", key.c_str(), digests.c_str());
    return;
  }
  EXPECT_EQ(GoldenDigests()[key], digests) << key;
}

std::vector<StrategyCase> OnePartCases() {
  return {{.strategy = "ZeRO0", .width = 1, .micro_batches = 1},
          {.strategy = "ZeRO0", .width = 2, .micro_batches = 3},
          {.strategy = "ZeRO1", .width = 2, .micro_batches = 1},
          {.strategy = "ZeRO1", .width = 2, .micro_batches = 3},
          {.strategy = "ZeRO2", .width = 2, .micro_batches = 1},
          {.strategy = "ZeRO2", .width = 1, .micro_batches = 3},
          {.strategy = "ZeRO3", .width = 2, .micro_batches = 1},
          {.strategy = "ZeRO3", .width = 1, .micro_batches = 3},
          {.strategy = "ZeRO3",
           .width = 2,
           .micro_batches = 3,
           .recompute = plan::RecomputePolicy::kBlock}};
}

INSTANTIATE_TEST_SUITE_P(
    Jobs,
    OnePart,
    ::testing::Combine(::testing::ValuesIn(OnePartCases()),
                       ::testing::Values("odd_tied", "bundled_rope_scaling", "gpt2_untied")),
    [](const auto& tested) {
      return absl::StrCat(std::get<0>(tested.param).name(), "_", std::get<1>(tested.param));
    });

}  // namespace
}  // namespace ravel::trainer
