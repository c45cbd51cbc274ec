// Large models on many ranks are planned and checked at once.

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "tests/common/plan/plan_testing.h"
#include "tests/testing/cpu_time.h"

namespace ravel::plan {
namespace {

// Of an optimised build on an idle machine: 0.06 s. Sanitizers and busy machines take many times
// that.
constexpr double kMostMs = 2000;
constexpr int64_t kMostKilobytes = int64_t{2} << 20;

JobSpec SpecOn(int64_t ranks, int64_t lanes) {
  JobSpec spec = testing::SpecOf(testing::Llama70b(), lanes);
  spec.data.sequence_length = 8192;
  spec.device_count = ranks;
  return spec;
}

TEST(PlanSpeed, Llama70bAtWidth512) {
  JobSpec spec = SpecOn(512, 512);
  spec.allow_padding = false;
  const double before = ravel::testing::ProcessCpuMs();
  const absl::StatusOr<ShardingPlan> plan =
      BuildShardingPlan({.spec = spec, .ranks = 512, .shared_memory = false});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_LT(ravel::testing::ProcessCpuMs() - before, kMostMs);
  EXPECT_LE(static_cast<double>(plan->memory.packed_bytes()),
            1.05 * static_cast<double>(plan->memory.lower_bound_bytes));
}

TEST(PlanSpeed, TenThousandRanks) {
  for (const int64_t replicas : {1, 16}) {
    JobSpec spec = SpecOn(10000, 16384);
    spec.replicas = replicas;
    const double before = ravel::testing::ProcessCpuMs();
    const absl::StatusOr<ShardingPlan> plan =
        BuildShardingPlan({.spec = spec, .ranks = 10000, .shared_memory = false});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LT(ravel::testing::ProcessCpuMs() - before, 5 * kMostMs);
  }
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  EXPECT_LT(usage.ru_maxrss, kMostKilobytes);
}

}  // namespace
}  // namespace ravel::plan
