// ravel-worker: the daemon of one node. Command line, checks of its configuration, and exit codes;
// see daemon.h.

#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include <CLI/CLI.hpp>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/join_token.h"
#include "common/logging.h"
#include "common/net_address.h"
#include "common/time_text.h"
#include "worker/daemon/confinement.h"
#include "worker/daemon/daemon.h"
#include "worker/daemon/enrolment_client.h"
#include "worker/daemon/folders_main.h"
#include "worker/daemon/job_flags_main.h"
#include "worker/daemon/node_identity.h"
#include "worker/daemon/notice_file.h"
#include "worker/daemon/shared_gpu.h"

namespace ravel::daemon {
namespace {

constexpr char kVersion[] = "0.1.0";
constexpr int kMaxCpuDevices = 256;
constexpr int kMaxTrainersPerGpu = 8;
constexpr int64_t kMaxDrainMs = int64_t{24} * 3600 * 1000;

struct Flags {
  bool dev_loopback = false;
  std::string coordinator;  // empty: by default or as joined
  std::string node_id;
  int cpu_devices = 1;
  int trainers_per_gpu = 1;
  std::string work_dir;
  std::string gemm_cache;
  std::string trainer;
  std::string advertise;       // empty: chosen
  std::string data_interface;  // empty: none is named
  std::string data_ports;      // empty: any
  std::string on_fatal = "exit";
  std::string log_limit = "4GiB";
  std::string drain_limit = "30s";
  std::string notice_file;  // empty: none
  std::string http_listen = "off";
  std::string http_port_file;
  std::string http_token_file;   // empty: plaintext on loopback
  std::string http_certificate;  // with a token file
  std::string http_key;
  bool enable_faults = false;
  FolderFlags folders;
  JobFlags jobs;
};

constexpr char kLoopback[] = "127.0.0.1";
constexpr char kDefaultCoordinator[] = "127.0.0.1:7070";

// A node's certificate is none of a server, so the pages have one of their own.
http::PageFlags PageFlagsOf(const Flags& flags) {
  return {.listen = flags.http_listen,
          .token_file = flags.http_token_file,
          .certificate_file = flags.http_certificate,
          .key_file = flags.http_key};
}

absl::StatusOr<HostPort> ParseCoordinator(const std::string& text) {
  absl::StatusOr<HostPort> coordinator = ParseHostPort(text);
  if (!coordinator.ok() || coordinator->port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator ", text, ": expected HOST:PORT with a port from 1 to 65535"));
  }
  return coordinator;
}

// Sets the interface and ports by which trainers of other hosts reach this host's, as far as flags
// say so.
absl::Status SetDataNetwork(const Flags& flags, DaemonOptions& options) {
  options.data_address = flags.advertise;
  if (!flags.data_ports.empty()) {
    const absl::StatusOr<PortRange> ports = ParsePortRange(flags.data_ports);
    RETURN_IF_ERROR(Annotate(ports.status(), "--data-ports"));
    options.data_ports = *ports;
  }
  if (flags.data_interface.empty()) {
    return absl::OkStatus();
  }
  if (!flags.advertise.empty()) {
    return absl::InvalidArgumentError("expected one of --advertise and --data-interface");
  }
  absl::StatusOr<std::string> address = AddressOfInterface(flags.data_interface);
  RETURN_IF_ERROR(Annotate(address.status(), "--data-interface"));
  options.data_address = *std::move(address);
  // NCCL takes no address but this name, `=`: exactly. What the site has set holds.
  setenv("NCCL_SOCKET_IFNAME", ("=" + flags.data_interface).c_str(), 0);
  return absl::OkStatus();
}

// Plaintext: nothing may leave this host.
absl::Status SetLoopback(const Flags& flags, DaemonOptions& options) {
  options.coordinator = flags.coordinator.empty() ? kDefaultCoordinator : flags.coordinator;
  options.data_address = options.data_address.empty() ? kLoopback : options.data_address;
  options.node_id = flags.node_id;
  ASSIGN_OR_RETURN(const HostPort coordinator, ParseCoordinator(options.coordinator));
  if (!IsLoopbackHost(coordinator.host)) {
    return absl::FailedPreconditionError(
        absl::StrCat("--coordinator ",
                     options.coordinator,
                     ": with --dev-loopback expected 127.0.0.1, ::1 or localhost"));
  }
  if (!IsLoopbackHost(options.data_address)) {
    return absl::FailedPreconditionError(
        absl::StrCat(flags.data_interface.empty() ? "--advertise " : "--data-interface: ",
                     options.data_address,
                     ": with --dev-loopback expected 127.0.0.1, ::1 or localhost"));
  }
  return absl::OkStatus();
}

// A node that has joined a cluster: what it is stands in its identity.
absl::Status SetJoined(const Flags& flags, DaemonOptions& options) {
  absl::StatusOr<NodeIdentity> identity = LoadIdentity(flags.work_dir);
  if (absl::IsNotFound(identity.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("--work-dir ",
                     flags.work_dir,
                     ": this node has no certificate; `ravel-worker join` gets one, or pass "
                     "--dev-loopback to work on one machine in plaintext"));
  }
  RETURN_IF_ERROR(identity.status());
  options.coordinator = flags.coordinator.empty() ? identity->coordinator : flags.coordinator;
  options.node_id = identity->node_id;
  if (!flags.node_id.empty() && flags.node_id != identity->node_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--node-id ", flags.node_id, ": this node's certificate is of ", identity->node_id));
  }
  ASSIGN_OR_RETURN(const HostPort coordinator, ParseCoordinator(options.coordinator));
  if (options.data_address.empty()) {
    ASSIGN_OR_RETURN(options.data_address, LocalAddressTowards(coordinator));
  }
  options.identity = *std::move(identity);
  return CheckReachableHost("--advertise", options.data_address);
}

std::string SiblingTrainer() {
  std::error_code ignored;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return self.parent_path() / "ravel-trainer";
}

absl::Status CheckTrainer(const std::string& path) {
  if (access(path.c_str(), X_OK) != 0) {
    return Annotate(ErrnoStatus(errno, path), "--trainer: expected a program");
  }
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {  // folders may be "executed", too
    return absl::FailedPreconditionError(
        absl::StrCat("--trainer: expected a program, and ", path, " is none"));
  }
  return absl::OkStatus();
}

// Held until the process ends: two daemons in one folder would mix their logs. Names the lock: who
// has the same one later on this host came after this process's end.
absl::StatusOr<std::string> LockWorkDir(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat("--work-dir ", path, ": ", error.message()));
  }
  const std::string lock_path = path + "/lock";
  const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640);
  if (fd < 0) {
    return Annotate(ErrnoStatus(errno, lock_path), "--work-dir");
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--work-dir ", path, ": another ravel-worker runs in this folder"));
  }
  struct stat facts {};
  if (fstat(fd, &facts) != 0) {
    return Annotate(ErrnoStatus(errno, lock_path), "--work-dir");
  }
  return absl::StrCat(facts.st_dev, ":", facts.st_ino);
}

