#include "coordinator/jobs/admission.h"

#include <gtest/gtest.h>

#include "coordinator/fleet/rendezvous_board.h"

namespace ravel::coordinator {
namespace {

TEST(AdmissionTest, TheLargestAllowedSizeThatFitsIsChosen) {
  plan::JobSpec spec;
  spec.elastic.sizes = {1, 2, 4, 8};
  spec.device_count = 4;
  EXPECT_EQ(ChooseSize(spec, 0), 0);
  EXPECT_EQ(ChooseSize(spec, 3), 2);
  EXPECT_EQ(ChooseSize(spec, 4), 4);
  EXPECT_EQ(ChooseSize(spec, 100), 4) << "never more than asked for";
  spec.elastic.sizes = {3};
  spec.device_count = 3;
  EXPECT_EQ(ChooseSize(spec, 2), 0);
}

TEST(AdmissionTest, RanksUseFewNodesAndStandTogetherByHost) {
  const std::vector<NodeOffer> offers = {{"a", "h1", "", {0}},
                                         {"b", "h2", "", {0, 1}},
                                         {"c", "h1", "", {1}},
                                         {"d", "h3", "", {0, 1, 2}}};
  const std::vector<RankPlace> places = PlaceRanks(4, offers);
  ASSERT_EQ(places.size(), 4U);
  EXPECT_EQ(places[0].node_id, "b");
  EXPECT_EQ(places[1].node_id, "d");
  EXPECT_EQ(places[3].device, 2);
  EXPECT_EQ(PlaceRanks(4, {offers.rbegin(), offers.rend()}), places)
      << "a function of the set, not of its order";
}

TEST(AdmissionTest, TransportFollowsPlacementUnlessForced) {
  const std::vector<RankPlace> one = {{"a", "h", "", 0}};
  const std::vector<RankPlace> near = {{"a", "h", "", 0}, {"b", "h", "", 0}};
  const std::vector<RankPlace> far = {{"a", "h", "", 0}, {"b", "g", "", 0}};
  const std::vector<RankPlace> unknown = {{"a", "", "", 0}, {"b", "", "", 0}};
  using plan::Transport;
  EXPECT_EQ(*ChooseTransport(Transport::kGloo, one), "local");
  EXPECT_EQ(*ChooseTransport(Transport::kAuto, near), "shm");
  EXPECT_EQ(*ChooseTransport(Transport::kAuto, far), "gloo");
  const std::vector<RankPlace> both = {{"a", "h", "", 0}, {"a", "h", "", 1}, {"b", "g", "", 0}};
  EXPECT_EQ(*ChooseTransport(Transport::kAuto, both), "mixed") << "a has two";
  EXPECT_EQ(*ChooseTransport(Transport::kGloo, both), "gloo");
  EXPECT_EQ(*ChooseTransport(Transport::kAuto, unknown), "gloo")
      << "who does not know its host shares nothing";
  EXPECT_EQ(*ChooseTransport(Transport::kGloo, near), "gloo");
  EXPECT_EQ(ChooseTransport(Transport::kShm, far).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(AdmissionTest, GpusTalkThroughNcclWhereverTheyAre) {
  plan::JobSpec spec;
  spec.cpu_devices = false;
  const RankPlace place = {"a", "h", "", 0};
  EXPECT_EQ(*TransportOf(spec, {place}), "local");
  EXPECT_EQ(*TransportOf(spec, {place, place}), "nccl");
  EXPECT_EQ(*TransportOf(spec, {place, {"b", "g", "", 0}}), "nccl");
  EXPECT_FALSE(SharesMemory("nccl"));
  spec.cpu_devices = true;
  EXPECT_EQ(*TransportOf(spec, {place, place}), "shm");
  EXPECT_TRUE(SharesMemory("shm"));
  EXPECT_FALSE(SharesMemory("gloo"));
  EXPECT_FALSE(SharesMemory("mixed")) << "ranks of other hosts read nothing in place";
}

TEST(RendezvousBoardTest, TheSetIsCompleteWithTheLastRecordAndInRankOrder) {
  RendezvousBoard board;
  board.Reset(3);
  EXPECT_FALSE(board.Add({"world", 2, "c"})->has_value());
  EXPECT_FALSE(board.Add({"other", 0, "x"})->has_value()) << "groups are apart";
  EXPECT_FALSE(board.Add({"world", 0, "a"})->has_value());
  const auto set = board.Add({"world", 1, "b"});
  ASSERT_TRUE(set.ok() && set->has_value());
  EXPECT_EQ((*set)->records, (std::vector<std::string>{"a", "b", "c"}));
}

TEST(RendezvousBoardTest, RecordsAreUsedOnceAndOnlyByMembers) {
  RendezvousBoard board;
  board.Reset(2);
  ASSERT_TRUE(board.Add({"world", 0, "a"}).ok());
  EXPECT_FALSE(board.Add({"world", 0, "a"})->has_value()) << "said again after a broken stream";
  EXPECT_EQ(board.Add({"world", 0, "z"}).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(board.Add({"world", 2, "a"}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(board.Add({"world", -1, "a"}).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(board.Add({"world", 1, "b"})->has_value());
  EXPECT_FALSE(board.Add({"world", 1, "b"})->has_value());
  EXPECT_EQ(board.complete().at("world").records, (std::vector<std::string>{"a", "b"}));
  board.Forget();
  EXPECT_TRUE(board.complete().empty()) << "secrets are not kept longer than they are needed";
  EXPECT_FALSE(board.Add({"world", 1, "b"})->has_value());
  board.Reset(2);
  EXPECT_FALSE(board.Add({"world", 1, "b"})->has_value()) << "a new epoch begins empty";
}

}  // namespace
}  // namespace ravel::coordinator
