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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/logging.h"
#include "common/mutex.h"
#include "common/net_address.h"
#include "common/time_text.h"
#include "coordinator/access/namespace_roots.h"
#include "coordinator/access/security.h"
#include "coordinator/api/access_gate_service.h"
#include "coordinator/api/access_service.h"
#include "coordinator/api/fleet_service.h"
#include "coordinator/api/jobs_service.h"
#include "coordinator/api/rpc_meter_service.h"
#include "coordinator/http/http_pages.h"
#include "coordinator/jobs/job_controller.h"
#include "coordinator/jobs/last_resort.h"
#include "coordinator/jobs/pause_meter.h"
#include "coordinator/jobs/planner_driver.h"
#include "coordinator/saves/store_checkpoint_keeper.h"
#include "coordinator/setup_main.h"
#include "coordinator/store/sqlite_job_store.h"
#include "coordinator/store/store_writer.h"
#include "coordinator/upkeep.h"

namespace ravel::coordinator {
namespace {

constexpr const char* kVersion = "0.1.0";
constexpr int kFault = 1;
constexpr int kUsage = 2;
constexpr int kAddressInUse = 3;
constexpr int kLocked = 4;
constexpr int64_t kTickMs = 20;
constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
constexpr int64_t kAccessTickMs = 1000;
constexpr int kMaxMessageBytes = 64 << 20;
constexpr auto kShutdownTime = std::chrono::seconds(3);
constexpr int64_t kHangMs = 1000;

struct Flags {
  bool dev_loopback = false;
  std::string listen = "127.0.0.1:7070";
  std::string state_dir;
  std::string port_file;
  std::string detection = "5s";
  std::string step_timeout = "10m";
  std::string certificate_time = "24h";
  std::string backup_every = "1h";
  int64_t raise_term = 0;
  std::string http_listen = "off";
  std::string http_port_file;
  std::string http_token_file;   // empty: plaintext on loopback
  std::string http_certificate;  // empty: the coordinator's own
  std::string http_key;
  std::string namespace_roots;  // file; empty: jobs may name any path
  bool enable_faults = false;
};

// The coordinator's own certificate has the names of its address, so it serves the pages, too.
http::PageFlags PageFlagsOf(const Flags& flags) {
  http::PageFlags pages = {.listen = flags.http_listen,
                           .token_file = flags.http_token_file,
                           .certificate_file = flags.http_certificate,
                           .key_file = flags.http_key};
  if (pages.certificate_file.empty() && pages.key_file.empty() && !flags.dev_loopback) {
    AuthorityFiles own;  // their paths alone
    own.folder = flags.state_dir + "/tls";
    pages.certificate_file = own.ServerPath();
    pages.key_file = own.ServerKeyPath();
  }
  return pages;
}

// Empty, or what is wrong.
std::string Check(const Flags& flags, ControllerOptions& options) {
  const absl::StatusOr<HostPort> listen = ParseHostPort(flags.listen);
  if (!listen.ok()) {  // gRPC would take a port modulo 65536
    return absl::StrCat("--listen ", flags.listen, ": ", listen.status().message());
  }
  if (flags.dev_loopback && !IsLoopbackHost(listen->host)) {
    return absl::StrCat("--listen ",
                        flags.listen,
                        ": --dev-loopback is plaintext and serves 127.0.0.1, [::1] or "
                        "localhost only");
  }
  const absl::StatusOr<int64_t> detection = ParseDurationMs(flags.detection);
  if (!detection.ok() || *detection < 100 || *detection > 60'000) {
    return absl::StrCat("--detection ", flags.detection, ": expected a duration from 100ms to 60s");
  }
  const absl::StatusOr<int64_t> certificate = ParseDurationMs(flags.certificate_time);
  if (!certificate.ok() || *certificate < 3000 || *certificate > 90 * kDayMs) {
    return absl::StrCat(
        "--certificate-time ", flags.certificate_time, ": expected a duration from 3s to 90d");
  }
  const absl::StatusOr<int64_t> backup = ParseDurationMs(flags.backup_every);
  if (!backup.ok() || *backup < 1000) {
    return absl::StrCat("--backup-every ", flags.backup_every, ": expected at least 1s");
  }
  const absl::StatusOr<int64_t> step_timeout = ParseDurationMs(flags.step_timeout);
  if (!step_timeout.ok() || *step_timeout < 1000) {
    return absl::StrCat(
        "--step-timeout ", flags.step_timeout, ": expected a duration of at least 1s");
  }
  if (flags.http_listen != "off") {
    const absl::Status pages = http::SecurityOf(PageFlagsOf(flags)).status();
    if (!pages.ok()) {
      return std::string(pages.message());
    }
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
                                    Security* security,
                                    RpcMeter* meter,
                                    const std::vector<grpc::Service*>& services,
                                    int* port) {
  grpc::EnableDefaultHealthCheckService(true);  // grpc.health.v1: serving until it shuts down
  grpc::ServerBuilder builder;
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> hooks;
  hooks.push_back(MeterCalls(meter));
  if (security == nullptr) {
    builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), port);
  } else {
    builder.AddListeningPort(
        listen, GateCredentials(security->registry.get(), &security->calls, &security->live), port);
    hooks.push_back(CallWatcher(security->registry.get(), &security->live));
  }
  builder.experimental().SetInterceptorCreators(std::move(hooks));
  for (grpc::Service* const service : services) {
    builder.RegisterService(service);
  }
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);  // or a second server shares the port
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxCallsOfConnection);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 200);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  return builder.BuildAndStart();
}

