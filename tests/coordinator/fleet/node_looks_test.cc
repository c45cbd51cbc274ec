#include "coordinator/fleet/node_looks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/version.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kLimitMs = 20'000;

HelloMessage HelloOf(const std::string& id, const std::string& kind, int64_t protocol = 2) {
  HelloMessage hello;
  hello.node_id = id;
  hello.incarnation = "incarnation of " + id;
  hello.protocol = protocol;
  hello.oldest_protocol = 1;
  hello.devices.push_back({kind, "test", 1 << 30, id});
  return hello;
}

class NodeLooksTest : public ::testing::Test {
 protected:
  // A node whose stream has this number.
  void AddNode(StreamId stream, const HelloMessage& hello) {
    ASSERT_EQ(members_.OnHello(stream, hello, now_ms_, 0).rejected, "");
  }
  // Asks; the answer is kept under a number.
  int Ask(std::set<std::string> but_not = {}, bool cpu = true) {
    const int number = static_cast<int>(answers_.size());
    answers_.emplace_back();
    looks_.Add({.query = {.token_files = {{"spec.data.train[0].path", "/a"}}},
                .cpu_devices = cpu,
                .but_not = std::move(but_not),
                .limit_ms = kLimitMs,
                .done =
                    [this, number](LookAnswer answer) {
                      EXPECT_FALSE(answers_[static_cast<size_t>(number)].has_value());
                      answers_[static_cast<size_t>(number)] = std::move(answer);
                    },
                .wanted = [this] { return wanted_; }},
               members_,
               await_nodes_,
               now_ms_);
    Advance();
    return number;
  }
  // Asks each node for a network; the answers come into `told`.
  void AskEach(std::vector<LookAnswer>* told) {
    looks_.Add({.query = {.needs = {.network = "fast"}},
                .each = true,
                .limit_ms = kLimitMs,
                .done = [told](LookAnswer answer) { told->push_back(std::move(answer)); }},
               members_,
               await_nodes_,
               now_ms_);
    Advance();
  }
  void Advance() {
    for (LookOrder& order : looks_.Advance(members_, await_nodes_, now_ms_)) {
      sent_.push_back(std::move(order));
    }
  }
  const std::optional<LookAnswer>& Answer(int number) const {
    return answers_[static_cast<size_t>(number)];
  }
  static LookResult Found(const LookOrder& order) {
    return {.look_id = order.look.look_id, .facts = {.token_files = {{.tokens = 5}}}};
  }

  Membership members_{5000};
  NodeLooks looks_;
  bool await_nodes_ = false;
  bool wanted_ = true;
  int64_t now_ms_ = 1000;
  std::vector<LookOrder> sent_;
  std::vector<std::optional<LookAnswer>> answers_;
};

TEST_F(NodeLooksTest, ANodeWithTheDevicesIsAskedAndItsAnswerIsTheAnswer) {
  AddNode(1, HelloOf("a", "gpu"));
  AddNode(2, HelloOf("b", "cpu"));
  const int ask = Ask();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].stream, 2u);
  EXPECT_EQ(sent_[0].look.limit_ms, kLimitMs);
  EXPECT_EQ(sent_[0].look.query.token_files[0].path, "/a");
  looks_.OnResult(1, Found(sent_[0]));
  EXPECT_FALSE(Answer(ask).has_value()) << "said on another stream";
  looks_.OnResult(2, Found(sent_[0]));
  ASSERT_TRUE(Answer(ask).has_value());
  EXPECT_TRUE(Answer(ask)->status.ok());
  EXPECT_EQ(Answer(ask)->node_id, "b");
  EXPECT_EQ(Answer(ask)->facts.token_files[0].tokens, 5);
  looks_.OnResult(2, Found(sent_[0]));  // said twice: nobody waits any more
}

TEST_F(NodeLooksTest, WithoutANodeOfTheKindTheAnswerComesAtOnce) {
  AddNode(1, HelloOf("a", "cpu"));
  const int gpu = Ask({}, false);
  EXPECT_EQ(Answer(gpu)->status, absl::NotFoundError("no gpu worker is here"));
  const int other = Ask({"a"});
  EXPECT_TRUE(absl::IsNotFound(Answer(other)->status));
  members_.SetHold("a", NodeHold::kDrained, "");
  EXPECT_EQ(Answer(Ask())->status, absl::NotFoundError("no cpu worker is here"));
  EXPECT_TRUE(sent_.empty());
}

