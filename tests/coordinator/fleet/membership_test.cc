#include "coordinator/fleet/membership.h"

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "common/version.h"

namespace ravel::coordinator {
namespace {

HelloMessage Hello(const std::string& id, const std::string& incarnation) {
  HelloMessage hello;
  hello.node_id = id;
  hello.incarnation = incarnation;
  hello.protocol = 1;
  return hello;
}

TEST(MembershipTest, ASilentNodeIsSuspectThenLostOnce) {
  Membership members(1000);
  ASSERT_TRUE(members.OnHello(1, Hello("a", "i"), 0, 0).rejected.empty());
  EXPECT_TRUE(members.Evaluate(599).empty());
  EXPECT_EQ(members.Find("a")->state, NodeState::kReady);
  EXPECT_TRUE(members.Evaluate(600).empty());
  EXPECT_EQ(members.Find("a")->state, NodeState::kSuspect);
  EXPECT_TRUE(members.OnHeard(1, 700, 0));
  EXPECT_EQ(members.Find("a")->state, NodeState::kReady);
  EXPECT_TRUE(members.Evaluate(1699).empty());
  const auto lost = members.Evaluate(1700);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].node_id, "a");
  EXPECT_TRUE(members.Evaluate(1800).empty());
  EXPECT_FALSE(members.OnHeard(1, 1900, 0)) << "a lost node introduces itself again";
}

TEST(MembershipTest, ABrokenStreamIsForgivenForTwoFifthsOfT) {
  Membership members(1000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  members.OnClosed(1, 100, NodeLoad::kHasTrainers);
  EXPECT_TRUE(members.Evaluate(499).empty());
  const HelloOutcome back = members.OnHello(2, Hello("a", "i"), 499, 0);
  EXPECT_FALSE(back.new_incarnation);
  EXPECT_TRUE(members.Evaluate(600).empty());
  members.OnClosed(1, 600, NodeLoad::kHasTrainers);  // the old stream, late
  EXPECT_EQ(members.Find("a")->stream, StreamId{2});
  members.OnClosed(2, 700, NodeLoad::kHasTrainers);
  EXPECT_EQ(members.Evaluate(1100).size(), 1U);
}

TEST(MembershipTest, NodeTakesNoWorkBeforeALongMessageHasComeBack) {
  Membership members(1000);
  HelloMessage hello = Hello("a", "i");
  hello.path_bytes = 9000;
  hello.device_message = "no GPU";
  members.OnHello(1, hello, 0, 0);
  EXPECT_EQ(members.Find("a")->state, NodeState::kSuspect);
  EXPECT_TRUE(members.OnHeard(1, 10, 0));
  EXPECT_FALSE(members.OnBeat(1, {.seq = 1, .padding = "long"}, 10));
  EXPECT_EQ(members.Find("a")->state, NodeState::kSuspect);
  members.OnHeard(1, 20, 0);
  EXPECT_FALSE(members.OnBeat(1, {.seq = 2, .answered_bytes = 8999, .unanswered_ms = 10}, 20));
  members.OnHeard(1, 30, 0);
  EXPECT_TRUE(members.OnBeat(1, {.seq = 3, .answered_bytes = 9000}, 30));
  EXPECT_TRUE(members.Find("a")->TakesWork());
  EXPECT_EQ(members.Find("a")->message, "no GPU");
  EXPECT_FALSE(members.OnBeat(1, {.seq = 4, .answered_bytes = 9000}, 40)) << "once";
  members.OnHello(2, hello, 50, 0);
  EXPECT_FALSE(members.Find("a")->TakesWork()) << "each stream may take another path";
}

TEST(MembershipTest, NodeThatLongMessagesDoNotReachIsLost) {
  Membership members(1000);
  HelloMessage hello = Hello("a", "i");
  hello.path_bytes = 9000;
  members.OnHello(1, hello, 0, 0);
  int64_t seq = 0;
  const auto beat = [&](int64_t now_ms, int64_t unanswered_ms, const std::string& padding) {
    members.OnHeard(1, now_ms, 0);
    members.OnBeat(1,
                   {.seq = ++seq,
                    .padding = padding,
                    .answered_bytes = 9000,
                    .next_bytes = 0,
                    .unanswered_ms = unanswered_ms},
                   now_ms);
    return members.Evaluate(now_ms);
  };
  beat(200, 0, "long");
  beat(1100, 900, "");
  // The coordinator answered late, not the path: what was waited for before does not count.
  beat(1200, 0, "long");
  EXPECT_TRUE(beat(1400, 1500, "").empty());
  EXPECT_TRUE(beat(2100, 1000, "").empty()) << "answered 900 ms ago";
  const auto lost = beat(2200, 1100, "");
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].reason,
            "its beats arrive, but messages of more than a frame do not reach it, for 1100 ms: the "
            "MTU of the path is smaller than this host believes");
}

