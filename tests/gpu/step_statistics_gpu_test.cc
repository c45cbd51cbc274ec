// What decides a step on a device: the bits of the host, whose code follows one step later.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/adamw.h"
#include "kernels/row_sum.h"
#include "kernels/step_statistics.h"
#include "tests/gpu/gpu.h"

namespace ravel::kernels::testing {
namespace {

class GpuStepStatisticsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!TheGpu().missing.empty()) {
      GTEST_SKIP() << TheGpu().missing;
    }
  }
  // A copy that the device reaches.
  template <typename T>
  T* Pinned(const std::vector<T>& values) {
    memory_.push_back(*TheGpu().device->AllocatePinned(
        static_cast<int64_t>(std::max<size_t>(1, values.size()) * sizeof(T))));
    std::memcpy(memory_.back().data(), values.data(), values.size() * sizeof(T));
    return static_cast<T*>(memory_.back().data());
  }
  CudaStream& gpu() { return *TheGpu().stream; }
  void Finish() { ASSERT_TRUE(gpu().Synchronize().ok()); }

  CpuStream cpu_;

 private:
  std::vector<CudaMemory> memory_;
};

template <typename T>
TensorView ViewOf(T* data, size_t count, DType dtype) {
  return {.data = const_cast<std::remove_const_t<T>*>(data),
          .dtype = dtype,
          .rank = 1,
          .size = {static_cast<int64_t>(count)},
          .row_stride = 1};
}

TEST_F(GpuStepStatisticsTest, LossesAreAddedInTheOrderOfTokens) {
  for (const size_t count : {1u, 255u, 2048u, 5001u}) {
    std::mt19937_64 random(count);
    std::lognormal_distribution<float> any(0.0f, 8.0f);
    std::vector<float> losses;
    std::vector<int32_t> targets;
    for (size_t i = 0; i < count; ++i) {
      losses.push_back(any(random));
      targets.push_back(static_cast<int32_t>(random() % 5) - 1);
    }
    const std::vector<double> start = {0.125};
    const std::vector<int64_t> tokens = {7};
    const SumLossArgs on_gpu = {.losses = ViewOf(Pinned(losses), count, DType::kF32),
                                .targets = ViewOf(Pinned(targets), count, DType::kI32),
                                .sum = Pinned(start),
                                .tokens = Pinned(tokens)};
    double sum = 0.125;
    int64_t counted = 7;
    SumLoss(gpu(), on_gpu);
    SumLoss(cpu_,
            {.losses = ViewOf(losses.data(), count, DType::kF32),
             .targets = ViewOf(targets.data(), count, DType::kI32),
             .sum = &sum,
             .tokens = &counted});
    Finish();
    EXPECT_EQ(std::bit_cast<uint64_t>(*on_gpu.sum), std::bit_cast<uint64_t>(sum)) << count;
    EXPECT_EQ(*on_gpu.tokens, counted);
  }
}

TEST_F(GpuStepStatisticsTest, NodesOfRowsAreTreesOfAdjacentPairs) {
  constexpr size_t kRows = 40000;
  std::mt19937_64 random(3);
  std::lognormal_distribution<float> any(0.0f, 8.0f);
  std::vector<float> rows;
  for (size_t i = 0; i < kRows; ++i) {
    rows.push_back(any(random));
  }
  std::vector<RowNode> nodes;
  for (int64_t level = 0; level <= 15; ++level) {
    nodes.push_back({.first_row = 37 * level, .level = level});
  }
  const double unset = -1.0;
  double* out = Pinned(std::vector<double>(nodes.size(), unset));
  std::vector<double> expected(nodes.size(), unset);
  SumRowNodesArgs args = {.row_sums = Pinned(rows),
                          .rows = kRows,
                          .nodes = Pinned(nodes),
                          .count = static_cast<int64_t>(nodes.size()),
                          .out = out};
  SumRowNodes(gpu(), args);
  args.row_sums = rows.data();
  args.nodes = nodes.data();
  args.out = expected.data();
  SumRowNodes(cpu_, args);
  Finish();
  for (size_t i = 0; i < nodes.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(out[i]), std::bit_cast<uint64_t>(expected[i])) << i;
    EXPECT_GT(expected[i], 0);
  }
}