// Null for --dev-loopback.
absl::StatusOr<std::unique_ptr<Security>> SecurityFor(const Flags& flags) {
  if (flags.dev_loopback) {
    return nullptr;
  }
  ASSIGN_OR_RETURN(const int64_t node_ms, ParseDurationMs(flags.certificate_time));
  ASSIGN_OR_RETURN(std::unique_ptr<Security> security, OpenSecurity(flags.state_dir, node_ms));
  UseOwnIdentityForStores(flags.state_dir);
  return security;
}

// Null where no file is named.
absl::StatusOr<std::unique_ptr<NamespaceRootsFile>> RootsFor(const Flags& flags) {
  if (flags.namespace_roots.empty()) {
    return nullptr;
  }
  return NamespaceRootsFile::Open(flags.namespace_roots);
}

// The exit code. Streams are closed when it returns; the strand must still run.
int ServeUntilSignal(const Flags& flags,
                     Security* security,
                     JobsServiceParts parts,
                     FleetService& fleet,
                     RpcMeter& meter,
                     const sigset_t& signals,
                     const std::atomic<bool>& fatal,
                     LastResort& last_resort) {
  int port = 0;
  JobsService jobs(std::move(parts));
  AccessService access(security == nullptr ? nullptr : security->registry.get());
  const std::unique_ptr<grpc::Server> server =
      Serve(flags.listen, security, &meter, {&jobs, &fleet, &access}, &port);
  if (server == nullptr || port == 0) {
    return Complain(
        kAddressInUse,
        absl::StrCat("--listen ", flags.listen, ": the address is in use or not available"));
  }
  std::unique_ptr<ThreadExecutor> certificates;
  if (security != nullptr) {
    certificates = std::make_unique<ThreadExecutor>(ThreadExecutor::Options{
        .name = "certificates", .threads = 1, .tick_ms = kAccessTickMs, .tick = [security] {
          WatchCertificates(*security);
        }});
  }
  int code = 0;
  if (!flags.port_file.empty() && !WritePortFile(flags.port_file, port)) {
    code = Complain(kFault, absl::StrCat("--port-file ", flags.port_file, ": cannot be written"));
  } else {
    if (security == nullptr) {
      log::Warning("plaintext on loopback: anyone on this host may use this coordinator");
    }
    log::Info(absl::StrCat("listening on port ", port, ", state in ", flags.state_dir));
    int signal = 0;
    sigwait(&signals, &signal);
    log::Info("returning: a signal asked this coordinator to stop");
    code = fatal ? kFault : 0;
  }
  last_resort.Arm(code);
  fleet.CloseAll();
  server->Shutdown(std::chrono::system_clock::now() + kShutdownTime);
  server->Wait();
  return code;
}

