// ravel-trainer: one rank of a training job under a worker daemon, or next-token inference for
// ravelctl.

#include <cstdio>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <signal.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/logging.h"
#include "common/store/ravel_store_client.h"
#include "worker/checkpoint/writer.h"
#include "worker/trainer/command_box.h"
#include "worker/trainer/daemon_link_proto.h"
#include "worker/trainer/exit_code.h"
#include "worker/trainer/generator.h"
#include "worker/trainer/job_paths.h"
#include "worker/trainer/plan_fault.h"
#include "worker/trainer/position.h"
#include "worker/trainer/subnormals.h"
#include "worker/trainer/trainer.h"
#include "worker/trainer/watchdog.h"

namespace ravel::trainer {
namespace {

constexpr int kExitCheckFailed = 70;
constexpr int kExitUsage = 2;

// Ends at once: threads may be stuck in a kernel or a disk, and their memory is the system's to
// free.
[[noreturn]] void EndProcess(ExitCode code) {
  std::fflush(nullptr);
  _exit(static_cast<int>(code));
}

void InstallHandlers() {
  signal(SIGPIPE, SIG_IGN);
  // CHECK prints and aborts; the daemon knows it by this code.
  signal(SIGABRT, [](int) { _exit(kExitCheckFailed); });
  std::set_new_handler([] {
    constexpr char kText[] = "out of memory\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kText, sizeof(kText) - 1);
    _exit(static_cast<int>(ExitCode::kOutOfMemory));
  });
}

ExitCode Fail(Reporter& reporter, const absl::Status& status) {
  const ExitCode code = CodeOf(status);
  log::Error(absl::StrCat("exit ", static_cast<int>(code), ": ", status.message()));
  reporter.Failed(status).IgnoreError();
  return code;
}

void ShowToStores(const store::StoreIdentity& identity) {
  store::SetStoreIdentitySource([identity] { return std::optional(identity); });
}

// The next command for the watchdog.
absl::StatusOr<Command> Receive(DaemonLinkReporter& link) {
  for (;;) {
    absl::StatusOr<Command> command = link.Receive();
    const auto* const renewed = command.ok() ? std::get_if<UseStoreIdentity>(&*command) : nullptr;
    if (renewed == nullptr) {
      return command;
    }
    ShowToStores(renewed->identity);
  }
}

ExitCode Train(DaemonLinkReporter& link, const Assignment& assignment) {
  log::SetField("job", assignment.spec.name);
  log::SetField("epoch", absl::StrCat(assignment.epoch));
  log::SetField("rank", absl::StrCat(assignment.rank));
  CommandBox box;
  Position position(SystemClock::Get());
  Watchdog watchdog({.reporter = link,
                     .box = box,
                     .position = position,
                     .epoch = assignment.epoch,
                     .receive = [&] { return Receive(link); },
                     .interrupt = [&] { link.Shutdown(); },
                     .exit = [](ExitCode code) { EndProcess(code); }});
  watchdog.Start();
  Trainer trainer(
      {.assignment = assignment,
       .reporter = link,
       .box = box,
       .position = position,
       .clock = SystemClock::Get(),
       .communicator_changed =
           [&](comm::Communicator* communicator) { watchdog.SetCommunicator(communicator); },
       .beat = [&] { watchdog.Beat(); },
       .device_failed =
           [&](const absl::Status& status) {
             EndProcess(Fail(link, WithCode(status, ExitCode::kDevice)));
           }});
  const absl::Status status = trainer.Run();
  if (status.ok()) {
    return ExitCode::kDone;
  }
  return CodeOf(status) == ExitCode::kStopped ? ExitCode::kStopped : Fail(link, status);
}

ExitCode RunUnderDaemon(int fd) {
  auto opened = TrainerLink::Open(fd);
  if (!opened.ok()) {
    log::Error(absl::StrCat("--socket-fd: ", opened.status().message()));
    return ExitCode::kPlanMismatch;
  }
  DaemonLinkReporter link(*std::move(opened));
  const absl::Status exact = CheckSubnormals();
  if (!exact.ok()) {
    return Fail(link, WithCode(exact, ExitCode::kDevice));
  }
  auto command = Receive(link);
  if (!command.ok()) {
    return Fail(link, command.status());
  }
  if (const auto* stop = std::get_if<Stop>(&*command)) {
    return stop->code;
  }
  auto* assignment = std::get_if<Assignment>(&*command);
  if (assignment == nullptr) {
    return Fail(link,
                WithCode(absl::FailedPreconditionError("the first frame is not StartTrainer"),
                         ExitCode::kPlanMismatch));
  }
  const absl::Status allowed = CheckJobPaths(*assignment, RootsOfEnvironment());
  if (!allowed.ok()) {
    return Fail(link, WithCode(allowed, ExitCode::kData));
  }
  const absl::Status planned = ApplyPlanFaults(assignment->plan);
  if (!planned.ok()) {
    return Fail(link, WithCode(planned, ExitCode::kPlanMismatch));
  }
  store::SetStoreToken(assignment->store_token);
  if (assignment->store_identity) {
    ShowToStores(*assignment->store_identity);
  }
  return Train(link, *assignment);
}

int Main(int argc, char** argv) {
  InstallHandlers();
  CLI::App app{"One rank of a Ravel training job; started by ravel-worker and ravelctl"};
  int socket_fd = -1;
  bool generate = false;
  std::string checkpoint;
  auto* fd_option =
      app.add_option("--socket-fd", socket_fd, "connected socket of the worker daemon");
  auto* generate_option =
      app.add_flag("--generate", generate, "answer requests on stdin with tokens on stdout");
  app.add_option("--checkpoint", checkpoint, "step directory to generate from")
      ->needs(generate_option);
  fd_option->excludes(generate_option);
  CLI11_PARSE(app, argc, argv);
  if (generate && !checkpoint.empty()) {
    log::Init("ravel-trainer", log::Format::kConsole, log::Level::kWarning);
    const absl::Status exact = CheckSubnormals();
    const absl::Status status = exact.ok() ? ServeGenerator(checkpoint) : exact;
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      return static_cast<int>(exact.ok() ? ExitCode::kStore : ExitCode::kDevice);
    }
    return 0;
  }
  if (socket_fd < 0) {
    std::fprintf(stderr, "expected --socket-fd N, or --generate --checkpoint STEP_DIR\n");
    return kExitUsage;
  }
  log::Init("ravel-trainer", log::Format::kJson, log::Level::kInfo);
  const ExitCode code = RunUnderDaemon(socket_fd);
  std::fflush(nullptr);
  if (checkpoint::WritersLeftBehind() > 0) {
    EndProcess(code);
  }
  return static_cast<int>(code);
}

}  // namespace
}  // namespace ravel::trainer

int main(int argc, char** argv) {
  return ravel::trainer::Main(argc, argv);
}