// Two messages of a header, three counts and four numbers; ((a0 + b0) + (a1 + b1)) + a3.
struct Messages {
  static constexpr int64_t kTensors = 3;
  static constexpr int64_t kWords = kStatisticsHeaderWords + kTensors + 4;
  std::vector<int64_t> words = std::vector<int64_t>(2 * kWords, 0);
  std::vector<SumStep> steps = {{.a = Number(0, 0), .b = Number(1, 0)},
                                {.a = Number(0, 1), .b = Number(1, 1)},
                                {.a = -1, .b = -2},
                                {.a = -3, .b = Number(0, 3)}};
  std::vector<int64_t> level_ends = {2, 3, 4};

  static int32_t Number(int32_t rank, int32_t i) {
    return static_cast<int32_t>(rank * kWords + kStatisticsHeaderWords + kTensors) + i;
  }
  Messages(double first, int64_t non_finite, int64_t tokens) {
    for (int32_t rank = 0; rank < 2; ++rank) {
      const StatisticsHeader header = {.target_tokens = tokens + rank, .learning_rate = 3e-4};
      std::memcpy(&words[static_cast<size_t>(rank * kWords)], &header, sizeof(header));
      for (int32_t i = 0; i < 4; ++i) {
        words[static_cast<size_t>(Number(rank, i))] =
            std::bit_cast<int64_t>(first / (1.0 + rank + 3.0 * i));
      }
      words[static_cast<size_t>(Number(rank, -1))] = non_finite;
    }
  }
};

// A good step, one that raises the scale, two skips, and one without targets.
TEST_F(GpuStepStatisticsTest, TheLossScaleIsThatOfTheHost) {
  const LossScaleRule rule = {.minimum = 2, .maximum = 64, .growth_interval = 2};
  StepOutcome on_cpu = {.loss_scale = 8};
  StepOutcome* on_gpu = Pinned(std::vector<StepOutcome>{on_cpu});
  std::vector<float> scales;
  for (const Messages& messages : {Messages{40000.0, 0, 17},
                                   Messages{4.0, 0, 17},
                                   Messages{4.0, 3, 17},
                                   Messages{4.0, 1, 17},
                                   Messages{4.0, 0, 0}}) {
    std::vector<double> sums(messages.steps.size());
    DecideUpdateArgs args = {
        .messages = Pinned(messages.words),
        .ranks = 2,
        .words = Messages::kWords,
        .tensors = Messages::kTensors,
        .steps = Pinned(messages.steps),
        .level_ends = Pinned(messages.level_ends),
        .levels = static_cast<int64_t>(messages.level_ends.size()),
        .step_count = static_cast<int64_t>(messages.steps.size()),
        .sums = Pinned(sums),
        .total = -static_cast<int32_t>(messages.steps.size()),
        .clip_norm = 1.0,
        .loss_scale = rule,
        .hyper = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1},
        .outcome = on_gpu};
    DecideUpdate(gpu(), args);
    args.messages = messages.words.data();
    args.steps = messages.steps.data();
    args.level_ends = messages.level_ends.data();
    args.sums = sums.data();
    args.outcome = &on_cpu;
    DecideUpdate(cpu_, args);
    Finish();
    EXPECT_EQ(on_gpu->loss_scale, on_cpu.loss_scale);
    EXPECT_EQ(on_gpu->good_steps, on_cpu.good_steps);
    EXPECT_EQ(on_gpu->apply, on_cpu.apply);
    if (on_cpu.apply != 0) {
      EXPECT_EQ(on_gpu->scalars.gradient_scale, on_cpu.scalars.gradient_scale);
    }
    scales.push_back(on_cpu.loss_scale);
  }
  EXPECT_EQ(scales, (std::vector<float>{8, 16, 8, 4, 4}));
}

