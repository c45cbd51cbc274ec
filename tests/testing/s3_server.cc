#include "tests/testing/s3_server.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "tests/testing/eventually.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr char kFailsOf[] = "6";  // changing requests
constexpr uintmax_t kMegabyte = 1 << 20;
constexpr char kSwiftProgram[] = "/usr/bin/swift-proxy-server";
// An authority, and a certificate of it, in the folder $0.
constexpr char kMakeKeys[] = R"(cd "$0"
ec="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
openssl req -x509 $ec -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca
openssl req $ec -keyout server.key -out server.csr -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost,DNS:bucket.localhost
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -copy_extensions copy -days 2 -out server.pem
)";

}  // namespace

absl::StatusOr<std::unique_ptr<S3Server>> S3Server::Start(const std::string& kind) {
  std::unique_ptr<S3Server> made(new S3Server);
  if (kind == "swift") {
    RETURN_IF_ERROR(made->StartSwift());
  } else {
    ASSIGN_OR_RETURN(made->server_port_, made->StartServer({}, "http://127.0.0.1:"));
  }
  ASSIGN_OR_RETURN(made->proxy_port_, made->StartProxy(0));
  made->SetEnvironment(absl::StrCat("http://127.0.0.1:", made->proxy_port_));
  return made;
}

absl::StatusOr<std::unique_ptr<S3Server>> S3Server::StartSecure() {
  std::unique_ptr<S3Server> made(new S3Server);
  const std::string folder = made->scratch_.path();
  const RunResult keys =
      RunProgram({.arguments = {"/bin/sh", "-ec", kMakeKeys, folder}}, folder, seconds(30));
  if (keys.exit_code != 0) {
    return absl::InternalError(absl::StrCat("openssl: ", keys.err));
  }
  const std::vector<std::string> tls = {
      "-s", "-c", folder + "/server.pem", "-k", folder + "/server.key"};
  ASSIGN_OR_RETURN(const int port, made->StartServer(tls, "https://127.0.0.1:"));
  made->SetEnvironment(absl::StrCat("https://localhost:", port));
  made->environment_["RAVEL_S3_CA"] = folder + "/ca.pem";
  return made;
}

absl::Status S3Server::KillAndStart() {
  proxy_.reset();
  return StartProxy(proxy_port_).status();
}

void S3Server::UseHere() const {
  for (const auto& [name, value] : environment_) {
    setenv(name.c_str(), value.c_str(), 1);
  }
}

void S3Server::UseSwiftHere(const std::string& name) const {
  UseHere();
  setenv(
      "RAVEL_S3_ENDPOINT", absl::StrCat("http://127.0.0.1:", SwiftPlaces()[name].port).c_str(), 1);
}

absl::Status S3Server::SignalSwift(const std::string& name, int number) const {
  const int process = SwiftPlaces()[name].process;
  if (process <= 0 || kill(process, number) != 0) {
    return absl::NotFoundError(absl::StrCat("swift: no server ", name));
  }
  const bool back = number != SIGKILL ||
                    Eventually(seconds(30), [&] { return SwiftPlaces()[name].process != process; });
  return back ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("swift: no new ", name));
}

std::string S3Server::SwiftLog() const {
  return ReadText(scratch_.path() + "/swift.log");
}

// The file has no name until it is whole.
bool S3Server::SwiftWritesPart() const {
  const auto files = EntriesUnder(absl::StrCat("/proc/", SwiftPlaces()["object"].process, "/fd"));
  return std::any_of(files.begin(), files.end(), [](const auto& file) {
    std::error_code gone;
    const std::string path = std::filesystem::read_symlink(file.path(), gone);
    return absl::StrContains(path, "/devices/disk/") &&
           std::filesystem::file_size(file.path(), gone) > kMegabyte && !gone;
  });
}

// Lines "NAME PORT PROCESS"; the file is replaced as a whole.
std::map<std::string, S3Server::SwiftPlace> S3Server::SwiftPlaces() const {
  std::map<std::string, SwiftPlace> places;
  std::istringstream lines(ReadText(scratch_.path() + "/swift/servers"));
  std::string name;
  SwiftPlace place;
  while (lines >> name >> place.port >> place.process) {
    places[name] = place;
  }
  return places;
}

