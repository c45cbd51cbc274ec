// Frames between daemon and trainer, on a real socketpair.

#include "worker/child_link.h"

#include <thread>

#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ravel {
namespace {

using ::testing::HasSubstr;

struct Pair {
  Pair() { EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0); }
  int fds[2] = {-1, -1};
};

v1::TrainerUp ReportOf(int64_t step) {
  v1::TrainerUp up;
  up.mutable_step()->set_step(step);
  return up;
}

TEST(ChildLinkTest, FramesOfManyThreadsArriveWhole) {
  const Pair pair;
  auto trainer = TrainerLink::Open(pair.fds[0]);
  ASSERT_TRUE(trainer.ok());
  boost::asio::io_context context;
  int64_t sum = 0;
  bool closed = false;
  auto daemon = DaemonLink::Open(context,
                                 pair.fds[1],
                                 {.frame = [&](v1::TrainerUp up) { sum += up.step().step(); },
                                  .closed = [&](absl::Status status) { closed = status.ok(); }});
  ASSERT_TRUE(daemon.ok());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int64_t step = 1; step <= 500; ++step) {
        EXPECT_TRUE((*trainer)->Send(ReportOf(step)).ok());
      }
    });
  }
  std::thread closer([&] {
    for (std::thread& thread : threads) {
      thread.join();
    }
    trainer->reset();
  });
  context.run();
  closer.join();
  EXPECT_EQ(sum, 4 * 500 * 501 / 2);
  EXPECT_TRUE(closed) << "an end between two frames is clean";
}

TEST(ChildLinkTest, LargeFramesGoDownAndTooLargeOnesAreRefused) {
  const Pair pair;
  auto trainer = TrainerLink::Open(pair.fds[0]);
  boost::asio::io_context context;
  auto daemon = DaemonLink::Open(context, pair.fds[1], {});
  ASSERT_TRUE(trainer.ok() && daemon.ok());
  v1::TrainerDown down;
  down.mutable_start()->set_plan(std::string(20 << 20, 'p'));
  ASSERT_TRUE((*daemon)->Send(down).ok());
  absl::StatusOr<v1::TrainerDown> received = absl::UnknownError("nothing yet");
  std::thread reader([&] {
    received = (*trainer)->Receive();
    context.stop();
  });
  context.run();
  reader.join();
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->start().plan().size(), size_t{20 << 20});
  down.mutable_start()->set_plan(std::string(kMaxFrameBytes, 'p'));
  EXPECT_EQ((*daemon)->Send(down).code(), absl::StatusCode::kInvalidArgument);
  v1::TrainerUp up;
  up.mutable_failed()->set_message(std::string(kMaxFrameBytes, 'm'));
  EXPECT_EQ((*trainer)->Send(up).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE((*trainer)->Send(ReportOf(1)).ok()) << "a refused frame sends nothing";
}

TEST(ChildLinkTest, QueueToATrainerThatDoesNotReadIsBounded) {
  const Pair pair;
  boost::asio::io_context context;
  auto daemon = DaemonLink::Open(context, pair.fds[1], {});
  ASSERT_TRUE(daemon.ok());
  v1::TrainerDown down;
  down.mutable_start()->set_plan(std::string(50 << 20, 'p'));
  EXPECT_TRUE((*daemon)->Send(down).ok());
  EXPECT_TRUE((*daemon)->Send(down).ok());
  EXPECT_EQ((*daemon)->Send(down).code(), absl::StatusCode::kResourceExhausted);
  close(pair.fds[0]);
}

struct BadBytes {
  std::string bytes;
  absl::StatusCode code;
  std::string says;
};

std::vector<BadBytes> AllBadBytes() {
  using namespace std::string_literals;
  return {{"\xff\xff\xff\xff"s, absl::StatusCode::kInvalidArgument, "expected at most"},
          {"\x03\x00\x00\x00\xff\xff\xff"s, absl::StatusCode::kInvalidArgument, "message"},
          {"\x08\x00"s, absl::StatusCode::kUnavailable, ""},
          {"\x08\x00\x00\x00\x01"s, absl::StatusCode::kUnavailable, ""}};
}

TEST(ChildLinkTest, BadBytesAreNamedByTheDaemon) {
  for (const BadBytes& bad : AllBadBytes()) {
    const Pair pair;
    boost::asio::io_context context;
    absl::Status closed;
    auto daemon =
        DaemonLink::Open(context, pair.fds[1], {.frame = {}, .closed = [&](absl::Status status) {
                                                  closed = status;
                                                }});
    ASSERT_TRUE(daemon.ok());
    ASSERT_EQ(write(pair.fds[0], bad.bytes.data(), bad.bytes.size()),
              static_cast<ssize_t>(bad.bytes.size()));
    close(pair.fds[0]);
    context.run();
    EXPECT_EQ(closed.code(), bad.code) << closed;
    EXPECT_THAT(closed.ToString(), HasSubstr(bad.says));
  }
}

TEST(ChildLinkTest, BadBytesAreNamedByTheTrainer) {
  for (const BadBytes& bad : AllBadBytes()) {
    const Pair pair;
    auto trainer = TrainerLink::Open(pair.fds[0]);
    ASSERT_TRUE(trainer.ok());
    ASSERT_EQ(write(pair.fds[1], bad.bytes.data(), bad.bytes.size()),
              static_cast<ssize_t>(bad.bytes.size()));
    close(pair.fds[1]);
    const absl::Status status = (*trainer)->Receive().status();
    EXPECT_EQ(status.code(), bad.code) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(bad.says));
  }
}

TEST(ChildLinkTest, ShutdownEndsABlockedReceive) {
  const Pair pair;
  auto trainer = TrainerLink::Open(pair.fds[0]);
  ASSERT_TRUE(trainer.ok());
  std::thread other([&] { (*trainer)->Shutdown(); });
  EXPECT_EQ((*trainer)->Receive().status().code(), absl::StatusCode::kUnavailable);
  other.join();
  EXPECT_EQ((*trainer)->Send(ReportOf(1)).code(), absl::StatusCode::kUnavailable);
  close(pair.fds[1]);
}

TEST(ChildLinkTest, DescriptorThatIsNoSocketIsRefused) {
  EXPECT_EQ(TrainerLink::Open(STDERR_FILENO).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(TrainerLink::Open(9999).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ravel
