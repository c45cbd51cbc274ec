#include "coordinator/api/fleet_messages_proto.h"

#include <functional>
#include <string>

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

TEST(FleetMessages, NumbersOfLogLinesHaveALimit) {
  v1::Up up;
  up.mutable_log()->add_lines("text");
  EXPECT_TRUE(FromProto(up).ok());
  for (const int64_t seq : {INT64_MAX, int64_t{-1}, INT64_MIN}) {
    up.mutable_log()->set_first_seq(seq);
    EXPECT_EQ(FromProto(up).status().code(), absl::StatusCode::kInvalidArgument) << seq;
  }
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

TEST(FleetMessages, ALookAndItsResultAreCarriedWhole) {
  const v1::Down down = ToProto(DownMessage{1,
                                            2,
                                            Look{7,
                                                 {.token_files = {{"a", "/a"}, {"b", "/b"}},
                                                  .format = TokenFormat::kFlatU32,
                                                  .tokenizer = {"t", "/t"},
                                                  .model_directory = {"m", "/m"},
                                                  .needs = {.namespace_name = "team",
                                                            .environment = {{"MY_KEY", "s3/key"}},
                                                            .network = "fast"}},
                                                 20'000}});
  const v1::Look& look = down.look();
  EXPECT_EQ(look.look_id(), 7);
  EXPECT_EQ(look.limit_ms(), 20'000);
  EXPECT_EQ(look.token_format(), static_cast<int>(TokenFormat::kFlatU32));
  ASSERT_EQ(look.token_files_size(), 2);
  EXPECT_EQ(look.token_files(1).field(), "b");
  EXPECT_EQ(look.token_files(1).path(), "/b");
  EXPECT_EQ(look.tokenizer().path(), "/t");
  EXPECT_EQ(look.model_directory().field(), "m");
  EXPECT_EQ(look.needs().namespace_(), "team");
  EXPECT_EQ(look.needs().network(), "fast");
  EXPECT_EQ(look.needs().environment(0).name(), "MY_KEY");
  EXPECT_EQ(look.needs().environment(0).secret(), "s3/key");

  v1::Up up;
  v1::LookResult& result = *up.mutable_look();
  result.set_look_id(7);
  result.set_refused("busy");
  result.add_token_files()->set_error("bad");
  result.add_token_files()->set_tokens(5);
  result.mutable_token_files(1)->set_largest_id(3);
  result.mutable_token_files(1)->set_sample_digest(std::string(64, 'a'));
  result.set_tokenizer(true);
  result.set_model_error("no config");
  result.set_model_config("{}");
  result.set_model_weights(true);
  result.set_silent_field("spec.data.train[0].path");
  result.set_silence("no answer within 5 s");
  result.set_refused_field("communication.network");
  result.set_refusal("no such network");
  const absl::StatusOr<UpMessage> read = FromProto(up);
  ASSERT_TRUE(read.ok()) << read.status();
  const LookResult found = std::get<LookResult>(*read);
  EXPECT_EQ(found.look_id, 7);
  EXPECT_EQ(found.refused, "busy");
  ASSERT_EQ(found.facts.token_files.size(), 2u);
  EXPECT_EQ(found.facts.token_files[0].error, "bad");
  EXPECT_EQ(found.facts.token_files[1].tokens, 5);
  EXPECT_EQ(found.facts.token_files[1].largest_id, 3);
  EXPECT_EQ(found.facts.token_files[1].sample_digest, std::string(64, 'a'));
  v1::Up wrong = up;
  wrong.mutable_look()->mutable_token_files(1)->set_sample_digest("a");
  EXPECT_TRUE(absl::IsInvalidArgument(FromProto(wrong).status()));
  EXPECT_TRUE(found.facts.tokenizer);
  EXPECT_EQ(found.facts.model.error, "no config");
  EXPECT_EQ(found.facts.model.config, "{}");
  EXPECT_TRUE(found.facts.model.weights);
  EXPECT_EQ(found.facts.silent_field, "spec.data.train[0].path");
  EXPECT_EQ(found.facts.silence, "no answer within 5 s");
  EXPECT_EQ(found.facts.refused_field, "communication.network");
  EXPECT_EQ(found.facts.refusal, "no such network");
}

TEST(FleetMessages, ALookResultOverItsLimitsIsRefused) {
  const auto refused = [](const std::function<void(v1::LookResult&)>& change) {
    v1::Up up;
    change(*up.mutable_look());
    return absl::IsInvalidArgument(FromProto(up).status());
  };
  EXPECT_FALSE(refused([](v1::LookResult&) {}));
  EXPECT_FALSE(refused([](auto& look) { look.set_model_config(std::string(1 << 20, ' ')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_model_config(std::string((1 << 20) + 1, ' ')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_model_error(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_refused(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_silence(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_refused_field(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_refusal(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.set_silent_field(std::string(20'000, 'x')); }));
  EXPECT_TRUE(
      refused([](auto& look) { look.add_token_files()->set_error(std::string(20'000, 'x')); }));
  EXPECT_TRUE(refused([](auto& look) { look.add_token_files()->set_tokens(-1); }));
  EXPECT_TRUE(refused([](auto& look) { look.add_token_files()->set_largest_id(-1); }));
  EXPECT_TRUE(refused([](auto& look) {
    for (int i = 0; i < 2049; ++i) {
      look.add_token_files();
    }
  }));
}

TEST(FleetMessages, AnEmptyFrameIsRefused) {
  v1::Up up;
  up.mutable_trainer()->mutable_frame();
  EXPECT_EQ(FromProto(up).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FromProto(v1::Up()).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ravel::coordinator
