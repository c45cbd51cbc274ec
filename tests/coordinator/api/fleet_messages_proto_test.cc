#include "coordinator/api/fleet_messages_proto.h"

#include <gtest/gtest.h>

namespace ravel::coordinator {
namespace {

TEST(FleetMessages, ReadyCarriesItsRemarks) {
  v1::Up up;
  up.mutable_trainer()->set_job_uid("uid");
  v1::TrainerReady& ready = *up.mutable_trainer()->mutable_frame()->mutable_ready();
  ready.set_step(7);
  ready.set_planned_bytes(8);
  ready.set_measured_bytes(9);
  ready.set_restore_seconds(0.5);
  for (const char* reason : {"One", "Two"}) {
    v1::StartRemark& remark = *ready.add_remarks();
    remark.set_reason(reason);
    remark.set_message("text");
  }
  const absl::StatusOr<UpMessage> read = FromProto(up);
  ASSERT_TRUE(read.ok()) << read.status();
  const auto* frame = std::get_if<TrainerFrame>(&*read);
  ASSERT_NE(frame, nullptr);
  const auto* found = std::get_if<TrainerReady>(&frame->frame);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->step, 7);
  EXPECT_EQ(found->planned_bytes, 8);
  EXPECT_EQ(found->measured_bytes, 9);
  EXPECT_EQ(found->restore_seconds, 0.5);
  ASSERT_EQ(found->remarks.size(), 2U);
  EXPECT_EQ(found->remarks[1].reason, "Two");
  EXPECT_EQ(found->remarks[1].message, "text");
}

TEST(FleetMessages, AFailedSaveIsReadWhole) {
  v1::Up up;
  v1::SaveFailed& message = *up.mutable_trainer()->mutable_frame()->mutable_save_failed();
  message.set_step(7);
  message.set_sequence(8);
  message.set_save_attempt(2);
  message.set_reason("StoreFull");
  message.set_message("no space");
  message.set_skipped(true);
  absl::StatusOr<UpMessage> read = FromProto(up);
  ASSERT_TRUE(read.ok()) << read.status();
  const SaveFailed failed = std::get<SaveFailed>(std::get<TrainerFrame>(*read).frame);
  EXPECT_EQ(failed.step, 7);
  EXPECT_EQ(failed.sequence, 8);
  EXPECT_EQ(failed.attempt, 2);
  EXPECT_EQ(failed.reason, "StoreFull");
  EXPECT_EQ(failed.message, "no space");
  EXPECT_TRUE(failed.skipped);
  up.mutable_trainer()->mutable_frame()->mutable_save_started()->set_step(3);
  read = FromProto(up);
  ASSERT_TRUE(read.ok()) << read.status();
  const SaveStarted started = std::get<SaveStarted>(std::get<TrainerFrame>(*read).frame);
  EXPECT_EQ(started.step, 3);
  EXPECT_EQ(started.attempt, 1) << "of a trainer that does not say";
}

TEST(FleetMessages, ABeatSaysWhatItHasHeardAndHowFarItsRestoresAre) {
  v1::Up up;
  v1::Beat& message = *up.mutable_beat();
  message.set_seq(3);
  message.set_heard_command(17);
  message.add_trainers()->mutable_progress()->set_moved_bytes(1 << 20);
  const absl::StatusOr<UpMessage> read = FromProto(up);
  ASSERT_TRUE(read.ok()) << read.status();
  const BeatMessage beat = std::get<BeatMessage>(*read);
  EXPECT_EQ(beat.seq, 3);
  EXPECT_EQ(beat.heard_command, 17);
  ASSERT_EQ(beat.trainers.size(), 1U);
  EXPECT_EQ(beat.trainers[0].moved_bytes, 1 << 20);
}

TEST(FleetMessages, ReleasesTellWhatTheySpeakAndWhatTheyWouldWrite) {
  v1::Hello hello;
  hello.set_node_id("a");
  hello.set_protocol(3);
  hello.set_oldest_protocol(2);
  const absl::StatusOr<HelloMessage> read = FromProto(hello);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->protocol, 3);
  EXPECT_EQ(read->oldest_protocol, 2);
  const v1::Down welcome = ToProto(DownMessage{1, 2, Welcome{"cluster", 50, {}, 2}});
  EXPECT_EQ(welcome.welcome().protocol(), 2);
  Launch launch;
  launch.trainers.emplace_back().save_plan_hash = "hash";
  const v1::Down order = ToProto(DownMessage{1, 3, launch});
  EXPECT_EQ(order.launch().trainers(0).save_plan_hash(), "hash");
}

TEST(FleetMessages, AnEmptyFrameIsRefused) {
  v1::Up up;
  up.mutable_trainer()->mutable_frame();
  EXPECT_EQ(FromProto(up).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FromProto(v1::Up()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ravel::coordinator