absl::Status S3Server::StartSwift() {
  if (!std::filesystem::exists(kSwiftProgram)) {
    return absl::NotFoundError("no Swift: its packages are in deploy/packages.txt");
  }
  access_key_ = "test:tester";
  const std::string folder = scratch_.path() + "/swift";
  std::filesystem::create_directory(folder);
  ProcessOptions options;
  // Debian's Python, which has Debian's packages.
  options.arguments = {"/usr/bin/python3", "-B", RAVEL_SWIFT_SERVER, folder};
  options.output_path = options.error_path = scratch_.path() + "/swift.log";
  ASSIGN_OR_RETURN(server_, ChildProcess::Start(options));
  const bool up = Eventually(seconds(60), [&] {
    return !server_->Running() || std::filesystem::exists(folder + "/servers");
  });
  server_port_ = SwiftPlaces()["conditional"].port;
  return up && server_port_ > 0
             ? absl::OkStatus()
             : absl::UnavailableError(absl::StrCat("swift: ", ReadText(options.error_path)));
}

void S3Server::SetEnvironment(const std::string& endpoint) {
  const std::string keys = scratch_.path() + "/credentials";
  WriteText(keys,
            absl::StrCat("[other]\naws_access_key_id = wrong\n[default]\naws_access_key_id = ",
                         access_key_,
                         "\naws_secret_access_key = hush-hush\n"));
  environment_ = {{"RAVEL_S3_CREDENTIALS", keys}, {"RAVEL_S3_ENDPOINT", endpoint}};
}

absl::StatusOr<int> S3Server::StartServer(const std::vector<std::string>& more,
                                          const std::string& address) {
  const char* const named = std::getenv("RAVEL_MOTO_SERVER");
  const std::string program = named != nullptr ? named : RAVEL_MOTO_DEFAULT;
  if (!std::filesystem::exists(program)) {
    return absl::NotFoundError(
        "no moto_server: tests/testing/moto.sh makes one, or RAVEL_MOTO_SERVER names it");
  }
  ProcessOptions options;
  options.arguments = {program, "-H", "127.0.0.1", "-p", "0"};
  options.arguments.insert(options.arguments.end(), more.begin(), more.end());
  options.output_path = options.error_path = scratch_.path() + "/moto.log";
  ASSIGN_OR_RETURN(server_, ChildProcess::Start(options));
  int port = 0;
  const bool up = Eventually(seconds(60), [&] {
    const std::string log = ReadText(options.error_path);
    const size_t at = log.find(address);
    const size_t end = at == std::string::npos ? at : log.find('\n', at);
    return end != std::string::npos &&
           absl::SimpleAtoi(log.substr(at + address.size(), end - at - address.size()), &port);
  });
  if (!up) {
    return absl::UnavailableError(absl::StrCat("moto: ", ReadText(options.error_path)));
  }
  const RunResult made =
      RunProgram({.arguments = {"/usr/bin/env",
                                "python3",
                                "-c",
                                absl::StrCat("import ssl, urllib.request as u; "
                                             "u.urlopen(u.Request('",
                                             address,
                                             port,
                                             "/bucket', method='PUT'), "
                                             "context=ssl._create_unverified_context())")}},
                 scratch_.path(),
                 seconds(30));
  return made.exit_code == 0 ? absl::StatusOr<int>(port)
                             : absl::UnavailableError(absl::StrCat("bucket: ", made.err));
}

absl::StatusOr<int> S3Server::StartProxy(int known) {
  const std::string port_file = scratch_.path() + "/proxy.port";
  std::error_code gone;
  std::filesystem::remove(port_file, gone);
  ProcessOptions options;
  options.arguments = {"/usr/bin/env",
                       "python3",
                       RAVEL_S3_PROXY,
                       port_file,
                       std::to_string(server_port_),
                       kFailsOf,
                       std::to_string(known)};
  options.output_path = options.error_path = scratch_.path() + "/proxy.log";
  ASSIGN_OR_RETURN(proxy_, ChildProcess::Start(options));
  int port = 0;
  const bool up = Eventually(
      seconds(30), [&] { return absl::SimpleAtoi(ReadText(port_file), &port) && port > 0; });
  return up ? absl::StatusOr<int>(port)
            : absl::UnavailableError(absl::StrCat("proxy: ", ReadText(options.error_path)));
}

}  // namespace ravel::testing
