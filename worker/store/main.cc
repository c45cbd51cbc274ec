// ravel-store: wiring. Exit codes: 0 stopped by a signal, 1 a fault, 2 wrong arguments, 3 the
// address is in use, 4 another store works on a folder.

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <malloc.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file_writer.h"
#include "common/logging.h"
#include "common/net_address.h"
#include "common/time_text.h"
#include "common/version.h"
#include "worker/store/disk_set.h"
#include "worker/store/fence_book.h"
#include "worker/store/store_gate_service.h"
#include "worker/store/store_pages.h"
#include "worker/store/store_service.h"
#include "worker/store/trust_book.h"
#include "worker/store/trust_client.h"

namespace ravel::store_server {
namespace {

constexpr int kFault = 1;
constexpr int kUsage = 2;
constexpr int kAddressInUse = 3;
constexpr int kLocked = 4;
constexpr int kMaxMessageBytes = 4 << 20;
constexpr int kAheadBytes = 8 << 20;  // of a stream of writes, received before they are asked for
constexpr int kThreadsBeyondStreams = 16;
constexpr auto kShutdownTime = std::chrono::seconds(3);
constexpr time_t kSweepSeconds = 600;

struct Flags {
  std::vector<std::string> data;
  std::string listen = "127.0.0.1:7080";
  bool dev_loopback = false;
  std::string identity;
  std::vector<std::string> operators;
  std::string coordinator;
  int64_t quota = 0;
  int64_t min_free = int64_t{1} << 30;
  std::string part_age = "24h";
  int64_t max_streams = 64;
  std::string port_file;
  std::string http_listen = "off";
  std::string http_port_file;
  std::string http_token_file;   // empty: plaintext on loopback
  std::string http_certificate;  // empty: that of --identity
  std::string http_key;
  bool enable_faults = false;
};

// Messages of 2 MiB come and go with every block. Their memory stays with the process, up to 64 MiB
// in each of four arenas: each page that is given back costs a fault when it is taken again.
void KeepMessageMemory() {
  mallopt(M_ARENA_MAX, 4);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
}

int Complain(int code, const std::string& message) {
  std::fprintf(stderr, "ravel-store: %s\n", message.c_str());
  return code;
}

http::PageFlags PageFlagsOf(const Flags& flags) {
  http::PageFlags pages = {.listen = flags.http_listen,
                           .token_file = flags.http_token_file,
                           .certificate_file = flags.http_certificate,
                           .key_file = flags.http_key};
  if (pages.certificate_file.empty() && pages.key_file.empty() && !flags.identity.empty()) {
    pages.certificate_file = flags.identity + "/certificate.pem";
    pages.key_file = flags.identity + "/key.pem";
  }
  return pages;
}

// Empty, or what is wrong.
std::string Check(const Flags& flags, int64_t* part_age_ms) {
  const absl::StatusOr<HostPort> listen = ParseHostPort(flags.listen);
  if (!listen.ok()) {
    return absl::StrCat("--listen ", flags.listen, ": ", std::string(listen.status().message()));
  }
  if (flags.dev_loopback && !IsLoopbackHost(listen->host)) {
    return absl::StrCat("--listen ",
                        flags.listen,
                        ": --dev-loopback is plaintext and serves 127.0.0.1, [::1] or localhost "
                        "only");
  }
  if (flags.dev_loopback == !flags.identity.empty()) {
    return "expected one of --identity DIR and --dev-loopback";
  }
  if (!flags.coordinator.empty()) {
    const absl::StatusOr<HostPort> coordinator = ParseHostPort(flags.coordinator);
    if (!coordinator.ok()) {
      return absl::StrCat(
          "--coordinator ", flags.coordinator, ": ", std::string(coordinator.status().message()));
    }
    if (flags.dev_loopback) {
      return "--coordinator: expected with --identity only; without certificates nobody is revoked";
    }
  }
  const absl::StatusOr<int64_t> age = ParseDurationMs(flags.part_age);
  if (!age.ok() || *age < 60'000) {
    return absl::StrCat("--part-age ", flags.part_age, ": expected a duration of at least 1m");
  }
  *part_age_ms = *age;
  if (flags.http_listen != "off") {
    const absl::Status pages = http::SecurityOf(PageFlagsOf(flags)).status();
    if (!pages.ok()) {
      return std::string(pages.message());
    }
  }
  return "";
}

// A folder that does not begin with '/' lies in the one that the store was started in.
absl::StatusOr<std::string> AbsoluteFolder(const std::string& data) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(data, error);
  if (data.empty() || error) {
    return absl::InvalidArgumentError(absl::StrCat("--data \"", data, "\": expected a folder"));
  }
  return path.lexically_normal().string();
}

// DATA/files and DATA/fences of each disk, and a lock that goes with the process.
absl::Status PrepareFolder(const std::string& data) {
  std::error_code error;
  std::filesystem::create_directories(data + "/files", error);
  if (error) {
    return absl::UnavailableError(absl::StrCat("--data ", data, ": ", error.message()));
  }
  const std::string path = data + "/lock";
  const int lock = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640);
  if (lock < 0) {
    return ErrnoStatus(errno, path);
  }
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    return absl::AlreadyExistsError(absl::StrCat("--data ", data, ": another store works there"));
  }
  return absl::OkStatus();  // held until the process ends
}

