// Input of a daemon and a trainer, changed at random: frames between them, messages of the
// coordinator, files of the node.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/certificate.h"
#include "proto/plan.pb.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/fuzz_proto.h"
#include "tests/testing/process.h"
#include "worker/child_link.h"
#include "worker/daemon/look_messages_proto.h"
#include "worker/daemon/node_identity.h"
#include "worker/daemon/notice_file.h"
#include "worker/daemon/preflight_paths_proto.h"

namespace ravel::daemon {
namespace {

using ravel::testing::Accepted;
using ravel::testing::Fuzz;
using ravel::testing::FuzzAnswer;
using ravel::testing::FuzzForm;
using ravel::testing::MessageMutation;
using ravel::testing::ReadText;
using ravel::testing::Refused;
using ravel::testing::ScratchFolder;
using ravel::testing::WriteText;

std::string Frame(const std::string& message) {
  const uint32_t bytes = static_cast<uint32_t>(message.size());
  std::string frame(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
  return frame + message;
}

// A socket whose other end reads `bytes` and then its end.
class FedSocket {
 public:
  explicit FedSocket(std::string_view bytes) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds_), 0);
    const int room = 4 << 20;
    setsockopt(fds_[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
    fed_ = send(fds_[1], bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
    shutdown(fds_[1], SHUT_WR);
  }
  ~FedSocket() { close(fds_[1]); }
  FedSocket(const FedSocket&) = delete;
  FedSocket& operator=(const FedSocket&) = delete;
  int fd() const { return fds_[0]; }  // taken over by a link
  bool fed() const { return fed_; }

 private:
  int fds_[2] = {-1, -1};
  bool fed_ = false;
};

TEST(FuzzDaemon, FramesToATrainer) {
  v1::TrainerDown start;
  start.mutable_start()->set_job_uid("uid");
  start.mutable_start()->set_plan("plan");
  v1::TrainerDown run;
  run.mutable_run()->set_until_step(20);
  const std::string frames = Frame(start.SerializeAsString()) + Frame(run.SerializeAsString());
  Fuzz({.name = "frames_down", .seeds = {frames}}, [](std::string_view input) {
    const FedSocket socket(input);
    const auto link = TrainerLink::Open(socket.fd());
    int frames_read = 0;
    while (link.ok() && socket.fed() && (*link)->Receive().ok()) {
      ++frames_read;
    }
    return frames_read > 0 ? Accepted() : Refused();
  });
}

TEST(FuzzDaemon, FramesToADaemon) {
  v1::TrainerUp ready;
  ready.mutable_ready()->set_step(3);
  v1::TrainerUp step;
  step.mutable_step()->set_loss(1.5f);
  const std::string frames = Frame(ready.SerializeAsString()) + Frame(step.SerializeAsString());
  Fuzz({.name = "frames_up", .seeds = {frames}}, [](std::string_view input) {
    const FedSocket socket(input);
    boost::asio::io_context context;
    int frames_read = 0;
    int closed = 0;
    const auto link = DaemonLink::Open(context,
                                       socket.fd(),
                                       {.frame = [&](v1::TrainerUp) { ++frames_read; },
                                        .closed = [&](absl::Status) { ++closed; }});
    if (!link.ok() || !socket.fed()) {
      return Refused();
    }
    context.run();
    return FuzzAnswer{.accepted = frames_read > 0,
                      .fault = closed == 1 ? "" : absl::StrCat("is closed ", closed, " times")};
  });
}

TEST(FuzzDaemon, LooksAndLaunches) {
  v1::Look look;
  look.set_look_id(3);
  look.add_token_files()->set_path("/data/tokens");
  look.mutable_tokenizer()->set_path("/data/tokenizer.json");
  look.mutable_model_directory()->set_path("/model");
  look.mutable_needs()->set_network("fast");
  look.mutable_needs()->add_environment()->set_secret("team/key");
  const v1::Look prototype;
  const std::vector<std::string> looks = {look.SerializeAsString()};
  Fuzz({.name = "look",
        .seeds = looks,
        .mutate = MessageMutation(prototype, looks, {"/data", "data"})},
       [](std::string_view input) {
         v1::Look message;
         if (!message.ParseFromArray(input.data(), static_cast<int>(input.size()))) {
           return Refused();
         }
         const absl::StatusOr<PathQuery> query = FromProto(message);
         if (!query.ok()) {
           return Refused();
         }
         bool absolute = true;
         for (const NamedPath& path : query->token_files) {
           absolute = absolute && (path.path.empty() || path.path[0] == '/');
         }
         return FuzzAnswer{.accepted = true, .fault = absolute ? "" : "has a relative path"};
       });
  v1::PlannedJob job;
  job.add_train()->set_path("/data/tokens");
  job.set_offload_fraction(0.5);
  v1::StartTrainer start;
  start.set_job(job.SerializeAsString());
  const v1::StartTrainer launch;
  const std::vector<std::string> launches = {start.SerializeAsString()};
  Fuzz({.name = "launch_paths",
        .seeds = launches,
        .mutate = MessageMutation(launch, launches, {"/data"})},
       [](std::string_view input) {
         v1::StartTrainer message;
         if (!message.ParseFromArray(input.data(), static_cast<int>(input.size()))) {
           return Refused();
         }
         (void)PathsOf(message);
         return Accepted();
       });
}

TEST(FuzzDaemon, FilesOfANode) {
  const ScratchFolder scratch;
  constexpr int64_t kStart = 1'764'000'000'000;
  constexpr int64_t kEnd = kStart + 1000'000'000;
  const Authority authority = *MakeAuthority("Ravel test", kStart, kEnd);
  const std::string key = MakePrivateKey();
  const std::string certificate = *IssueCertificate(authority,
                                                    *MakeCertificateRequest(key),
                                                    {.uri = "spiffe://c.ravel/node/n1",
                                                     .serial = "\x41",
                                                     .not_before_ms = kStart,
                                                     .not_after_ms = kEnd});
  ASSERT_EQ(
      SaveIdentity(
          scratch.path(),
          {.node_id = "n1",
           .coordinator = "host:7070",
           .tls = {.authority = authority.certificate, .certificate = certificate, .key = key}}),
      absl::OkStatus());
  const std::string path = scratch.path() + "/identity/node.json";
  Fuzz({.name = "node_identity", .form = FuzzForm::kText, .seeds = {ReadText(path)}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         return LoadIdentity(scratch.path()).ok() ? Accepted() : Refused();
       });
  Fuzz({.name = "certificate_dates", .seeds = {certificate}}, [](std::string_view input) {
    return DatesOf(std::string(input)).ok() ? Accepted() : Refused();
  });
  const std::string notice = scratch.path() + "/notice";
  Fuzz({.name = "notice_file", .form = FuzzForm::kText, .seeds = {"maintenance at noon\n"}},
       [&](std::string_view input) {
         WriteText(notice, std::string(input));
         const auto reason = ReadNotice(notice);
         const bool plain = reason && !reason->empty() && reason->size() <= 300 &&
                            reason->find('\n') == std::string::npos;
         return FuzzAnswer{.accepted = true, .fault = plain ? "" : "is not one short line"};
       });
}

}  // namespace
}  // namespace ravel::daemon
