#include "tests/testing/s3_server.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "tests/testing/eventually.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr char kFailsOf[] = "6";  // changing requests
// An authority, and a certificate of it, in the folder $0.
constexpr char kMakeKeys[] = R"(cd "$0"
ec="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
openssl req -x509 $ec -keyout ca.key -out ca.pem -days 2 -subj /CN=test-ca
openssl req $ec -keyout server.key -out server.csr -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost,DNS:bucket.localhost
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -copy_extensions copy -days 2 -out server.pem
)";

}  // namespace

absl::StatusOr<std::unique_ptr<S3Server>> S3Server::Start() {
  std::unique_ptr<S3Server> made(new S3Server);
  ASSIGN_OR_RETURN(made->server_port_, made->StartServer({}, "http://127.0.0.1:"));
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

void S3Server::SetEnvironment(const std::string& endpoint) {
  const std::string keys = scratch_.path() + "/credentials";
  WriteText(keys,
            "[other]\naws_access_key_id = wrong\n[default]\naws_access_key_id = id\n"
            "aws_secret_access_key = hush-hush\n");
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