// All that the controller works with, but for the strand and the fleet.
struct Machinery {
  Machinery(const Flags& flags,
            SqliteJobStore* job_store,
            bool plaintext,
            NamespaceRootsFile* namespace_roots)
      : store(job_store),
        roots(namespace_roots),
        insecure(plaintext),
        metrics(flags.state_dir + "/metrics"),
        history(flags.state_dir + "/metrics"),
        logs(flags.state_dir + "/logs"),
        disk(flags.state_dir),
        upkeep(flags.state_dir,
               job_store,
               &disk,
               &pools,
               namespace_roots,
               *ParseDurationMs(flags.backup_every)) {
    store->OnFull([this] { disk.Release(); });
  }
  ControllerParts Parts(Executor* strand, FleetLink* fleet) {
    ControllerParts parts;
    parts.clock = &SystemClock::Get();
    parts.strand = strand;
    parts.pool = &pools.io();
    parts.store = store;
    parts.planner = &planner;
    parts.keeper = &keeper;
    parts.fleet = fleet;
    parts.metrics = &metrics;
    parts.logs = &logs;
    parts.files = &files;
    parts.growth = &growth;
    parts.disk = &disk;
    parts.pools = &pools;
    return parts;
  }
  JobsServiceParts ServiceParts(Executor* strand,
                                JobController* controller,
                                const AccessRegistry* access) {
    return {.strand = strand,
            .pools = &pools,
            .files = &files,
            .history = &history,
            .growth = &growth,
            .lag = &lag,
            .controller = controller,
            .planner = &planner,
            .keeper = &keeper,
            .version = kVersion,
            .insecure = insecure,
            .access = access,
            .roots = roots};
  }
  // After the strand: what trainers have said is written, and no work is left. Work that hangs
  // takes the process with it.
  void End(int code) {
    files.Drain();
    if (!pools.StopWithin(kHangMs)) {
      log::Warning("some work hangs and is left behind");
      _exit(code);
    }
  }

  SqliteJobStore* store;
  const NamespaceRootsFile* const roots;  // null: none
  const bool insecure;
  PlannerDriver planner;
  StoreCheckpointKeeper keeper;
  MetricsLog metrics;
  MetricsHistory history;
  LogStore logs;
  Bell growth;
  LagMeter lag;
  RpcMeter rpcs;
  StateDisk disk;
  WorkPools pools{WorkPools::Options()};
  Upkeep upkeep;
  ThreadExecutor files{
      {.name = "files", .threads = 1, .tick_ms = 1000, .tick = [this] { upkeep.Tick(); }}};
};

ProcessMetrics MeasureProcess(const Machinery& machinery,
                              const ThreadStoreWriter& writer,
                              const Security* security,
                              double start_seconds) {
  const CertificateEnds ends =
      security == nullptr ? CertificateEnds() : ReadCertificateEnds(*security);
  return {.version = kVersion,
          .insecure = machinery.insecure,
          .start_seconds = start_seconds,
          .lag = machinery.lag.LastMinute(),
          .turns = machinery.lag.Total().turns,
          .lag_alarms = machinery.lag.alarms(),
          .persist = writer.latency(),
          .failed_writes = writer.failed_writes(),
          .store_writable = writer.works() && !machinery.disk.low(),
          .rpcs = machinery.rpcs.Get(),
          .calls_over_rate = security == nullptr ? 0 : security->calls.refused(),
          .server_certificate_end = ends.server_ms / 1000,
          .authority_end = ends.authority_ms / 1000,
          .http = {}};
}

// Null where --http-listen is off.
absl::StatusOr<std::unique_ptr<http::Server>> ServePages(const Flags& flags,
                                                         Executor* strand,
                                                         const JobController* controller,
                                                         const Machinery& machinery,
                                                         const ThreadStoreWriter& writer,
                                                         const Security* security) {
  if (flags.http_listen == "off") {
    return nullptr;
  }
  const double start_seconds = static_cast<double>(SystemClock::Get().WallMs()) / 1000;
  ASSIGN_OR_RETURN(
      std::unique_ptr<http::Server> pages,
      ServeHttpPages(PageFlagsOf(flags),
                     {.strand = strand,
                      .controller = controller,
                      .writable = [&] { return writer.works() && !machinery.disk.low(); },
                      .process =
                          [&machinery, &writer, security, start_seconds] {
                            return MeasureProcess(machinery, writer, security, start_seconds);
                          }}));
  if (!flags.http_port_file.empty() && !WritePortFile(flags.http_port_file, pages->port())) {
    return absl::UnavailableError(flags.http_port_file + ": cannot be written");
  }
  log::Info(absl::StrCat("HTTP on port ", pages->port()));
  return pages;
}

