// Nodes that are gone: what a restarted coordinator knows of them, and what forgetting one means.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/jobs/job_controller.h"
#include "tests/coordinator/jobs/fake_world.h"

namespace ravel::coordinator {
namespace {

using ::testing::HasSubstr;

class GoneNodesTest : public ::testing::Test {
 protected:
  void SetUp() override { world_.StartCoordinator(); }
  std::string StateOf(const std::string& id) { return ViewOf(id).state; }
  NodeView ViewOf(const std::string& id) {
    for (const NodeView& view : world_.controller().Nodes()) {
      if (view.record.facts.node_id == id) {
        return view;
      }
    }
    return {};
  }
  void RestartCoordinator() {
    world_.KillCoordinator();
    world_.StartCoordinator();
  }

  FakeWorld world_;
};

TEST_F(GoneNodesTest, OutliveARestartOfTheCoordinator) {
  world_.AddNode("lost");
  FakeNode& leaver = world_.AddNode("leaver");
  world_.AddNode("here");
  world_.Kill(world_.node("lost"));
  leaver.draining = true;
  world_.Connect(leaver);
  world_.Disconnect(leaver);
  leaver.alive = false;
  world_.Advance(10'000);
  ASSERT_EQ(StateOf("lost"), "LOST");
  ASSERT_EQ(StateOf("leaver"), "LEFT");
  const std::string why = ViewOf("leaver").message;
  const int64_t heard_ms = ViewOf("leaver").record.heard_wall_ms;
  for (int i = 0; i < 2; ++i) {
    RestartCoordinator();
    EXPECT_EQ(StateOf("lost"), "LOST");
    EXPECT_EQ(StateOf("leaver"), "LEFT");
    EXPECT_EQ(ViewOf("leaver").message, why);
    EXPECT_EQ(ViewOf("leaver").record.heard_wall_ms, heard_ms);
    EXPECT_EQ(StateOf("here"), "") << "it may be on its way";
    world_.Connect(world_.node("here"));
    EXPECT_EQ(StateOf("here"), "READY");
  }
  world_.clock.AdvanceMs(25LL * 3600 * 1000);
  world_.Connect(world_.node("here"));
  world_.Advance(1'000);
  EXPECT_EQ(StateOf("leaver"), "") << "kept for a day";
}

TEST_F(GoneNodesTest, ANodeThatDoesNotReturnToARestartedCoordinatorIsLost) {
  world_.AddNode("a");
  world_.KillCoordinator();
  world_.node("a").alive = false;
  world_.StartCoordinator();
  EXPECT_EQ(StateOf("a"), "");
  world_.Advance(20'000);
  EXPECT_EQ(StateOf("a"), "LOST");
  EXPECT_THAT(ViewOf("a").message, HasSubstr("did not return"));
  RestartCoordinator();
  EXPECT_EQ(StateOf("a"), "LOST");
  EXPECT_THAT(ViewOf("a").message, HasSubstr("did not return"));
  world_.Advance(20'000);
  EXPECT_EQ(StateOf("a"), "LOST");
}

TEST_F(GoneNodesTest, AHeldNodeIsNotForgottenUnlessItsHoldIsLifted) {
  world_.AddNode("a");
  ASSERT_TRUE(world_.HoldNode("a", NodeHold::kDrained, false, "new disk").ok());
  world_.Kill(world_.node("a"));
  world_.Advance(10'000);
  ASSERT_EQ(StateOf("a"), "LOST");
  const absl::Status refused = world_.ForgetNode("a");
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("a is drained: new disk"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("ravelctl nodes undrain a"));
  world_.Restart(world_.node("a"));
  EXPECT_EQ(StateOf("a"), "DRAINED") << "the hold is kept";
  world_.Kill(world_.node("a"));
  world_.Advance(10'000);
  ASSERT_TRUE(world_.HoldNode("a", NodeHold::kDrained, true, "").ok());
  EXPECT_TRUE(world_.ForgetNode("a").ok());
  world_.Restart(world_.node("a"));
  EXPECT_EQ(StateOf("a"), "READY") << "a new node";
}

}  // namespace
}  // namespace ravel::coordinator