// Handles a fault that a restart cannot mend: ends the program, or with --on-fatal=park stays, so
// that a supervisor that always restarts does not start it in a loop.
int Fatal(const Flags& flags, const absl::Status& status) {
  std::fprintf(stderr, "ravel-worker: %s\n", std::string(status.message()).c_str());
  if (flags.on_fatal == "park") {
    std::fprintf(stderr, "ravel-worker: parked until SIGTERM (--on-fatal=park)\n");
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, nullptr);
    int signal_number = 0;
    sigwait(&ends, &signal_number);
    return kExitClean;
  }
  return kExitDoNotRestart;
}

absl::Status SetLeaving(const Flags& flags, DaemonOptions& options) {
  const absl::StatusOr<int64_t> limit_ms = ParseDurationMs(flags.drain_limit);
  if (!limit_ms.ok() || *limit_ms > kMaxDrainMs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--drain-limit ", flags.drain_limit, ": expected a duration from 0 to 24h, such as 90s"));
  }
  options.drain_limit = std::chrono::milliseconds(*limit_ms);
  options.notice_file = flags.notice_file;
  return absl::OkStatus();
}

// A daemon that its supervisor starts again on a host that goes away would take work and lose it.
// Returns true if it is to end.
bool EndsBesideNotice(const DaemonOptions& options) {
  const std::optional<std::string> notice =
      options.notice_file.empty() ? std::nullopt : ReadNotice(options.notice_file);
  if (!notice) {
    return false;
  }
  log::Warning(absl::StrCat(
      "--notice-file ", options.notice_file, ": ", *notice, "; waits until it is gone"));
  sigset_t ends;
  sigset_t before;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  sigprocmask(SIG_BLOCK, &ends, &before);
  const int signal_number = AwaitNoNotice(options.notice_file, options.notice_look);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  return signal_number != 0;
}

