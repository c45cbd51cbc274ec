#include "coordinator/jobs/step_speed.h"

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/model/model_inventory.h"

namespace ravel::coordinator {
namespace {

plan::JobSpec GpuSpec() {
  plan::JobSpec spec;
  plan::ModelConfig& model = spec.model.emplace();
  model.vocab_size = 128;
  model.hidden_size = 32;
  model.intermediate_size = 64;
  model.num_hidden_layers = 2;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 8;
  model.max_position_embeddings = 64;
  spec.data.sequence_length = 64;
  spec.cpu_devices = false;
  return spec;
}

TEST(StepSecondsTest, ABoundIsInsideOfItsBucket) {
  StepSeconds times;
  for (const double seconds : {0.01, 0.011, 300.0, 301.0, -1.0, std::nan("")}) {
    times.Add(seconds);
  }
  EXPECT_EQ(times.counts[0], 3) << "0.01 and what is no time";
  EXPECT_EQ(times.counts[1], 1);
  EXPECT_EQ(times.counts[StepSeconds::kBounds.size() - 1], 1);
  EXPECT_EQ(times.counts.back(), 1);
  EXPECT_EQ(std::accumulate(times.counts.begin(), times.counts.end(), int64_t{0}), 6);
  EXPECT_DOUBLE_EQ(times.sum, 0.021 + 601);
}

TEST(SpeedScaleTest, CountsTheFlopsThatThePlanPrints) {
  const plan::JobSpec spec = GpuSpec();
  const SpeedScale scale = SpeedScaleOf(spec, 3, {"NVIDIA H200", "NVIDIA H200"});
  EXPECT_EQ(scale.epoch, 3);
  EXPECT_EQ(scale.flops_per_token, plan::TrainingFlopsPerToken(*spec.model, 64));
  EXPECT_EQ(scale.peak_flops, 989.4e12);
}

TEST(SpeedScaleTest, WhatIsNotKnownIsZero) {
  plan::JobSpec spec = GpuSpec();
  for (const std::vector<std::string>& models : {std::vector<std::string>{},
                                                 {"NVIDIA H200", "NVIDIA B200"},
                                                 {"NVIDIA H200", ""},
                                                 {"Other", "Other"}}) {
    EXPECT_EQ(SpeedScaleOf(spec, 1, models).peak_flops, 0);
  }
  spec.freeze = {"*.embed_tokens.*"};
  EXPECT_EQ(SpeedScaleOf(spec, 1, {"NVIDIA H200"}).flops_per_token, 0);
  spec.cpu_devices = true;
  EXPECT_EQ(SpeedScaleOf(spec, 1, {"NVIDIA H200"}).peak_flops, 0);
}

}  // namespace
}  // namespace ravel::coordinator