TEST_F(NodeLooksTest, ADaemonOfAnOlderReleaseIsNotAsked) {
  AddNode(1, HelloOf("old", "cpu", 1));
  EXPECT_TRUE(absl::IsNotFound(Answer(Ask())->status));
  AddNode(2, HelloOf("new", "cpu"));
  Ask();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].stream, 2u);
}

TEST_F(NodeLooksTest, LooksGoToTheNodeWithTheFewestAndOnlySoManyAtOnce) {
  AddNode(1, HelloOf("a", "cpu"));
  AddNode(2, HelloOf("b", "cpu"));
  const int64_t room = 2 * NodeLooks::kMaxOfNode;
  for (int64_t i = 0; i < room + 3; ++i) {
    Ask();
  }
  ASSERT_EQ(static_cast<int64_t>(sent_.size()), room);
  EXPECT_EQ(
      std::count_if(
          sent_.begin(), sent_.end(), [](const LookOrder& order) { return order.stream == 1; }),
      NodeLooks::kMaxOfNode);
  looks_.OnResult(sent_[0].stream, Found(sent_[0]));
  Advance();
  ASSERT_EQ(static_cast<int64_t>(sent_.size()), room + 1) << "the first that waits";
  EXPECT_EQ(sent_.back().stream, sent_[0].stream);
  for (std::size_t i = 0; i < NodeLooks::kMaxWaiting; ++i) {
    Ask();
  }
  EXPECT_TRUE(absl::IsResourceExhausted(answers_.back()->status)) << answers_.back()->status;
}

TEST_F(NodeLooksTest, ANodeThatIsSilentIsGivenUpAfterTheLimit) {
  AddNode(1, HelloOf("a", "cpu"));
  const int ask = Ask();
  now_ms_ += kLimitMs + NodeLooks::GraceMs(kLimitMs) - 1;
  members_.OnHeard(1, now_ms_, 0);
  Advance();
  EXPECT_FALSE(Answer(ask).has_value());
  ++now_ms_;
  Advance();
  ASSERT_TRUE(Answer(ask).has_value());
  EXPECT_TRUE(absl::IsUnavailable(Answer(ask)->status));
  EXPECT_EQ(Answer(ask)->status.message(), "node a did not answer while it looked at the paths");
  EXPECT_EQ(Answer(ask)->node_id, "a");
  looks_.OnResult(1, Found(sent_[0]));  // too late, and harmless
}

TEST_F(NodeLooksTest, ANodeWhoseStreamEndsIsGivenUpAtOnce) {
  AddNode(1, HelloOf("a", "cpu"));
  const int ask = Ask();
  members_.OnClosed(1, now_ms_, NodeLoad::kHasTrainers);
  Advance();
  ASSERT_TRUE(Answer(ask).has_value());
  EXPECT_EQ(Answer(ask)->status.message(), "node a went away while it looked at the paths");
  AddNode(2, HelloOf("a", "cpu"));  // on another stream: what the old one says counts no more
  const int again = Ask();
  looks_.OnResult(1, Found(sent_[1]));
  EXPECT_FALSE(Answer(again).has_value());
}

TEST_F(NodeLooksTest, AnAnswerThatDoesNotFitOrARefusalIsNoAnswer) {
  AddNode(1, HelloOf("a", "cpu"));
  int ask = Ask();
  LookResult result = Found(sent_.back());
  result.facts.token_files.emplace_back();
  looks_.OnResult(1, result);
  EXPECT_TRUE(absl::IsUnavailable(Answer(ask)->status)) << Answer(ask)->status;
  ask = Ask();
  looks_.OnResult(1, {.look_id = sent_.back().look.look_id, .refused = "busy"});
  EXPECT_EQ(Answer(ask)->status, absl::UnavailableError("node a: busy"));
  ask = Ask();  // of a path that hangs there are no facts
  looks_.OnResult(1,
                  {.look_id = sent_.back().look.look_id,
                   .facts = {.silent_field = "spec.data.train[0].path", .silence = "no answer"}});
  EXPECT_TRUE(Answer(ask)->status.ok());
  EXPECT_EQ(Answer(ask)->facts.silent_field, "spec.data.train[0].path");
}