TEST(MembershipTest, SilenceWhereALongBeatIsDueSpeaksOfThePath) {
  for (const int64_t next : {0, 1600}) {
    Membership members(1000);
    HelloMessage hello = Hello("a", "i");
    hello.path_bytes = 9000;
    members.OnHello(1, hello, 0, 0);
    members.OnBeat(1, {.seq = 1, .answered_bytes = 9000, .next_bytes = next}, 0);
    const auto lost = members.Evaluate(1000);
    ASSERT_EQ(lost.size(), 1U);
    EXPECT_EQ(lost[0].reason,
              next == 0 ? "no beat for 1000 ms"
                        : "no beat for 1000 ms; the next one has more than 1600 bytes: if the host "
                          "is well, see the MTU of the path");
  }
}

TEST(MembershipTest, TheSameDaemonOnANewStreamReplacesItsOldOne) {
  Membership members(1000);
  EXPECT_TRUE(members.OnHello(1, Hello("a", "i"), 0, 0).new_incarnation);
  const HelloOutcome outcome = members.OnHello(2, Hello("a", "i"), 10, 0);
  EXPECT_FALSE(outcome.new_incarnation);
  EXPECT_EQ(outcome.replaced, StreamId{1});
  EXPECT_EQ(members.FindByStream(1), nullptr);
}

// Whether a second daemon gets the name of one that was heard `silent_ms` ago.
TEST(MembershipTest, ALiveDaemonKeepsItsName) {
  struct Case {
    const char* why;
    int64_t silent_ms;
    bool closed;
    std::string lock;
    std::string host;
    bool accepted;
  };
  const Case cases[] = {
      {"a stranger", 10, false, "other", "host", false},
      {"a stranger, just in time", 999, false, "other", "host", false},
      {"the old one is silent", 1000, false, "other", "host", true},
      {"the old one's stream is closed", 10, true, "other", "host", true},
      {"has the old one's lock", 10, false, "lock", "host", true},
      {"has a lock like it on another host", 10, false, "lock", "elsewhere", false},
      {"says nothing of itself", 10, false, "", "", false},
  };
  for (const Case& c : cases) {
    Membership members(1000);
    HelloMessage old = Hello("a", "i");
    old.work_lock = "lock";
    old.host_id = "host";
    ASSERT_TRUE(members.OnHello(1, old, 0, 0).rejected.empty());
    if (c.closed) {
      members.OnClosed(1, 0, NodeLoad::kHasTrainers);
    }
    HelloMessage newcomer = Hello("a", "j");
    newcomer.work_lock = c.lock;
    newcomer.host_id = c.host;
    const HelloOutcome outcome = members.OnHello(2, newcomer, c.silent_ms, 0);
    EXPECT_EQ(outcome.rejected.empty(), c.accepted) << c.why << ": " << outcome.rejected;
    EXPECT_EQ(members.Find("a")->facts.incarnation, c.accepted ? "j" : "i") << c.why;
    EXPECT_EQ(members.Find("a")->stream, (c.accepted ? StreamId{2} : StreamId{1})) << c.why;
  }
}

TEST(MembershipTest, AHeldNodeTakesNoWorkWhateverItsDaemonDoes) {
  Membership members(1000);
  EXPECT_FALSE(members.SetHold("a", NodeHold::kDrained, ""));
  members.Remember("a", {.wall_ms = 5});
  EXPECT_TRUE(members.SetHold("a", NodeHold::kDrained, "new disk"));
  EXPECT_EQ(members.Find("a")->state, NodeState::kLost);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  EXPECT_EQ(members.Find("a")->state, NodeState::kReady);
  EXPECT_FALSE(members.Find("a")->TakesWork());
  EXPECT_EQ(members.Find("a")->hold_reason, "new disk");
  EXPECT_TRUE(members.SetHold("a", NodeHold::kNone, ""));
  EXPECT_TRUE(members.Find("a")->TakesWork());
  HelloMessage leaving = Hello("a", "i");
  leaving.draining = true;
  members.OnHello(2, leaving, 10, 0);
  EXPECT_EQ(members.Find("a")->state, NodeState::kDraining);
  EXPECT_FALSE(members.Find("a")->TakesWork());
}

