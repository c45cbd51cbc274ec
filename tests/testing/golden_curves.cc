#include "tests/testing/golden_curves.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include <gtest/gtest.h>

#include "tests/testing/training_cases.h"

namespace ravel::trainer {
namespace {

constexpr char kInBundle[] = "../tests/worker/trainer/golden";

std::filesystem::path GoldenFolder() {
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = program.parent_path() / kInBundle;
  return std::filesystem::exists(beside, error) ? beside
                                                : std::filesystem::path(RAVEL_GOLDEN_FOLDER);
}

}  // namespace

std::vector<GoldenStep> GoldenCurve(const std::string& name) {
  const std::filesystem::path path =
      GoldenFolder() / (name.ends_with("_bf16")                  ? "loss_curves_bf16.txt"
                        : name.ends_with("_fp16")                ? "loss_curves_fp16.txt"
                        : name.find("_sgd") != std::string::npos ? "loss_curves_sgd.txt"
                        : name.ends_with("_lion")                ? "loss_curves_lion.txt"
                        : name.starts_with("cut_")               ? "loss_curves_cut.txt"
                                                                 : "loss_curves.txt");
  std::ifstream file(path);
  std::vector<GoldenStep> curve;
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string of_case;
    int64_t step = 0;
    GoldenStep golden;
    if (words >> of_case >> step >> golden.loss >> golden.grad_norm >> golden.learning_rate &&
        of_case == name) {
      EXPECT_EQ(step, static_cast<int64_t>(curve.size()));
      curve.push_back(golden);
    }
  }
  EXPECT_FALSE(curve.empty()) << path << ": no steps of " << name;
  return curve;
}

CurveDistance DistanceToGolden(const std::vector<GoldenStep>& golden, const Recording& run) {
  CurveDistance worst;
  EXPECT_EQ(run.steps.size(), golden.size());
  for (size_t i = 0; i < std::min(golden.size(), run.steps.size()); ++i) {
    const StepResult& step = run.steps[i];
    worst.loss = std::max(
        worst.loss, std::abs(static_cast<double>(step.loss) - golden[i].loss) / golden[i].loss);
    worst.grad_norm =
        std::max(worst.grad_norm, std::abs(step.grad_norm / golden[i].grad_norm - 1.0));
    EXPECT_NEAR(step.learning_rate / golden[i].learning_rate, 1.0, 1e-6) << "step " << i;
    EXPECT_FALSE(step.skipped) << "step " << i;
    EXPECT_TRUE(std::isfinite(step.loss)) << "step " << i;
  }
  return worst;
}

}  // namespace ravel::trainer