TEST_F(GpuStepStatisticsTest, DecisionAndScalarsAreThoseOfTheHost) {
  const Messages cases[] = {{40000.0, 0, 17},
                            {1e-3, 0, 100},
                            {40000.0, 2, 17},
                            {std::numeric_limits<double>::infinity(), 0, 17},
                            {std::numeric_limits<double>::quiet_NaN(), 0, 17}};
  for (const Messages& messages : cases) {
    StepOutcome on_cpu = {.updates = 41};
    StepOutcome* on_gpu = Pinned(std::vector<StepOutcome>{on_cpu});
    std::vector<double> sums(messages.steps.size());
    DecideUpdateArgs args = {
        .messages = Pinned(messages.words),
        .ranks = 2,
        .words = Messages::kWords,
        .tensors = Messages::kTensors,
        .steps = Pinned(messages.steps),
        .level_ends = Pinned(messages.level_ends),
        .levels = static_cast<int64_t>(messages.level_ends.size()),
        .step_count = static_cast<int64_t>(messages.steps.size()),
        .sums = Pinned(sums),
        .total = -static_cast<int32_t>(messages.steps.size()),
        .clip_norm = 1.0,
        .hyper = {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1},
        .outcome = on_gpu};
    DecideUpdate(gpu(), args);
    args.messages = messages.words.data();
    args.steps = messages.steps.data();
    args.level_ends = messages.level_ends.data();
    args.sums = sums.data();
    args.outcome = &on_cpu;
    DecideUpdate(cpu_, args);
    Finish();
    EXPECT_EQ(on_gpu->apply, on_cpu.apply);
    EXPECT_EQ(on_gpu->updates, on_cpu.updates);
    EXPECT_EQ(on_cpu.updates, 41 + on_cpu.apply);
    EXPECT_EQ(on_gpu->target_tokens, on_cpu.target_tokens);
    EXPECT_EQ(on_gpu->non_finite, on_cpu.non_finite);
    if (on_cpu.apply == 0) {
      continue;
    }
    EXPECT_EQ(on_gpu->squared_norm, on_cpu.squared_norm);
    EXPECT_EQ(0, std::memcmp(&on_gpu->scalars, &on_cpu.scalars, sizeof(UpdateScalars)));
    const UpdateScalars expected = MakeUpdateScalars(
        {.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1, .learning_rate = 3e-4},
        42,
        on_cpu.scalars.gradient_scale);
    EXPECT_EQ(0, std::memcmp(&expected, &on_cpu.scalars, sizeof(expected)));
  }
}

TEST_F(GpuStepStatisticsTest, AnUpdateReadsItsScalarsAndMayBeSkipped) {
  const std::vector<float> ones(100, 1.0f);
  UpdateScalars scalars;
  scalars.learning_rate = 0.5f;
  int32_t* apply = Pinned(std::vector<int32_t>{0});
  const auto view = [&](float* data) { return ViewOf(data, ones.size(), DType::kF32); };
  float* p = Pinned(ones);
  float* m = Pinned(ones);
  const AdamWArgs args = {.p = view(p),
                          .g = view(Pinned(ones)),
                          .m = view(m),
                          .v = view(Pinned(ones)),
                          .device_scalars = Pinned(std::vector<UpdateScalars>{scalars}),
                          .apply = apply};
  AdamWUpdate(gpu(), args);
  Finish();
  EXPECT_EQ(p[0], 1.0f);
  *apply = 1;
  AdamWUpdate(gpu(), args);
  Finish();
  std::vector<float> weight = ones, gradient = ones, mean = ones, square = ones;
  AdamWUpdate(cpu_,
              {.p = view(weight.data()),
               .g = view(gradient.data()),
               .m = view(mean.data()),
               .v = view(square.data()),
               .scalars = scalars});
  EXPECT_EQ(0, std::memcmp(p, weight.data(), weight.size() * sizeof(float)));
  EXPECT_EQ(0, std::memcmp(m, mean.data(), mean.size() * sizeof(float)));
  EXPECT_LT(p[0], 1.0f);
}

}  // namespace
}  // namespace ravel::kernels::testing