TEST(MembershipTest, BadHellosNameTheirField) {
  Membership members(1000);
  EXPECT_NE(members.OnHello(1, Hello("", "i"), 0, 0).rejected.find("node_id"), std::string::npos);
  EXPECT_NE(members.OnHello(1, Hello("a", ""), 0, 0).rejected.find("incarnation"),
            std::string::npos);
  HelloMessage newer = Hello("a", "i");
  newer.protocol = 5;
  newer.oldest_protocol = 4;
  newer.version = "0.3.0";
  EXPECT_EQ(members.OnHello(1, newer, 0, 0).rejected,
            "hello.protocol: this coordinator (release 0.1.0) speaks 1 to 3, the daemon (release "
            "0.3.0) 4 to 5");
  newer.oldest_protocol = 0;
  EXPECT_NE(members.OnHello(1, newer, 0, 0).rejected.find("protocol"), std::string::npos)
      << "only the newest";
  EXPECT_TRUE(members.nodes().empty()) << "a refused daemon changes nothing";
}

TEST(MembershipTest, ADaemonOfANewerReleaseThatStillSpeaksOursIsAMember) {
  Membership members(1000);
  HelloMessage newer = Hello("a", "i");
  newer.protocol = 4;
  newer.oldest_protocol = 1;
  EXPECT_EQ(members.OnHello(1, newer, 0, 0).rejected, "");
  EXPECT_TRUE(members.Find("a")->TakesWork());
}

TEST(ProtocolRange, TheNewestThatBothSpeakIsAgreed) {
  EXPECT_EQ(AgreedProtocol({1, 1}, {1, 3}), 1);
  EXPECT_EQ(AgreedProtocol({2, 5}, {1, 3}), 3);
  EXPECT_EQ(AgreedProtocol({1, 3}, {2, 5}), 3);
  EXPECT_EQ(AgreedProtocol({1, 1}, {2, 3}), 0);
  EXPECT_EQ(AgreedProtocol({2, 3}, {1, 1}), 0);
  EXPECT_EQ(AgreedProtocol({1, 2}, {0, 2}), 2) << "a daemon of before ranges";
  EXPECT_EQ(AgreedProtocol({1, 2}, {0, 3}), 0);
  EXPECT_EQ(AgreedProtocol({1, 2}, {0, 0}), 0);
}

TEST(MembershipTest, TimeThatTheProcessDidNotRunIsNobodysFault) {
  Membership members(1000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  members.Forgive(3000, 3100);
  EXPECT_TRUE(members.Evaluate(3500).empty());
  EXPECT_EQ(members.Evaluate(4000).size(), 1U);
  EXPECT_EQ(members.Find("a")->heard_ms, 3000);
}

TEST(MembershipTest, NobodyIsHeardInTheFuture) {
  Membership members(1000);
  members.OnHello(1, Hello("a", "i"), 900, 0);
  members.Forgive(5000, 1000);
  EXPECT_EQ(members.Find("a")->heard_ms, 1000);
}

TEST(MembershipTest, WhatHasArrivedCountsBeforeTheStrandLooksAtIt) {
  Membership members(1000);
  members.OnHello(1, Hello("alive", "i"), 0, 0);
  members.OnHello(2, Hello("dead", "i"), 0, 0);
  const auto arrival = [](StreamId stream) { return stream == 1 ? int64_t{1900} : int64_t{500}; };
  const auto lost = members.Evaluate(2000, arrival);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].node_id, "dead");
  EXPECT_EQ(lost[0].reason, "no beat for 1500 ms");
}

