// ravel-coordinator: wiring. Exit codes: 0 stopped by a signal, 1 the state or another fault, 2
// wrong arguments, 3 the address is in use, 4 another coordinator works on the state directory.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/logging.h"
#include "common/net_address.h"
#include "common/time_text.h"
#include "coordinator/fleet_service.h"
#include "coordinator/job_controller.h"
#include "coordinator/jobs_service.h"
#include "coordinator/pause_meter.h"
#include "coordinator/planner_driver.h"
#include "coordinator/sqlite_job_store.h"
#include "coordinator/store_checkpoint_keeper.h"

namespace ravel::coordinator {
namespace {

constexpr const char* kVersion = "0.1.0";
constexpr int kFault = 1;
constexpr int kUsage = 2;
constexpr int kAddressInUse = 3;
constexpr int kLocked = 4;
constexpr int64_t kTickMs = 20;
constexpr int kPoolThreads = 2;
constexpr int kMaxMessageBytes = 64 << 20;
constexpr auto kShutdownTime = std::chrono::seconds(3);

struct Flags {
  bool dev_loopback = false;
  std::string listen = "127.0.0.1:7070";
  std::string state_dir;
  std::string port_file;
  std::string detection = "5s";
  std::string step_timeout = "10m";
  int64_t raise_term = 0;
  bool enable_faults = false;
};

// Empty, or what is wrong.
std::string Check(const Flags& flags, ControllerOptions& options) {
  if (!flags.dev_loopback) {
    return "without --dev-loopback a coordinator needs certificates (mutual TLS), which this "
           "version does not have yet; "
           "pass --dev-loopback for a plaintext coordinator on this host only";
  }
  const absl::StatusOr<HostPort> listen = ParseHostPort(flags.listen);
  if (!listen.ok()) {  // gRPC would take a port modulo 65536
    return absl::StrCat("--listen ", flags.listen, ": ", listen.status().message());
  }
  if (!IsLoopbackHost(listen->host)) {
    return absl::StrCat("--listen ",
                        flags.listen,
                        ": --dev-loopback is plaintext and serves 127.0.0.1, [::1] or "
                        "localhost only");
  }
  const absl::StatusOr<int64_t> detection = ParseDurationMs(flags.detection);
  if (!detection.ok() || *detection < 100 || *detection > 60'000) {
    return absl::StrCat("--detection ", flags.detection, ": expected a duration from 100ms to 60s");
  }
  const absl::StatusOr<int64_t> step_timeout = ParseDurationMs(flags.step_timeout);
  if (!step_timeout.ok() || *step_timeout < 1000) {
    return absl::StrCat(
        "--step-timeout ", flags.step_timeout, ": expected a duration of at least 1s");
  }
  options.detection_ms = *detection;
  options.step_timeout_ms = *step_timeout;
  options.tick_ms = kTickMs;
  return "";
}

int Complain(int code, const std::string& message) {
  std::fprintf(stderr, "ravel-coordinator: %s\n", message.c_str());
  return code;
}

bool WritePortFile(const std::string& path, int port) {
  const std::string part = path + ".part";
  std::ofstream output(part, std::ios::trunc);
  output << port << "\n";
  output.close();
  std::error_code error;
  if (output) {
    std::filesystem::rename(part, path, error);
  }
  return output && !error;
}

std::unique_ptr<grpc::Server> Serve(const std::string& listen,
                                    grpc::Service* jobs,
                                    grpc::Service* fleet,
                                    int* port) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), port);
  builder.RegisterService(jobs);
  builder.RegisterService(fleet);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                             0);  // or a second server would share the port in silence
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 200);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  return builder.BuildAndStart();
}

// The exit code. Streams are closed when it returns; the strand must still run.
int ServeUntilSignal(const Flags& flags,
                     JobsService& jobs,
                     FleetService& fleet,
                     const sigset_t& signals,
                     const std::atomic<bool>& fatal) {
  int port = 0;
  const std::unique_ptr<grpc::Server> server = Serve(flags.listen, &jobs, &fleet, &port);
  if (server == nullptr || port == 0) {
    return Complain(
        kAddressInUse,
        absl::StrCat("--listen ", flags.listen, ": the address is in use or not available"));
  }
  int code = 0;
  if (!flags.port_file.empty() && !WritePortFile(flags.port_file, port)) {
    code = Complain(kFault, absl::StrCat("--port-file ", flags.port_file, ": cannot be written"));
  } else {
    log::Warning("plaintext on loopback: anyone on this host may use this coordinator");
    log::Info(absl::StrCat("listening on port ", port, ", state in ", flags.state_dir));
    int signal = 0;
    sigwait(&signals, &signal);
    log::Info("returning: a signal asked this coordinator to stop");
    code = fatal ? kFault : 0;
  }
  fleet.CloseAll();
  server->Shutdown(std::chrono::system_clock::now() + kShutdownTime);
  server->Wait();
  return code;
}