std::string GemmCache(const Flags& flags) {
  if (flags.gemm_cache.empty()) {
    std::error_code ignored;
    return std::filesystem::absolute(flags.work_dir + "/gemms", ignored);
  }
  return flags.gemm_cache == "off" ? "" : flags.gemm_cache;
}

DaemonConfinement ConfinementWish(const Flags& flags, const DaemonOptions& options) {
  return {.mode = flags.folders.confine,
          .roots = options.roots.folders(),
          .folders = {flags.work_dir, options.gemm_cache, flags.folders.data_cache},
          .read_folders = {flags.jobs.secrets_root},
          .read_files = {options.trainer_program,
                         SiblingTrainer(),
                         flags.notice_file,
                         flags.http_token_file,
                         flags.http_certificate,
                         flags.http_key},
          .written_files = {flags.http_port_file}};
}

// The rest of Start, once what was asked for is possible.
int RunConfined(const Flags& flags, bool confined, DaemonOptions options) {
  if (EndsBesideNotice(options)) {
    return kExitClean;
  }
  options.facts = ProbeNode(flags.cpu_devices);
  if (confined) {  // trainers of another daemon share no memory with those of this one
    absl::StrAppend(&options.facts.host_id, "/", options.node_id);
  }
  if (!options.facts.device_message.empty()) {
    log::Warning(absl::StrCat("GPUs: ", options.facts.device_message));
  }
  if (flags.trainers_per_gpu > 1) {
    log::Warning("--trainers-per-gpu: GPUs are shared, for functional tests alone");
    ShareGpus(flags.trainers_per_gpu, options.facts);
    options.trainers_per_gpu = flags.trainers_per_gpu;
  }
  Daemon daemon(std::move(options));
  if (flags.http_listen != "off") {
    const absl::Status served = daemon.ServeHttp(PageFlagsOf(flags), flags.http_port_file);
    if (!served.ok()) {  // the address may be free soon
      std::fprintf(
          stderr, "ravel-worker: --http-listen: %s\n", std::string(served.message()).c_str());
      return kExitRestartMe;
    }
  }
  return daemon.Run();
}

int Start(const Flags& flags) {
  umask(027);  // trainers inherit it: weights, logs and traces are nobody else's
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);  // a closed terminal is no reason to kill trainers
  DaemonOptions options{.coordinator = {},
                        .node_id = {},
                        .data_address = {},
                        .work_dir = flags.work_dir,
                        .gemm_cache = GemmCache(flags),
                        .trainer_program = flags.trainer.empty() ? SiblingTrainer() : flags.trainer,
                        .version = kVersion,
                        .logs = {},
                        .facts = {}};
  const absl::StatusOr<int64_t> log_limit = ParseBytes(flags.log_limit);
  absl::Status ready = Annotate(log_limit.status(), "--log-limit");
  options.logs.limit_bytes = log_limit.value_or(0);
  ready = ready.ok() ? SetLeaving(flags, options) : ready;
  ready = ready.ok() ? SetRoots(flags.folders, flags.work_dir, options) : ready;
  ready = ready.ok() ? SetDataNetwork(flags, options) : ready;
  ready = ready.ok() ? SetLaunchRules(flags.jobs, flags.dev_loopback, options) : ready;
  if (ready.ok()) {
    ready = flags.dev_loopback ? SetLoopback(flags, options) : SetJoined(flags, options);
  }
  if (ready.ok() && flags.http_listen != "off") {
    ready = http::SecurityOf(PageFlagsOf(flags)).status();
  }
  ready = ready.ok() ? CheckTrainer(options.trainer_program) : ready;
  const absl::StatusOr<std::string> lock =
      ready.ok() ? LockWorkDir(flags.work_dir) : absl::StatusOr<std::string>(ready);
  ready = lock.ok() ? SetDataCache(flags.folders, flags.work_dir, options) : lock.status();
  ready = ready.ok() ? SetTrainerUser(flags.jobs, flags.dev_loopback, options) : ready;
  if (!ready.ok()) {
    return Fatal(flags, ready);
  }
  options.work_lock = *lock;
  options.park_when_refused = flags.on_fatal == "park";
  log::Init("ravel-worker", log::Format::kJson, log::Level::kInfo);
  log::SetField("node", options.node_id);
  if (flags.dev_loopback) {
    log::Warning("--dev-loopback: plaintext, one local user; never on a network");
  } else {
    // Trainers call stores as this node; they read the files, so a renewed certificate counts.
    setenv("RAVEL_STORE_IDENTITY", (flags.work_dir + "/identity").c_str(), 0);
    log::Info(absl::StrCat("other hosts' trainers reach this host at ", options.data_address));
  }
  if (!options.roots.any()) {
    log::Warning("no --read-root and no --write-root: jobs may name every path of this user");
  }
  const absl::StatusOr<bool> confined = ConfineDaemon(ConfinementWish(flags, options));
  if (!confined.ok()) {
    return Fatal(flags, confined.status());
  }
  if (std::getenv("RAVEL_FAULTS") != nullptr && !flags.enable_faults) {
    log::Warning("RAVEL_FAULTS is set and ignored: --enable-faults is not");
    unsetenv("RAVEL_FAULTS");  // trainers inherit none either
  }
  return RunConfined(flags, *confined, std::move(options));
}

