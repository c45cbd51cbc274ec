#include "coordinator/fleet/node_blame.h"

#include <algorithm>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "common/failure_reason.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kSecondMs = 1000;
constexpr int64_t kMinuteMs = 60 * kSecondMs;

NodeFailure Failure(const std::string& reason, int64_t attempt = 1, const std::string& node = "a") {
  return {.node = node, .reason = reason, .job_uid = "job", .attempt = attempt};
}

TEST(BlameWeightTest, OnlyReasonsThatSpeakOfThePlaceWeigh) {
  std::set<std::string_view> shunned;
  std::set<std::string_view> preferred;
  for (const FailureReason& reason : FailureReasons()) {
    const int64_t weight = BlameWeight(Failure(std::string(reason.name)));
    EXPECT_EQ(weight > 0, reason.answer == FailureAnswer::kAvoidNode) << reason.name;
    (weight >= kShunned ? shunned : preferred).insert(reason.name);
    EXPECT_EQ(BlameWeight(Failure(std::string(reason.name), 1, "")), 0) << "no node to blame";
  }
  EXPECT_EQ(shunned,
            (std::set<std::string_view>{"DataError",
                                        "HostOutOfMemory",
                                        "DeviceError",
                                        "StartFailed",
                                        "PreflightFailed",
                                        "DataCacheTooSmall",
                                        "EnvironmentRefused"}));
  NodeFailure crash = Failure("ProcessCrash");
  EXPECT_EQ(BlameWeight(crash), 1) << "one SIGKILL is no reason to be smaller";
  crash.starting = true;
  EXPECT_EQ(BlameWeight(crash), kShunned);
}

TEST(AvoidSetTest, EachFailureAvoidsThePlaceTwiceAsLongUpToTenMinutes) {
  AvoidSet avoided;
  int64_t now_ms = 0;
  int64_t expected_ms = 10 * kSecondMs;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(avoided.Add(Failure("DeviceError", i), now_ms), expected_ms);
    EXPECT_GE(avoided.Weight("a", 0, now_ms + expected_ms - 1), kShunned);
    EXPECT_EQ(avoided.Weight("a", 0, now_ms + expected_ms), 0) << "used again";
    now_ms += expected_ms;
    expected_ms = std::min(2 * expected_ms, 10 * kMinuteMs);
  }
  now_ms += 11 * kMinuteMs;
  EXPECT_EQ(avoided.Add(Failure("DeviceError", 99), now_ms), 10 * kSecondMs) << "forgotten";
}

TEST(AvoidSetTest, ADevicesFailureLeavesTheOthersOfItsNode) {
  AvoidSet avoided;
  NodeFailure failure = Failure("DeviceError");
  failure.device = 3;
  avoided.Add(failure, 0);
  EXPECT_GE(avoided.Weight("a", 3, 1), kShunned);
  EXPECT_EQ(avoided.Weight("a", 2, 1), 0);
  avoided.Add(Failure("Stall"), 0);
  EXPECT_EQ(avoided.Weight("a", 2, 1), 1);
  EXPECT_EQ(avoided.Weight("b", 3, 1), 0);
  EXPECT_EQ(avoided.Add(Failure("CommError"), 0), 0) << "the echo of somebody else's death";
}

TEST(NodePenaltiesTest, ThreeDistinctAttemptsThatBlameTheMachineAreEnough) {
  NodePenalties penalties;
  EXPECT_FALSE(penalties.Add(Failure("DeviceError", 1), 0));
  EXPECT_FALSE(penalties.Add(Failure("DeviceError", 1), 1)) << "the same attempt";
  EXPECT_FALSE(penalties.Add(Failure("StartFailed", 2), 2));
  EXPECT_EQ(penalties.Count("a", 3), 2);
  EXPECT_TRUE(penalties.Add(Failure("DeviceError", 3), 3));
  EXPECT_EQ(penalties.Count("b", 3), 0);
  penalties.Clear("a");
  EXPECT_FALSE(penalties.Add(Failure("DeviceError", 4), 4));
}

TEST(NodePenaltiesTest, AJobsOwnFaultsNeverQuarantineANode) {
  NodePenalties penalties;
  for (const FailureReason& reason : FailureReasons()) {
    const bool machine = reason.name == "DeviceError" || reason.name == "StartFailed";
    for (int attempt = 0; attempt < 10 && !machine; ++attempt) {
      EXPECT_FALSE(penalties.Add(Failure(std::string(reason.name), attempt), 0)) << reason.name;
    }
  }
}

TEST(NodePenaltiesTest, TenMinutesMakeGood) {
  NodePenalties penalties;
  for (int attempt = 0; attempt < 20; ++attempt) {
    EXPECT_FALSE(penalties.Add(Failure("DeviceError", attempt), attempt * 5 * kMinuteMs));
  }
  EXPECT_EQ(penalties.Count("a", 200 * kMinuteMs), 0);
}

TEST(QuarantineTest, AThirdOfTheNodesAtMostAndNeverTheLast) {
  EXPECT_FALSE(MayQuarantine(1, 0));
  EXPECT_TRUE(MayQuarantine(2, 0));
  EXPECT_FALSE(MayQuarantine(2, 1));
  EXPECT_FALSE(MayQuarantine(5, 1));
  EXPECT_TRUE(MayQuarantine(9, 2));
  EXPECT_FALSE(MayQuarantine(9, 3));
}

TEST(AvoidSetTest, NodesAreNamedByWhatSpeaksAgainstThem) {
  AvoidSet avoided;
  avoided.Add(Failure("ProcessCrash"), 0);
  NodeFailure device = Failure("DeviceError", 1, "b");
  device.device = 1;
  avoided.Add(device, 0);
  EXPECT_EQ(avoided.Nodes(1, 1), (std::set<std::string>{"a", "b"}));
  EXPECT_EQ(avoided.Nodes(kShunned, 1), (std::set<std::string>{"b"}));
  avoided.Add(Failure("ProcessCrash", 2), 1);
  EXPECT_EQ(avoided.Nodes(kShunned, 2), (std::set<std::string>{"a", "b"})) << "twice is enough";
  EXPECT_TRUE(avoided.Nodes(1, kMinuteMs).empty());
  NodePenalties penalties;
  penalties.Add(Failure("ProcessCrash"), 0);
  EXPECT_EQ(penalties.Nodes(1), (std::set<std::string>{"a"}));
  EXPECT_TRUE(penalties.Nodes(11 * kMinuteMs).empty());
}

}  // namespace
}  // namespace ravel::coordinator