absl::StatusOr<std::unique_ptr<DiskSet>> OpenDisks(const Flags& flags) {
  DiskOptions options;
  for (const std::string& data : flags.data) {
    RETURN_IF_ERROR(PrepareFolder(data));
    options.folders.push_back(data + "/files");
  }
  options.quota_bytes = flags.quota;
  options.min_free_bytes = flags.min_free;
  return DiskSet::Open(options);
}

std::unique_ptr<grpc::Server> Serve(const Flags& flags,
                                    const StoreGate& gate,
                                    StoreService* service,
                                    int* port) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort(flags.listen, gate.Credentials(), port);
  builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  grpc::ResourceQuota quota("ravel-store");
  quota.SetMaxThreads(static_cast<int>(flags.max_streams) + kThreadsBeyondStreams);
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             static_cast<int>(flags.max_streams) + kThreadsBeyondStreams);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kAheadBytes);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 200);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  return builder.BuildAndStart();
}

// Returns when a signal asks for the end.
void WaitForEnd(DiskSet& disks, int64_t part_age_ms, const sigset_t& signals) {
  for (;;) {
    const int64_t removed = disks.RemoveOldParts(SystemClock::Get().WallMs(), part_age_ms);
    if (removed > 0) {
      log::Info(absl::StrCat(removed, " bytes of unfinished files are removed"));
    }
    const timespec wait = {.tv_sec = kSweepSeconds, .tv_nsec = 0};
    const int signal = sigtimedwait(&signals, nullptr, &wait);
    if (signal > 0) {
      return;
    }
  }
}

// The pages that the flags ask for, and the files that tell ports; null: none are asked for.
absl::StatusOr<std::unique_ptr<http::Server>> ServePages(const Flags& flags,
                                                         const DiskSet* disks,
                                                         const StoreService* service,
                                                         const TrustBook* trust) {
  std::unique_ptr<http::Server> pages;
  if (flags.http_listen != "off") {
    ASSIGN_OR_RETURN(pages, ServeStorePages(PageFlagsOf(flags), disks, service, trust));
    if (!flags.http_port_file.empty()) {
      RETURN_IF_ERROR(WriteFileAtomically(flags.http_port_file, absl::StrCat(pages->port(), "\n")));
    }
  }
  return pages;
}

// Revocations as the gate asks for them: those that were kept, and those that the coordinator
// tells.
struct TrustParts {
  std::unique_ptr<TrustBook> book;
  std::unique_ptr<TrustClient> client;
};

absl::StatusOr<TrustParts> OpenTrust(const Flags& flags, StoreGate& gate) {
  TrustParts parts;
  if (flags.dev_loopback) {
    return parts;
  }
  ASSIGN_OR_RETURN(parts.book, TrustBook::Open(flags.data.front() + "/trust.json"));
  gate.UseTrust(parts.book.get());
  if (flags.coordinator.empty()) {
    log::Warning(
        "--coordinator is not given: a certificate that is revoked is good here until it ends");
    return parts;
  }
  ASSIGN_OR_RETURN(
      parts.client,
      TrustClient::Start({.coordinator = flags.coordinator, .identity_folder = flags.identity},
                         parts.book.get()));
  return parts;
}