void AddHttpFlags(CLI::App& app, Flags& flags) {
  app.add_option("--http-listen",
                 flags.http_listen,
                 "Address of /livez, /readyz and /metrics, such as 127.0.0.1:7072; port 0 takes a "
                 "free one; off: none")
      ->capture_default_str();
  app.add_option(
      "--http-port-file", flags.http_port_file, "Written with the port of --http-listen");
  app.add_option("--http-token-file",
                 flags.http_token_file,
                 "File of tokens, one a line: the pages are served over TLS, and /metrics to who "
                 "shows one (Authorization: Bearer)");
  app.add_option("--http-certificate",
                 flags.http_certificate,
                 "PEM file of the certificate that the pages show, with --http-token-file");
  app.add_option("--http-key", flags.http_key, "PEM file of its key");
}

struct JoinFlags {
  std::string coordinator;
  std::string node_id;
  std::string work_dir;
  std::string token;
};

int RunJoin(JoinFlags flags) {
  umask(077);
  if (flags.node_id.empty()) {
    char name[HOST_NAME_MAX + 1] = {};
    gethostname(name, sizeof name - 1);
    flags.node_id = name;
  }
  absl::Status status = ParseCoordinator(flags.coordinator).status();
  // Before the token is spent.
  status = status.ok() ? CheckNoIdentity(flags.work_dir) : status;
  if (status.ok()) {
    const absl::StatusOr<NodeIdentity> joined =
        Join(flags.coordinator, flags.node_id, TokenOf(flags.token, std::cin));
    status = joined.ok() ? SaveIdentity(flags.work_dir, *joined) : joined.status();
  }
  if (!status.ok()) {
    std::fprintf(stderr, "ravel-worker: %s\n", std::string(status.message()).c_str());
    return absl::IsInvalidArgument(status) ? kExitUsage
           : absl::IsUnavailable(status)   ? kExitRestartMe
                                           : kExitDoNotRestart;
  }
  std::printf("joined as %s; start it with: ravel-worker --work-dir %s\n",
              flags.node_id.c_str(),
              flags.work_dir.c_str());
  return kExitClean;
}

void AddJoin(CLI::App& app, JoinFlags& flags) {
  CLI::App* const join = app.add_subcommand("join", "Get this node's certificate by a token");
  join->add_option("--coordinator", flags.coordinator, "HOST:PORT of the coordinator")->required();
  join->add_option("--node-id", flags.node_id, "Name of this node; default its host name");
  join->add_option("--work-dir", flags.work_dir, "Of the daemon; the key stays there")->required();
  join->add_option("TOKEN",
                   flags.token,
                   "Of `ravelctl enrol node`; -: from the input, where other users of this host do "
                   "not see it")
      ->required();
}

void AddLeaving(CLI::App& app, Flags& flags) {
  app.add_option("--drain-limit",
                 flags.drain_limit,
                 "Time that jobs have to save and leave after SIGTERM or a notice; less than what "
                 "the supervisor waits before it kills")
      ->capture_default_str();
  app.add_option(
         "--notice-file",
         flags.notice_file,
         "Absolute path of a file that appears when this host is about to go away, as a spot "
         "host is; its first line is the reason")
      ->check([](const std::string& path) {
        return absl::StartsWith(path, "/") ? "" : "expected an absolute path";
      });
}

