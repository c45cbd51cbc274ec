// Jobs with recipes among GPUs of several models: only those that have the gemms of its codes are
// given to a job, at its start, when it grows and when it recovers.

#include "coordinator/jobs/gpu_recipes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr char kAmpere[] = "NVIDIA A100-SXM4-80GB";
constexpr char kHopper[] = "NVIDIA H100 80GB HBM3";

class GpuRecipesTest : public ::testing::Test {
 protected:
  void SetUp() override { world_.StartCoordinator(); }
  plan::JobSpec BlockJob(const std::string& name, std::vector<int64_t> sizes) {
    plan::JobSpec spec = world_.Spec(name, std::move(sizes), 1000);
    spec.cpu_devices = false;
    spec.recipe.recipe = plan::Recipe::kFloat8Block;
    return spec;
  }
  JobState State() { return world_.Job("job").record.state; }
  // Nodes with trainers.
  std::vector<std::string> Nodes() {
    std::vector<std::string> nodes;
    for (const NodeView& view : world_.controller().Nodes()) {
      const std::string& id = view.record.facts.node_id;
      if (!world_.node(id).trainers.empty()) {
        nodes.push_back(id);
      }
    }
    return nodes;
  }

  FakeWorld world_;
};

TEST_F(GpuRecipesTest, AJobGoesToTheGpusThatHaveItsGemms) {
  world_.AddGpuNode("a-old", {kAmpere, kAmpere, kAmpere, kAmpere});
  world_.AddGpuNode("b-new", {kHopper, kHopper});
  ASSERT_TRUE(world_.Submit(BlockJob("job", {2})).ok());
  world_.Advance(200);
  EXPECT_EQ(State(), JobState::kRunning);
  EXPECT_THAT(Nodes(), UnorderedElementsAre("b-new"));
  EXPECT_EQ(world_.Job("job").record.attempt, 1);
}

TEST_F(GpuRecipesTest, AJobGrowsAndRecoversOnSuchGpusAlone) {
  world_.AddGpuNode("a-old", {kAmpere, kAmpere});
  world_.AddGpuNode("b-new", {kHopper});
  plan::JobSpec spec = BlockJob("job", {1, 2});
  spec.elastic.grow_delay_ms = 1'000;
  ASSERT_TRUE(world_.Submit(spec).ok());
  world_.TrainSteps(3);
  world_.Advance(10'000);
  EXPECT_EQ(world_.Job("job").record.world_size, 1) << "two A100 are free";
  world_.AddGpuNode("c-new", {kHopper});
  world_.Advance(10'000);
  world_.TrainSteps(3);
  world_.Advance(1'000);
  EXPECT_EQ(world_.Job("job").record.world_size, 2);
  EXPECT_THAT(Nodes(), UnorderedElementsAre("b-new", "c-new"));
  world_.Kill(world_.node("b-new"));
  world_.Advance(30'000);
  EXPECT_EQ(State(), JobState::kRunning);
  EXPECT_EQ(world_.Job("job").record.world_size, 1);
  EXPECT_TRUE(world_.node("a-old").trainers.empty());
}

TEST_F(GpuRecipesTest, AJobWaitsForSuchAGpu) {
  world_.AddGpuNode("a-old", {kAmpere, kAmpere});
  ASSERT_TRUE(world_.Submit(BlockJob("job", {1})).ok());
  world_.Advance(60'000);
  EXPECT_EQ(State(), JobState::kQueued);
  EXPECT_EQ(world_.Job("job").record.attempt, 0);
  EXPECT_THAT(world_.controller().WhyQueued(world_.Job("job").record.uid),
              HasSubstr("needs 1 free gpu devices that multiply codes of fp8_block, 0 are free"));
  world_.AddGpuNode("b-new", {kHopper});
  world_.Advance(1'000);
  EXPECT_EQ(State(), JobState::kRunning);
  EXPECT_THAT(Nodes(), UnorderedElementsAre("b-new"));
}

// An emulation runs on any model, and of a model that is not known the trainer finds out.
TEST_F(GpuRecipesTest, EmulationsAndModelsThatAreNotKnownKeepNobodyAway) {
  world_.AddGpuNode("a-old", {kAmpere});
  plan::JobSpec emulated = BlockJob("job", {1});
  emulated.recipe.emulation = {plan::GemmPath::kDequantBf16};
  ASSERT_TRUE(world_.Submit(emulated).ok());
  world_.Advance(200);
  EXPECT_EQ(State(), JobState::kRunning);
  world_.AddGpuNode("b-other", {"Emulated device 0"});
  ASSERT_TRUE(world_.Submit(BlockJob("second", {1})).ok());
  world_.Advance(200);
  EXPECT_EQ(world_.Job("second").record.state, JobState::kRunning);
}

// Nodes whose GPUs will not do hold no hope for a job that the others cannot hold data of.
TEST_F(GpuRecipesTest, NodesWithoutSuchGpusAreNoPlaceForItsData) {
  world_.AddGpuNode("a-old", {kAmpere, kAmpere});
  world_.AddGpuNode("b-new", {kHopper}).refuses_with = "DataCacheTooSmall";
  ASSERT_TRUE(world_.Submit(BlockJob("job", {1})).ok());
  world_.Advance(2'000);
  EXPECT_EQ(State(), JobState::kFailed);
  EXPECT_EQ(world_.Job("job").record.reason, "DataCachesTooSmall");
}

}  // namespace
}  // namespace ravel::coordinator
