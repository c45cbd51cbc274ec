#include "worker/trainer/daemon_link_proto.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/trainer.pb.h"

namespace ravel::trainer {
namespace {

std::string ReadExactly(int fd, size_t bytes) {
  std::string read(bytes, '\0');
  EXPECT_EQ(recv(fd, read.data(), bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
  return read;
}

// The next frame at the daemon's end: u32 little-endian length, then the message.
v1::TrainerUp NextFrame(int fd) {
  uint32_t length = 0;
  for (const char byte : ReadExactly(fd, sizeof(length))) {
    length = (length >> 8) | static_cast<uint32_t>(static_cast<unsigned char>(byte)) << 24;
  }
  v1::TrainerUp frame;
  EXPECT_TRUE(frame.ParseFromString(ReadExactly(fd, length)));
  return frame;
}

TEST(DaemonLinkReporter, ReadySaysAllThatIsReported) {
  std::array<int, 2> fds = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()), 0);
  auto link = TrainerLink::Open(fds[0]);
  ASSERT_TRUE(link.ok()) << link.status();
  DaemonLinkReporter reporter(*std::move(link));
  const TrainerReady report = {.step = 7,
                               .planned_bytes = 8,
                               .measured_bytes = 9,
                               .restore_seconds = 0.5,
                               .remarks = {{"One", "first"}, {"Two", "second"}}};
  ASSERT_TRUE(reporter.Ready(report).ok());
  const v1::TrainerUp frame = NextFrame(fds[1]);
  close(fds[1]);
  ASSERT_TRUE(frame.has_ready());
  EXPECT_EQ(frame.ready().step(), report.step);
  EXPECT_EQ(frame.ready().planned_bytes(), report.planned_bytes);
  EXPECT_EQ(frame.ready().measured_bytes(), report.measured_bytes);
  EXPECT_EQ(frame.ready().restore_seconds(), report.restore_seconds);
  ASSERT_EQ(frame.ready().remarks_size(), 2);
  EXPECT_EQ(frame.ready().remarks(0).reason(), "One");
  EXPECT_EQ(frame.ready().remarks(1).reason(), "Two");
  EXPECT_EQ(frame.ready().remarks(1).message(), "second");
}

TEST(DaemonLinkReporter, ARenewedIdentityForStoresArrivesWhole) {
  std::array<int, 2> fds = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()), 0);
  auto link = TrainerLink::Open(fds[0]);
  ASSERT_TRUE(link.ok()) << link.status();
  DaemonLinkReporter reporter(*std::move(link));
  v1::TrainerDown frame;
  frame.mutable_store_identity()->set_authority("a");
  frame.mutable_store_identity()->set_certificate("c");
  frame.mutable_store_identity()->set_key("k");
  const std::string body = frame.SerializeAsString();
  std::string sent(4, '\0');
  sent[0] = static_cast<char>(body.size());
  sent += body;
  ASSERT_EQ(send(fds[1], sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));
  const absl::StatusOr<Command> command = reporter.Receive();
  close(fds[1]);
  ASSERT_TRUE(command.ok()) << command.status();
  const auto* const renewed = std::get_if<UseStoreIdentity>(&*command);
  ASSERT_NE(renewed, nullptr);
  EXPECT_EQ(renewed->identity.authority, "a");
  EXPECT_EQ(renewed->identity.certificate, "c");
  EXPECT_EQ(renewed->identity.key, "k");
}

TEST(DaemonLinkReporter, AFailedSaveSaysAllThatIsReported) {
  std::array<int, 2> fds = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()), 0);
  auto link = TrainerLink::Open(fds[0]);
  ASSERT_TRUE(link.ok()) << link.status();
  DaemonLinkReporter reporter(*std::move(link));
  ASSERT_TRUE(reporter
                  .SaveFailed({.step = 7,
                               .sequence = 8,
                               .attempt = 2,
                               .reason = "StoreFull",
                               .message = "no space",
                               .skipped = true})
                  .ok());
  ASSERT_TRUE(reporter.SaveStarted(9, 3, 2).ok());
  const v1::TrainerUp failed = NextFrame(fds[1]);
  const v1::TrainerUp started = NextFrame(fds[1]);
  close(fds[1]);
  ASSERT_TRUE(failed.has_save_failed());
  EXPECT_EQ(failed.save_failed().step(), 7);
  EXPECT_EQ(failed.save_failed().sequence(), 8);
  EXPECT_EQ(failed.save_failed().save_attempt(), 2);
  EXPECT_EQ(failed.save_failed().reason(), "StoreFull");
  EXPECT_EQ(failed.save_failed().message(), "no space");
  EXPECT_TRUE(failed.save_failed().skipped());
  ASSERT_TRUE(started.has_save_started());
  EXPECT_EQ(started.save_started().save_attempt(), 2);
}

}  // namespace
}  // namespace ravel::trainer