TEST(MembershipTest, EachJobHasItsOwnT) {
  Membership members(5000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  EXPECT_TRUE(members.Watch("a", "fast", 500, 0)) << "its beats have to be faster";
  EXPECT_FALSE(members.Watch("a", "patient", 30'000, 0));
  EXPECT_EQ(members.TimesOf("a").beat_ms(), 100);
  EXPECT_TRUE(members.Evaluate(499).empty());
  auto lost = members.Evaluate(500);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].job_uid, "fast");
  EXPECT_EQ(members.Find("a")->state, NodeState::kSuspect) << "nothing new goes there";
  EXPECT_TRUE(members.Evaluate(600).empty()) << "told once";
  EXPECT_TRUE(members.Unwatch("a", "fast"));
  EXPECT_EQ(members.TimesOf("a").beat_ms(), 1000);
  lost = members.Evaluate(5000);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].job_uid, "") << "the node, by the coordinator's T";
  EXPECT_TRUE(members.Evaluate(29'999).empty());
  lost = members.Evaluate(30'000);
  ASSERT_EQ(lost.size(), 1U);
  EXPECT_EQ(lost[0].job_uid, "patient");
}

TEST(MembershipTest, ARuleCountsFromWhenItWasMade) {
  Membership members(5000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  members.Watch("a", "fast", 500, 900);  // beats came every second so far
  EXPECT_TRUE(members.Evaluate(1399).empty());
  EXPECT_EQ(members.Evaluate(1400).size(), 1U);
}

TEST(MembershipTest, ADrainingNodeThatReturnsIsStillDraining) {
  Membership members(1000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  members.OnDrain(1, "maintenance");
  members.OnClosed(1, 10, NodeLoad::kHasTrainers);
  HelloMessage back = Hello("a", "i");
  back.draining = true;
  members.OnHello(2, back, 20, 0);
  EXPECT_EQ(members.Find("a")->state, NodeState::kDraining);
}

TEST(MembershipTest, ADaemonThatDrainedAndEndedHasLeft) {
  struct Case {
    const char* why;
    bool drains;
    bool closes;
    NodeLoad load;
    NodeState after;
  };
  for (const Case& c :
       {Case{"in order", true, true, NodeLoad::kIdle, NodeState::kLeft},
        Case{"before its trainers", true, true, NodeLoad::kHasTrainers, NodeState::kLost},
        Case{"silent", true, false, NodeLoad::kIdle, NodeState::kLost},
        Case{"without a word", false, true, NodeLoad::kIdle, NodeState::kLost}}) {
    Membership members(1000);
    members.OnHello(1, Hello("a", "i"), 0, 0);
    if (c.drains) {
      members.OnDrain(1, "SIGTERM");
    }
    if (c.closes) {
      members.OnClosed(1, 10, c.load);
    }
    EXPECT_FALSE(members.Find("a")->IsGone()) << c.why;
    const std::vector<LostNode> lost = members.Evaluate(2000);
    ASSERT_EQ(lost.size(), 1U) << c.why;
    EXPECT_EQ(lost[0].left, c.after == NodeState::kLeft) << c.why;
    EXPECT_EQ(members.Find("a")->state, c.after) << c.why;
    EXPECT_TRUE(members.Evaluate(9000).empty()) << c.why;
    EXPECT_FALSE(members.OnHeard(1, 9000, 0)) << c.why;
    HelloMessage back = Hello("a", "j");
    EXPECT_EQ(members.OnHello(2, back, 9000, 0).rejected, "") << c.why;
    EXPECT_TRUE(members.Find("a")->TakesWork()) << c.why;
    members.OnClosed(2, 9000, NodeLoad::kIdle);
    ASSERT_EQ(members.Evaluate(19'000).size(), 1U);
    EXPECT_EQ(members.Find("a")->state, NodeState::kLost) << c.why << ": its successor vanished";
    EXPECT_TRUE(members.Forget("a"));
  }
}

TEST(MembershipTest, ANodeThatLeftSaysWhyAndMayBeForgotten) {
  Membership members(1000);
  members.OnHello(1, Hello("a", "i"), 0, 0);
  members.OnDrain(1, "SIGTERM");
  members.OnClosed(1, 10, NodeLoad::kIdle);
  EXPECT_FALSE(members.Forget("a")) << "it may come back";
  members.Evaluate(2000);
  EXPECT_EQ(members.Find("a")->message, "its daemon drained and ended: SIGTERM");
  EXPECT_EQ(NodeStateName(members.Find("a")->state), "LEFT");
  EXPECT_TRUE(members.Forget("a"));
}

TEST(MembershipTest, WhenManyGoSilentAtOnceTheJudgeDoubtsItself) {
  Membership members(1000);
  for (StreamId i = 1; i <= 20; ++i) {
    members.OnHello(i, Hello(absl::StrCat("n", i), "i"), 0, 0);
  }
  for (StreamId i = 1; i <= 10; ++i) {
    members.OnHeard(i, 900, 0);
  }
  EXPECT_TRUE(members.Evaluate(1000).empty()) << "ten of twenty: hold";
  for (StreamId i = 1; i <= 17; ++i) {
    members.OnHeard(i, 1100, 0);
  }
  EXPECT_EQ(members.Evaluate(1200).size(), 3U) << "three of twenty: they are lost";
}

TEST(MembershipTest, TheTimersAreInOrder) {
  for (const int64_t detection : {100, 500, 1000, 5000, 60'000}) {
    const DetectionTimes times{detection};
    EXPECT_LT(times.beat_ms(), times.suspect_ms());
    EXPECT_LT(2 * times.beat_ms(), times.suspect_ms()) << "never under two missed beats";
    EXPECT_LT(times.suspect_ms(), times.lost_ms());
  }
}

}  // namespace
}  // namespace ravel::coordinator