int Run(const Flags& flags, int64_t part_age_ms, const sigset_t& signals) {
  absl::StatusOr<std::unique_ptr<StoreGate>> gate =
      flags.dev_loopback ? std::make_unique<StoreGate>()
                         : StoreGate::FromIdentity(flags.identity, flags.operators);
  if (!gate.ok()) {
    return Complain(kUsage, absl::StrCat("--identity ", std::string(gate.status().message())));
  }
  const absl::StatusOr<std::unique_ptr<DiskSet>> disks = OpenDisks(flags);
  if (!disks.ok()) {
    return Complain(absl::IsAlreadyExists(disks.status()) ? kLocked : kFault,
                    std::string(disks.status().message()));
  }
  const absl::StatusOr<std::unique_ptr<FenceBook>> fences =
      FenceBook::Open(flags.data.front() + "/fences");
  if (!fences.ok()) {
    return Complain(kFault, std::string(fences.status().message()));
  }
  const absl::StatusOr<TrustParts> trust = OpenTrust(flags, **gate);
  if (!trust.ok()) {
    return Complain(absl::IsFailedPrecondition(trust.status()) ? kUsage : kFault,
                    std::string(trust.status().message()));
  }
  StoreService service(disks->get(), fences->get(), gate->get(), flags.max_streams);
  int port = 0;
  const std::unique_ptr<grpc::Server> server = Serve(flags, **gate, &service, &port);
  if (server == nullptr || port == 0) {
    return Complain(
        kAddressInUse,
        absl::StrCat("--listen ", flags.listen, ": the address is in use or not available"));
  }
  const absl::StatusOr<std::unique_ptr<http::Server>> pages = ServePages(
      flags, disks->get(), &service, flags.coordinator.empty() ? nullptr : trust->book.get());
  absl::Status told = pages.status();
  if (told.ok() && !flags.port_file.empty()) {
    told = WriteFileAtomically(flags.port_file, absl::StrCat(port, "\n"));
  }
  if (told.ok()) {
    if (flags.dev_loopback) {
      log::Warning("plaintext on loopback: anyone on this host may use this store");
    }
    log::Info(absl::StrCat("listening on port ", port));
    WaitForEnd(**disks, part_age_ms, signals);
  }
  server->Shutdown(std::chrono::system_clock::now() + kShutdownTime);
  server->Wait();
  return told.ok() ? 0 : Complain(kFault, std::string(told.message()));
}

void AddOptions(CLI::App& app, Flags& flags) {
  app.add_option("--data", flags.data, "Folder for files, one on each disk; repeat it for more")
      ->required();
  app.add_option("--listen", flags.listen, "Address of the gRPC server; port 0 takes a free one")
      ->capture_default_str();
  app.add_flag("--dev-loopback", flags.dev_loopback, "Plaintext, on this host only");
  app.add_option("--identity",
                 flags.identity,
                 "Folder of `ravel-coordinator certify-store`: certificate, key and authority");
  app.add_option("--operators", flags.operators, "Users who may change everything")->delimiter(',');
  app.add_option("--coordinator",
                 flags.coordinator,
                 "HOST:PORT of the coordinator: whom it revokes is refused here within seconds");
  app.add_option("--quota", flags.quota, "Bytes of all files; with a unit, 10GB; 0: none")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--min-free",
                 flags.min_free,
                 "Bytes that stay free on each disk; files of up to 16 MiB may take half of them")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--part-age", flags.part_age, "Unfinished files go when they are that old")
      ->capture_default_str();
  app.add_option("--max-streams", flags.max_streams, "Reads and writes at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--port-file", flags.port_file, "Written with the port once the store answers");
  app.add_option("--http-listen",
                 flags.http_listen,
                 "Address of /livez, /readyz and /metrics on this host; off: none")
      ->capture_default_str();
  app.add_option("--http-port-file", flags.http_port_file, "Written with its port");
  app.add_option("--http-token-file",
                 flags.http_token_file,
                 "File of tokens, one a line: the pages are served over TLS, and /metrics to who "
                 "shows one (Authorization: Bearer)");
  app.add_option("--http-certificate",
                 flags.http_certificate,
                 "PEM file of the certificate that the pages show; default: that of --identity");
  app.add_option("--http-key", flags.http_key, "PEM file of its key");
  app.add_flag("--enable-faults", flags.enable_faults, "Do what RAVEL_FAULTS says; for tests");
  app.set_version_flag("--version", std::string(kVersion));
}

}  // namespace
}  // namespace ravel::store_server

int main(int argc, char** argv) {
  namespace server = ravel::store_server;
  server::Flags flags;
  CLI::App app("ravel-store: checkpoint files for clusters without a shared file system");
  server::AddOptions(app, flags);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : server::kUsage;
  }
  int64_t part_age_ms = 0;
  const std::string problem = server::Check(flags, &part_age_ms);
  if (!problem.empty()) {
    return server::Complain(server::kUsage, problem);
  }
  server::KeepMessageMemory();
  umask(027);
  setenv("GRPC_VERBOSITY", "NONE", 0);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ravel::log::Init("ravel-store", ravel::log::Format::kConsole, ravel::log::Level::kInfo);
  if (std::getenv("RAVEL_FAULTS") != nullptr && !flags.enable_faults) {
    ravel::log::Warning("RAVEL_FAULTS is set and ignored: --enable-faults is not");
    unsetenv("RAVEL_FAULTS");
  }
  for (std::string& data : flags.data) {
    const absl::StatusOr<std::string> folder = server::AbsoluteFolder(data);
    if (!folder.ok()) {
      return server::Complain(server::kUsage, std::string(folder.status().message()));
    }
    data = *folder;
  }
  return server::Run(flags, part_age_ms, signals);
}