void TickWhenThere(JobController* controller) {
  if (controller != nullptr) {
    controller->Tick();
  }
}

absl::Status MakeFolders(const std::string& state_dir) {
  for (const char* folder : {"", "/metrics", "/logs"}) {
    std::error_code error;
    std::filesystem::create_directories(state_dir + folder, error);
    if (!error &&
        *folder == '\0') {  // also of a folder that an older release or somebody else made
      std::filesystem::permissions(state_dir, std::filesystem::perms::owner_all, error);
    }
    if (error) {
      return absl::UnavailableError(
          absl::StrCat("--state-dir ", state_dir, folder, ": ", error.message()));
    }
  }
  return absl::OkStatus();
}

void EndBy(const absl::Status& status, std::atomic<bool>& fatal) {
  log::Error(absl::StrCat("this coordinator ends: ", std::string(status.message())));
  fatal = true;
  kill(getpid(), SIGTERM);
}

// On the strand.
absl::Status StartController(ThreadExecutor& strand,
                             const ControllerOptions& options,
                             const ControllerParts& parts,
                             std::unique_ptr<JobController>& controller) {
  std::promise<absl::Status> started;
  strand.Post([&] {
    controller = std::make_unique<JobController>(options, parts);
    started.set_value(controller->Start());
  });
  return started.get_future().get();
}

// `roots`: null for none.
int RunBeneath(NamespaceRootsFile* roots,
               const Flags& flags,
               const ControllerOptions& options,
               const sigset_t& signals) {
  const absl::StatusOr<std::unique_ptr<Security>> security = SecurityFor(flags);
  if (!security.ok()) {
    return Complain(absl::IsFailedPrecondition(security.status()) ? kUsage : kFault,
                    std::string(security.status().message()));
  }
  absl::StatusOr<std::unique_ptr<SqliteJobStore>> store = SqliteJobStore::Create(flags.state_dir);
  if (!store.ok()) {
    return Complain(absl::IsAlreadyExists(store.status()) ? kLocked : kFault,
                    std::string(store.status().message()));
  }
  (*store)->RaiseTerm(flags.raise_term);
  LastResort last_resort;  // ends last
  Machinery machinery(flags, store->get(), flags.dev_loopback, roots);
  std::atomic<bool> fatal = false;
  std::unique_ptr<JobController> controller;
  ThreadExecutor strand({.name = "controller",
                         .threads = 1,
                         .tick_ms = kTickMs,
                         .tick = [&controller] { TickWhenThere(controller.get()); },
                         .lag = &machinery.lag});
  ThreadStoreWriter writer({.store = store->get(), .post = [&strand](std::function<void()> work) {
                              strand.PostNamed("Written", std::move(work));
                            }});
  AccessRegistry* const access = *security == nullptr ? nullptr : (*security)->registry.get();
  FleetService fleet(&strand, &machinery.planner, access);
  ControllerParts parts = machinery.Parts(&strand, &fleet);
  parts.writer = &writer;
  parts.on_fatal = [&fatal](const absl::Status& status) { EndBy(status, fatal); };
  PauseMeter pauses;
  const ThreadExecutor pulse(
      {.name = "pulse", .threads = 1, .tick_ms = PauseMeter::kEveryMs, .tick = [&] {
         pauses.Beat(SystemClock::Get().MonotonicMs());
       }});
  parts.take_pause_ms = [&] { return pauses.TakeMs(SystemClock::Get().MonotonicMs()); };
  const absl::Status status = StartController(strand, options, parts, controller);
  if (!status.ok()) {
    strand.Stop();
    writer.Drain();
    machinery.End(kFault);
    return Complain(kFault, absl::StrCat(flags.state_dir, ": ", std::string(status.message())));
  }
  fleet.SetController(controller.get());
  absl::StatusOr<std::unique_ptr<http::Server>> pages =
      ServePages(flags, &strand, controller.get(), machinery, writer, security->get());
  const int code =
      pages.ok() ? ServeUntilSignal(flags,
                                    security->get(),
                                    machinery.ServiceParts(&strand, controller.get(), access),
                                    fleet,
                                    machinery.rpcs,
                                    signals,
                                    fatal,
                                    last_resort)
                 : Complain(kAddressInUse,
                            absl::StrCat("--http-listen ", std::string(pages.status().message())));
  if (pages.ok()) {
    pages->reset();  // it asks the strand
  }
  strand.Stop();
  writer.Drain();  // what was decided is durable, though nobody acts on it any more
  log::Info(absl::StrCat(writer.writes(), " changes in ", writer.groups(), " commits"));
  machinery.End(code);
  return code;
}

