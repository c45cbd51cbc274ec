#include "worker/daemon/backlog_proto.h"

#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace ravel::daemon {
namespace {

v1::Up Report(int64_t step, size_t padding = 0) {
  v1::Up up;
  up.mutable_trainer()->set_job_uid(std::string(padding, 'x'));
  up.mutable_trainer()->mutable_frame()->mutable_step()->set_step(step);
  return up;
}

v1::Up Seal(int64_t step) {
  v1::Up up;
  up.mutable_trainer()->mutable_frame()->mutable_seal()->set_step(step);
  return up;
}

v1::Up Result(int64_t id, size_t padding) {
  v1::Up up;
  up.mutable_result()->set_command_id(id);
  up.mutable_result()->set_message(std::string(padding, 'x'));
  return up;
}

// "r7" a report of step 7, "s7" a seal, "c7" the result of command 7.
std::string Names(const Backlog& backlog) {
  std::string text;
  backlog.ForEach([&](const v1::Up& up) {
    const v1::TrainerUp& frame = up.trainer().frame();
    text += up.has_result()    ? "c" + std::to_string(up.result().command_id())
            : frame.has_step() ? "r" + std::to_string(frame.step().step())
                               : "s" + std::to_string(frame.seal().step());
    text += " ";
  });
  return text;
}

TEST(Backlog, KeepsOrderUntilAcknowledged) {
  Backlog backlog(1 << 20);
  backlog.Add(Report(1), 0);
  backlog.Add(Seal(2), 1);
  backlog.Add(Report(3), 2);
  EXPECT_EQ(Names(backlog), "r1 s2 r3 ");
  backlog.Acknowledge(2);
  EXPECT_EQ(Names(backlog), "r3 ");
  backlog.Resend(9, [](const v1::Up&) {});
  backlog.Acknowledge(9);
  EXPECT_EQ(Names(backlog), "r3 ") << "it was sent after that beat";
  backlog.Acknowledge(10);
  EXPECT_TRUE(backlog.empty());
  EXPECT_EQ(backlog.bytes(), 0u);
}

TEST(Backlog, DropsReportsFirstAndSealsNever) {
  Backlog backlog(2000);
  backlog.Add(Seal(1), 0);
  backlog.Add(Result(1, 500), 0);
  backlog.Add(Report(2, 600), 0);
  backlog.Add(Report(3, 600), 0);
  EXPECT_EQ(Names(backlog), "s1 c1 r2 r3 ");
  backlog.Add(Report(4, 600), 0);
  EXPECT_EQ(Names(backlog), "s1 c1 r3 r4 ");
  backlog.Add(Result(2, 1200), 0);
  EXPECT_EQ(Names(backlog), "s1 c1 c2 ");
  backlog.Add(Result(3, 1900), 0);
  EXPECT_EQ(Names(backlog), "s1 c3 ");
  for (int64_t step = 2; step <= 4; ++step) {
    backlog.Add(Seal(step), 0);
  }
  EXPECT_EQ(backlog.TakeDropped(), 5);
  EXPECT_EQ(backlog.TakeDropped(), 0);
}

// An outage of hours costs the same for each message as its first moment.
TEST(Backlog, AFullBacklogTakesMessagesAsFastAsAnEmptyOne) {
  const auto fill = [](Backlog& backlog, int64_t count) {
    const auto start = std::chrono::steady_clock::now();
    for (int64_t step = 0; step < count; ++step) {
      backlog.Add(Report(step, 200), 0);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  Backlog empty(1 << 30);
  const double empty_s = fill(empty, 200'000);
  Backlog full(16 << 20);
  fill(full, 100'000);  // past the limit
  // One scan for each would take a thousand times as long. A second is for a machine that stops.
  EXPECT_LT(fill(full, 200'000), 10 * empty_s + 1);
  EXPECT_LE(full.bytes(), size_t{16} << 20);
}

}  // namespace
}  // namespace ravel::daemon