TEST_F(NodeLooksTest, WhoeverIsGoneHoldsNoPlace) {
  AddNode(1, HelloOf("a", "cpu"));
  for (int64_t i = 0; i <= NodeLooks::kMaxOfNode; ++i) {
    Ask();
  }
  wanted_ = false;
  Advance();
  wanted_ = true;
  for (const auto& answer : answers_) {
    EXPECT_FALSE(answer.has_value());
  }
  const size_t before = sent_.size();
  Ask();
  EXPECT_EQ(sent_.size(), before + 1) << "at once";
}

TEST_F(NodeLooksTest, JustAfterARestartNodesAreAwaited) {
  await_nodes_ = true;
  const int first = Ask();
  EXPECT_FALSE(Answer(first).has_value());
  AddNode(1, HelloOf("a", "cpu"));
  Advance();
  ASSERT_EQ(sent_.size(), 1u);
  const int second = Ask({}, false);
  await_nodes_ = false;  // none came back in time
  Advance();
  EXPECT_TRUE(absl::IsNotFound(Answer(second)->status));
}

TEST_F(NodeLooksTest, EachNodeThatIsHereIsAskedForNeeds) {
  AddNode(1, HelloOf("a", "cpu", kNeedsProtocol));
  AddNode(2, HelloOf("b", "cpu", kNeedsProtocol));
  AddNode(3, HelloOf("c", "gpu", kNeedsProtocol));
  AddNode(4, HelloOf("old", "cpu", kLookProtocol));
  members_.SetHold("b", NodeHold::kDrained, "");
  std::vector<LookAnswer> told;
  AskEach(&told);
  ASSERT_EQ(sent_.size(), 2u) << "one that takes no work is asked, too";
  EXPECT_EQ(sent_[0].look.query.needs.network, "fast");
  looks_.OnResult(sent_[0].stream,
                  {.look_id = sent_[0].look.look_id,
                   .facts = {.refused_field = "communication.network", .refusal = "none"}});
  members_.OnClosed(2, now_ms_, NodeLoad::kHasTrainers);
  Advance();
  ASSERT_EQ(told.size(), 2u);
  for (const LookAnswer& answer : told) {
    EXPECT_EQ(answer.answers, 2);
    EXPECT_EQ(answer.unasked, 1) << "of an older release";
  }
  EXPECT_TRUE(told[0].status.ok());
  EXPECT_EQ(told[0].node_id, "a");
  EXPECT_EQ(told[0].facts.refusal, "none");
  EXPECT_EQ(told[1].status.message(), "node b went away while it looked at the paths");
}

TEST_F(NodeLooksTest, WithoutANodeThatCanBeAskedForNeedsThereIsOneAnswer) {
  AddNode(1, HelloOf("old", "cpu", kLookProtocol));
  std::vector<LookAnswer> told;
  AskEach(&told);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_TRUE(absl::IsNotFound(told[0].status));
  EXPECT_EQ(told[0].unasked, 1);
  await_nodes_ = true;
  AskEach(&told);
  EXPECT_EQ(told.size(), 1u) << "one may come back";
  AddNode(2, HelloOf("new", "cpu", kNeedsProtocol));
  Advance();
  ASSERT_EQ(sent_.size(), 1u);
  EXPECT_EQ(sent_[0].stream, 2u);
}

TEST_F(NodeLooksTest, AFleetIsAskedUpToALimit) {
  const auto nodes = static_cast<StreamId>(NodeLooks::kMaxEach) + 3;
  for (StreamId stream = 1; stream <= nodes; ++stream) {
    AddNode(stream, HelloOf("n" + std::to_string(stream), "cpu", kNeedsProtocol));
  }
  std::vector<LookAnswer> told;
  AskEach(&told);
  EXPECT_EQ(sent_.size(), NodeLooks::kMaxEach);
  now_ms_ += 2 * kLimitMs;
  Advance();
  ASSERT_EQ(told.size(), NodeLooks::kMaxEach);
  EXPECT_EQ(told[0].unasked, 3);
}

TEST_F(NodeLooksTest, AnotherTermHasOtherIds) {
  AddNode(1, HelloOf("a", "cpu"));
  looks_.SetTerm(3);
  Ask();
  NodeLooks later;
  later.SetTerm(4);
  later.Add({.limit_ms = kLimitMs, .done = [](const LookAnswer&) {}}, members_, false, now_ms_);
  EXPECT_NE(later.Advance(members_, false, now_ms_)[0].look.look_id, sent_[0].look.look_id);
}

}  // namespace
}  // namespace ravel::coordinator
