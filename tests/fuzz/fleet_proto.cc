// Messages of nodes and of trainers, as plain values.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "common/ckpt/manifest_proto.h"
#include "common/trainer_report_proto.h"
#include "coordinator/api/error_detail_proto.h"
#include "coordinator/api/fleet_messages_proto.h"
#include "proto/fleet.pb.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"

namespace ravel::testing {
namespace {

const std::vector<std::string> kWords = {"w0", "uid-1", "running", "ready", "cpu", "StoreFull"};

v1::Hello SomeHello() {
  v1::Hello hello;
  hello.set_node_id("w0");
  hello.set_incarnation("00112233445566778899aabbccddeeff");
  hello.set_protocol(2);
  hello.set_oldest_protocol(1);
  hello.set_host_id("host");
  hello.set_data_address("10.0.0.7");
  v1::Device& device = *hello.add_devices();
  device.set_kind("cpu");
  device.set_memory_bytes(int64_t{1} << 34);
  v1::HeldTrainer& held = *hello.add_trainers();
  held.set_job_uid("uid-1");
  held.set_epoch(3);
  held.set_attempt(1);
  held.set_state("running");
  held.mutable_has()->set_until_step(20);
  ckpt::Seal seal;
  seal.step = 20;
  seal.files = {{.path = "model/a.safetensors", .size = 4100, .header_bytes = 4096}};
  *held.add_unacknowledged_seals() = ckpt::SealToProto(seal);
  return hello;
}

// One of each kind.
std::vector<std::string> SomeUps() {
  std::vector<v1::Up> ups(8);
  *ups[0].mutable_hello() = SomeHello();
  v1::TrainerBeat& beat = *ups[1].mutable_beat()->add_trainers();
  beat.set_job_uid("uid-1");
  beat.mutable_progress()->add_collectives()->set_group("data");
  v1::TrainerFrame& frame = *ups[2].mutable_trainer();
  frame.set_job_uid("uid-1");
  *frame.mutable_frame()->mutable_seal() = SomeHello().trainers(0).unacknowledged_seals(0);
  ups[3].mutable_exited()->set_reason("ProcessCrash");
  ups[4].mutable_log()->add_lines("a line");
  ups[5].mutable_result()->set_command_id(7);
  ups[6].mutable_look()->add_token_files()->set_tokens(100);
  ups[7].mutable_trainer()->mutable_frame()->mutable_ledger()->add_groups()->add_entries();
  std::vector<std::string> seeds;
  for (const v1::Up& up : ups) {
    seeds.push_back(up.SerializeAsString());
  }
  return seeds;
}

TEST(FuzzFleet, Ups) {
  std::vector<std::string> seeds = SomeUps();
  const v1::Up prototype;
  const auto mutate = MessageMutation(prototype, seeds, kWords);
  Fuzz({.name = "fleet_up", .seeds = seeds, .mutate = mutate}, [](std::string_view input) {
    v1::Up up;
    if (!up.ParseFromArray(input.data(), static_cast<int>(input.size()))) {
      return Refused();
    }
    const bool known =
        up.has_hello() ? coordinator::FromProto(up.hello()).ok() : coordinator::FromProto(up).ok();
    return known ? Accepted() : Refused();
  });
}

TEST(FuzzFleet, Hellos) {
  const std::vector<std::string> seeds = {SomeHello().SerializeAsString()};
  const v1::Hello prototype;
  Fuzz({.name = "fleet_hello", .seeds = seeds, .mutate = MessageMutation(prototype, seeds, kWords)},
       [](std::string_view input) {
         v1::Hello hello;
         return hello.ParseFromArray(input.data(), static_cast<int>(input.size())) &&
                        coordinator::FromProto(hello).ok()
                    ? Accepted()
                    : Refused();
       });
}

TEST(FuzzFleet, TrainerReports) {
  v1::TrainerUp up;
  up.mutable_ready()->add_remarks()->set_reason("GemmsChosenAgain");
  up.mutable_ready()->set_restore_seconds(0.5);
  std::vector<std::string> seeds = {up.SerializeAsString()};
  up.mutable_step()->set_loss(3.5f);
  seeds.push_back(up.SerializeAsString());
  up.mutable_save_failed()->set_reason("StoreFull");
  seeds.push_back(up.SerializeAsString());
  v1::LedgerOfGroup& group = *up.mutable_ledger()->add_groups();
  group.add_members(3);
  group.add_entries()->set_kind("all_gather");
  seeds.push_back(up.SerializeAsString());
  const v1::TrainerUp prototype;
  Fuzz({.name = "trainer_up", .seeds = seeds, .mutate = MessageMutation(prototype, seeds, kWords)},
       [](std::string_view input) {
         v1::TrainerUp message;
         if (!message.ParseFromArray(input.data(), static_cast<int>(input.size()))) {
           return Refused();
         }
         const auto back = [](const auto& part) {
           const auto once = ToProto(FromProto(part));
           return ToProto(FromProto(once)).SerializeAsString() == once.SerializeAsString();
         };
         return AcceptedIf(back(message.ready()) && back(message.step()) &&
                           back(message.save_failed()) && back(message.ledger()));
       });
}

}  // namespace
}  // namespace ravel::testing