int Run(const Flags& flags, const ControllerOptions& options, const sigset_t& signals) {
  std::error_code error;
  std::filesystem::create_directories(flags.state_dir, error);
  if (!error) {  // also of a folder that an older release or somebody else made
    std::filesystem::permissions(flags.state_dir, std::filesystem::perms::owner_all, error);
  }
  if (error) {
    return Complain(kFault, absl::StrCat("--state-dir ", flags.state_dir, ": ", error.message()));
  }
  for (const char* folder : {"/metrics", "/logs"}) {
    std::filesystem::create_directories(flags.state_dir + folder, error);
    if (error) {
      return Complain(kFault,
                      absl::StrCat("--state-dir ", flags.state_dir, folder, ": ", error.message()));
    }
  }
  absl::StatusOr<std::unique_ptr<SqliteJobStore>> store = SqliteJobStore::Create(flags.state_dir);
  if (!store.ok()) {
    return Complain(absl::IsAlreadyExists(store.status()) ? kLocked : kFault,
                    std::string(store.status().message()));
  }
  (*store)->RaiseTerm(flags.raise_term);
  const SystemClock clock;
  PlannerDriver planner;
  StoreCheckpointKeeper keeper;
  MetricsLog metrics(flags.state_dir + "/metrics");
  LogStore logs(flags.state_dir + "/logs");
  std::atomic<bool> fatal = false;
  std::unique_ptr<JobController> controller;
  ThreadExecutor pool({.name = "pool", .threads = kPoolThreads, .tick_ms = 0, .tick = {}});
  ThreadExecutor strand(
      {.name = "controller", .threads = 1, .tick_ms = kTickMs, .tick = [&controller] {
         if (controller != nullptr) {
           controller->Tick();
         }
       }});
  FleetService fleet(&strand, &planner);
  ControllerParts parts{
      &clock, &strand, &pool, store->get(), &planner, &keeper, &fleet, &metrics, &logs, {}, {}};
  parts.on_fatal = [&fatal](const absl::Status& status) {
    log::Error(absl::StrCat("this coordinator is replaced: ", std::string(status.message())));
    fatal = true;
    kill(getpid(), SIGTERM);
  };
  PauseMeter pauses;
  const ThreadExecutor pulse(
      {.name = "pulse", .threads = 1, .tick_ms = PauseMeter::kEveryMs, .tick = [&] {
         pauses.Beat(clock.MonotonicMs());
       }});
  parts.take_pause_ms = [&] { return pauses.TakeMs(clock.MonotonicMs()); };
  std::promise<absl::Status> started;
  strand.Post([&] {
    controller = std::make_unique<JobController>(options, parts);
    started.set_value(controller->Start());
  });
  const absl::Status status = started.get_future().get();
  if (!status.ok()) {
    strand.Stop();
    pool.Stop();
    return Complain(kFault, absl::StrCat(flags.state_dir, ": ", std::string(status.message())));
  }
  fleet.SetController(controller.get());
  JobsService jobs({&strand, &pool, controller.get(), &planner, &keeper, kVersion, true});
  const int code = ServeUntilSignal(flags, jobs, fleet, signals, fatal);
  strand.Stop();
  pool.Stop();
  return code;
}

}  // namespace
}  // namespace ravel::coordinator

int main(int argc, char** argv) {
  ravel::coordinator::Flags flags;
  CLI::App app(
      "ravel-coordinator: jobs, membership, plans and checkpoint commits of a Ravel cluster");
  app.add_flag("--dev-loopback", flags.dev_loopback, "plaintext, on this host only");
  app.add_option("--listen", flags.listen, "address of the gRPC server; port 0 takes a free one")
      ->capture_default_str();
  app.add_option("--state-dir", flags.state_dir, "database, metrics and logs")->required();
  app.add_option("--port-file", flags.port_file, "written with the port once the server answers");
  app.add_option("--detection",
                 flags.detection,
                 "a node that is silent for that long is lost; jobs may ask for less")
      ->capture_default_str();
  app.add_option(
         "--step-timeout", flags.step_timeout, "an epoch without progress for that long is stuck")
      ->capture_default_str();
  app.add_option("--raise-term",
                 flags.raise_term,
                 "begin with this term at least: once, after a backup of the state was restored")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
  app.add_flag("--enable-faults", flags.enable_faults, "do what RAVEL_FAULTS says; for tests");
  app.set_version_flag("--version", ravel::coordinator::kVersion);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : ravel::coordinator::kUsage;
  }
  ravel::coordinator::ControllerOptions options;
  const std::string problem = ravel::coordinator::Check(flags, options);
  if (!problem.empty()) {
    return ravel::coordinator::Complain(ravel::coordinator::kUsage, problem);
  }
  umask(027);                           // jobs, tokens of users and metrics are nobody else's
  setenv("GRPC_VERBOSITY", "NONE", 0);  // we say ourselves what went wrong
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);  // a closed terminal is no reason to stop a service
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // all threads: sigwait in main takes them
  ravel::log::Init("ravel-coordinator", ravel::log::Format::kConsole, ravel::log::Level::kInfo);
  if (std::getenv("RAVEL_FAULTS") != nullptr && !flags.enable_faults) {
    ravel::log::Warning("RAVEL_FAULTS is set and ignored: --enable-faults is not");
    unsetenv("RAVEL_FAULTS");
  }
  return ravel::coordinator::Run(flags, options, signals);
}
