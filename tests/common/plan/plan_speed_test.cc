// Large models on many ranks are planned and checked at once.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "tests/common/plan/plan_testing.h"

namespace ravel::plan {
namespace {

// Of an optimised build on an idle machine: 0.06 s. Sanitizers and busy machines take many times
// that.
constexpr double kMostSeconds = 2.0;
constexpr int64_t kMostKilobytes = int64_t{2} << 20;

ModelConfig Llama70b() {
  ModelConfig config;
  config.vocab_size = 128256;
  config.hidden_size = 8192;
  config.intermediate_size = 28672;
  config.num_hidden_layers = 80;
  config.num_attention_heads = 64;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  config.max_position_embeddings = 8192;
  return config;
}

JobSpec SpecOn(int64_t ranks, int64_t lanes) {
  JobSpec spec = testing::SpecOf(Llama70b(), lanes);
  spec.data.sequence_length = 8192;
  spec.device_count = ranks;
  return spec;
}

double ProcessSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec) +
         1e-6 * static_cast<double>(usage.ru_utime.tv_usec);
}

TEST(PlanSpeed, Llama70bAtWidth512) {
  JobSpec spec = SpecOn(512, 512);
  spec.allow_padding = false;
  const double before = ProcessSeconds();
  const absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = 512, .shared_memory = false});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LT(ProcessSeconds() - before, kMostSeconds);
  EXPECT_LE(static_cast<double>(plan->memory.packed_bytes()),
            1.05 * static_cast<double>(plan->memory.lower_bound_bytes));
}

TEST(PlanSpeed, TenThousandRanks) {
  for (const int64_t replicas : {1, 16}) {
    JobSpec spec = SpecOn(10000, 16384);
    spec.replicas = replicas;
    const double before = ProcessSeconds();
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = 10000, .shared_memory = false});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LT(ProcessSeconds() - before, 5 * kMostSeconds);
  }
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, kMostKilobytes);
}

}  // namespace
}  // namespace ravel::plan
