// Event files against the bytes that TensorBoard's own writer makes of the same values
// (golden/event_file.py), and what is left when one cannot be written.

#include "coordinator/ctl/event_file.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>

#include <absl/strings/escaping.h>
#include <gtest/gtest.h>

#include "tests/testing/process.h"

namespace ravel::ctl {
namespace {

constexpr char kGolden[] =
    "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9"
    "bc00000000000000cb8f6b3f0900001040fc54d94110ac022aad010a0b0a046c6f737315d56d6a40"
    "0a100a09677261645f6e6f726d150000c03f0a140a0d6c6561726e696e675f7261746515a69b443b"
    "0a180a11746f6b656e735f7065725f7365636f6e641500424e460a130a0c737465705f7365636f6e"
    "64731552b89e3e0a0e0a07776f726b65727315000040400a0c0a0565706f636815000000400a160a"
    "0f76616c69646174696f6e5f6c6f737315000080400a110a0a6c6f73735f7363616c651500008047"
    "66562be991000000000000009ed57d430900004040fc54d94110ad022a82010a0b0a046c6f737315"
    "0000c07f0a100a09677261645f6e6f726d150000807f0a140a0d6c6561726e696e675f7261746515"
    "000000000a180a11746f6b656e735f7065725f7365636f6e6415000000000a130a0c737465705f73"
    "65636f6e647315000000000a0e0a07776f726b65727315000000000a0c0a0565706f636815000000"
    "00fc90cb63";

StepRecord FullStep() {
  StepRecord record;
  record.step = 300;
  record.loss = 3.6629536f;
  record.grad_norm = 1.5;
  record.lr = 0.003;
  record.tokens_per_second = 13200.5;
  record.step_seconds = 0.31;
  record.world_size = 3;
  record.epoch = 2;
  record.has_validation_loss = true;
  record.validation_loss = 4;
  record.loss_scale = 65536;
  record.time_ms = 1'700'000'000'250;
  return record;
}

StepRecord BrokenStep() {
  StepRecord record;
  record.step = 301;
  record.loss = std::numeric_limits<float>::quiet_NaN();
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.time_ms = 1'700'000'001'000;
  return record;
}

TEST(EventFileTest, WritesTheBytesOfTensorBoardsOwnWriter) {
  const testing::ScratchFolder scratch;
  const std::string folder = scratch.path() + "/runs/a";
  const auto file = EventFile::Create(folder, "0.uid");
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->Add(FullStep()), absl::OkStatus());
  ASSERT_EQ((*file)->Add(BrokenStep()), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists((*file)->path())) << "it is not whole yet";
  ASSERT_EQ((*file)->Publish(), absl::OkStatus());
  EXPECT_EQ((*file)->path(), folder + "/events.out.tfevents.0.uid");
  EXPECT_EQ((*file)->steps(), 2);
  EXPECT_EQ(absl::BytesToHexString(testing::ReadText((*file)->path())), kGolden);
}

TEST(EventFileTest, AFileThatIsNotPublishedLeavesNothing) {
  const testing::ScratchFolder scratch;
  {
    const auto file = EventFile::Create(scratch.path(), "0.uid");
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ((*file)->Add(FullStep()), absl::OkStatus());
  }
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  testing::WriteText(scratch.path() + "/file", "x");
  EXPECT_FALSE(EventFile::Create(scratch.path() + "/file", "0.uid").ok());
}

}  // namespace
}  // namespace ravel::ctl