int Run(const Flags& flags, const ControllerOptions& options, const sigset_t& signals) {
  const absl::Status folders = MakeFolders(flags.state_dir);
  if (!folders.ok()) {
    return Complain(kFault, std::string(folders.message()));
  }
  const absl::StatusOr<std::unique_ptr<NamespaceRootsFile>> roots = RootsFor(flags);
  return roots.ok()
             ? RunBeneath(roots->get(), flags, options, signals)
             : Complain(kUsage,
                        absl::StrCat("--namespace-roots: ", std::string(roots.status().message())));
}

void AddStateFlags(CLI::App& app, Flags& flags) {
  app.add_option("--state-dir", flags.state_dir, "database, certificates, metrics and logs");
  app.add_option("--backup-every", flags.backup_every, "copies databases to backup/; keeps two")
      ->capture_default_str();
  app.add_option("--raise-term",
                 flags.raise_term,
                 "begin with this term at least: once, after a backup of the state was restored")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40));
}

void AddHttpFlags(CLI::App& app, Flags& flags) {
  app.add_option("--http-listen",
                 flags.http_listen,
                 "address of /livez, /readyz and /metrics, such as 127.0.0.1:7071; port 0 takes a "
                 "free one; off: none")
      ->capture_default_str();
  app.add_option("--http-port-file", flags.http_port_file, "gets the port of --http-listen");
  app.add_option("--http-token-file",
                 flags.http_token_file,
                 "file of tokens, one a line: the pages are served over TLS, and /metrics to who "
                 "shows one (Authorization: Bearer)");
  app.add_option("--http-certificate",
                 flags.http_certificate,
                 "PEM file of the certificate that the pages show; default: the coordinator's own");
  app.add_option("--http-key", flags.http_key, "PEM file of its key");
}

}  // namespace
}  // namespace ravel::coordinator

int main(int argc, char** argv) {
  ravel::coordinator::Flags flags;
  ravel::coordinator::SetupVerbs setup;
  CLI::App app(
      "ravel-coordinator: jobs, membership, plans and checkpoint commits of a Ravel cluster");
  app.add_flag(
      "--dev-loopback", flags.dev_loopback, "plaintext, on this host only; without it: mutual TLS");
  app.add_option("--listen", flags.listen, "address of the gRPC server; port 0 takes a free one")
      ->capture_default_str();
  ravel::coordinator::AddStateFlags(app, flags);
  app.add_option("--port-file", flags.port_file, "written with the port once the server answers");
  app.add_option("--detection",
                 flags.detection,
                 "a node that is silent for that long is lost; jobs may ask for less")
      ->capture_default_str();
  app.add_option("--step-timeout",
                 flags.step_timeout,
                 "steady steps that stand still for that long are stuck")
      ->capture_default_str();
  app.add_option("--certificate-time",
                 flags.certificate_time,
                 "how long certificates of nodes are good; they renew them at two thirds")
      ->capture_default_str();
  ravel::coordinator::AddHttpFlags(app, flags);
  app.add_option(
      "--namespace-roots",
      flags.namespace_roots,
      "YAML file of the paths and stores that jobs of each namespace may name; read again "
      "when it changes; without it: any");
  app.add_flag("--enable-faults", flags.enable_faults, "do what RAVEL_FAULTS says; for tests");
  app.set_version_flag("--version", ravel::coordinator::kVersion);
  AddSetupVerbs(app, setup);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : ravel::coordinator::kUsage;
  }
  if (const std::optional<int> code = RunSetupVerb(app, setup)) {
    return *code;
  }
  if (flags.state_dir.empty()) {
    return ravel::coordinator::Complain(ravel::coordinator::kUsage, "--state-dir is required");
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