void AddDevices(CLI::App& app, Flags& flags) {
  app.add_option("--cpu-devices", flags.cpu_devices, "CPU devices to offer, one trainer each")
      ->check(CLI::Range(0, kMaxCpuDevices))
      ->capture_default_str();
  app.add_option("--trainers-per-gpu",
                 flags.trainers_per_gpu,
                 "Offer each GPU so often; for functional tests: slow, and not supported by NCCL")
      ->check(CLI::Range(1, kMaxTrainersPerGpu))
      ->capture_default_str();
}

void AddDataNetwork(CLI::App& app, Flags& flags) {
  app.add_option("--advertise,--data-address",
                 flags.advertise,
                 "Name or address (IPv4, IPv6) of the interface by which other hosts' trainers "
                 "reach this host; default the one towards the coordinator, or 127.0.0.1 with "
                 "--dev-loopback");
  app.add_option("--data-interface",
                 flags.data_interface,
                 "Instead of --advertise the interface itself, such as eth1: trainers listen at "
                 "its address, and NCCL uses it, unless NCCL_SOCKET_IFNAME is set");
  app.add_option("--data-ports",
                 flags.data_ports,
                 "FIRST-LAST: ports on which CPU trainers wait for those of other hosts, at least "
                 "one for each pair of such ranks; default any. NCCL chooses its own");
}

int ParseAndStart(int argc, char** argv) {
  Flags flags;
  JoinFlags join;
  CLI::App app("ravel-worker: runs trainers on this node for a coordinator");
  app.set_version_flag("--version", kVersion);
  AddJoin(app, join);
  app.add_flag(
      "--dev-loopback", flags.dev_loopback, "Plaintext on 127.0.0.1 only, for one machine");
  app.add_option("--coordinator",
                 flags.coordinator,
                 "Coordinator's address; default the one that this node joined, or "
                 "127.0.0.1:7070 with --dev-loopback");
  app.add_option("--node-id",
                 flags.node_id,
                 "Name of this node, unique in the cluster; default the one it joined by");
  AddDevices(app, flags);
  app.add_option(
      "--work-dir", flags.work_dir, "Folder for logs of trainers, and for the node's certificate");
  app.add_option("--log-limit",
                 flags.log_limit,
                 "Size of all logs of trainers that ended; the oldest go first, and those of 14 "
                 "days ago")
      ->capture_default_str();
  // --product-cache is what scripts and units from before call it.
  app.add_option("--gemm-cache,--product-cache",
                 flags.gemm_cache,
                 "Folder for what was measured of matrix products on GPUs, or off; default: "
                 "gemms in the work folder")
      ->check([](const std::string& path) {
        return path == "off" || absl::StartsWith(path, "/") ? ""
                                                            : "expected an absolute path or off";
      });
  app.add_option(
      "--trainer", flags.trainer, "Trainer program; default: ravel-trainer beside this one");
  AddFolderFlags(app, flags.folders);
  AddJobFlags(app, flags.jobs);
  AddDataNetwork(app, flags);
  AddHttpFlags(app, flags);
  AddLeaving(app, flags);
  app.add_flag("--enable-faults",
               flags.enable_faults,
               "Do what RAVEL_FAULTS says, here and in trainers; for tests and drills");
  app.add_option(
         "--on-fatal",
         flags.on_fatal,
         "What a daemon does that is refused or misconfigured: exit (code 93), or park: stay "
         "up, not ready, asking again now and then")
      ->check(CLI::IsMember({"exit", "park"}))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitClean : kExitUsage;
  }
  if (app.got_subcommand("join")) {
    return RunJoin(join);
  }
  if (flags.work_dir.empty() || (flags.dev_loopback && flags.node_id.empty())) {
    std::fprintf(stderr,
                 "ravel-worker: %s is required\n",
                 flags.work_dir.empty() ? "--work-dir" : "with --dev-loopback --node-id");
    return kExitUsage;
  }
  return Start(flags);
}

}  // namespace
}  // namespace ravel::daemon

int main(int argc, char** argv) {
  try {
    return ravel::daemon::ParseAndStart(argc, argv);
  } catch (const std::exception& error) {  // a library's; ours are statuses
    std::fprintf(stderr, "ravel-worker: %s\n", error.what());
    return ravel::daemon::kExitRestartMe;
  }
}
