#include "tests/testing/secure_cluster.h"

#include <filesystem>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <unistd.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"

namespace ravel::testing {
namespace {

using std::chrono::seconds;

constexpr seconds kStartTime{60};

RunResult Shell(const std::string& command, const std::string& scratch) {
  return RunProgram({.arguments = {"/bin/sh", "-c", command}}, scratch, seconds(20));
}

std::string TextOf(const json::Value& object, const char* name) {
  const json::Value* const value = object.Find(name);
  return value != nullptr && value->is_string() ? value->AsString() : "";
}

}  // namespace

NetworkHosts::NetworkHosts(int count)
    : count_(count), stem_(absl::StrCat("rv", getpid() % 100000)) {}

std::string NetworkHosts::Name(int host) const {
  return absl::StrCat(stem_, "h", host);
}
std::string NetworkHosts::Address(int host) const {
  return absl::StrCat("10.93.7.", 10 + host);
}
std::string NetworkHosts::AddressV6(int host) const {
  return absl::StrCat("fd93:7::", 10 + host);
}
std::string NetworkHosts::DataAddress(int host) const {
  return absl::StrCat("10.93.8.", 10 + host);
}
std::vector<std::string> NetworkHosts::Prefix(int host) const {
  // Daemons tell hosts apart by their process ids' namespace.
  return {"/usr/bin/env",
          "ip",
          "netns",
          "exec",
          Name(host),
          "unshare",
          "--pid",
          "--fork",
          "--kill-child",
          "--mount-proc"};
}

std::vector<std::string> NetworkHosts::Prefix(int host, const std::string& folder) const {
  const std::string seen = SeenFolder(folder, host);
  std::filesystem::create_directories(seen);
  std::vector<std::string> words = Prefix(host);
  for (const std::string& word : {std::string("/bin/sh"),
                                  std::string("-c"),
                                  std::string("mount --bind \"$0\" \"$1\" && shift && exec \"$@\""),
                                  seen,
                                  folder}) {
    words.push_back(word);
  }
  return words;
}

std::string NetworkHosts::SeenFolder(const std::string& folder, int host) {
  return absl::StrCat(folder, "/hosts/", host);
}

absl::Status NetworkHosts::ChangePort(const std::string& program, const std::string& change) const {
  const ScratchFolder scratch;
  const std::string command = absl::StrCat(program, " -n ", stem_, " ", change);
  const RunResult done = Shell(command, scratch.path());
  return done.exit_code == 0 ? absl::OkStatus()
                             : absl::FailedPreconditionError(absl::StrCat(command, ": ", done.err));
}

absl::Status NetworkHosts::CutLink(int host) const {
  return ChangePort("ip", absl::StrCat("link set p", host, " down"));
}
absl::Status NetworkHosts::MendLink(int host) const {
  return ChangePort("ip", absl::StrCat("link set p", host, " up"));
}
absl::Status NetworkHosts::PartControl(const std::vector<int>& hosts) const {
  const ScratchFolder scratch;
  std::string script = "set -e\n";
  for (const int host : hosts) {
    for (const int other : hosts) {
      if (other != host) {
        absl::StrAppend(&script, "ip -n ", Name(host), " route add unreachable ");
        absl::StrAppend(&script, Address(other), "/32\n");
      }
    }
  }
  const RunResult done = Shell(script, scratch.path());
  return done.exit_code == 0 ? absl::OkStatus() : absl::InternalError(done.err);
}
absl::Status NetworkHosts::SendFrames() const {
  const ScratchFolder scratch;
  std::string script = "set -e\n";
  for (int host = 0; host < count_; ++host) {
    absl::StrAppend(&script, "ip -n ", Name(host), " link set eth0 gso_max_segs 1\n");
  }
  const RunResult done = Shell(script, scratch.path());
  return done.exit_code == 0 ? absl::OkStatus() : absl::FailedPreconditionError(done.err);
}
absl::Status NetworkHosts::LimitFrames(int host, Way way, int bytes) const {
  if (way == Way::kBoth) {  // a bridge drops what its port cannot carry, and sends no ICMP
    return ChangePort("ip", absl::StrCat("link set p", host, " mtu ", bytes));
  }
  // The host itself then sends shorter frames; the others go on as they agreed.
  const ScratchFolder scratch;
  const RunResult done =
      Shell(absl::StrCat("ip -n ", Name(host), " link set eth0 mtu ", bytes), scratch.path());
  return done.exit_code == 0 ? absl::OkStatus() : absl::FailedPreconditionError(done.err);
}
absl::Status NetworkHosts::Throttle(int host, int64_t bits_per_second) const {
  return ChangePort("tc",
                    absl::StrCat("qdisc add dev p",
                                 host,
                                 " root tbf rate ",
                                 bits_per_second,
                                 "bit burst 16kb latency 200ms"));
}
absl::Status NetworkHosts::EndThrottle(int host) const {
  return ChangePort("tc", absl::StrCat("qdisc del dev p", host, " root"));
}

absl::StatusOr<std::unique_ptr<ChildProcess>> NetworkHosts::Delay(
    int host, std::chrono::milliseconds time) const {
  const ScratchFolder scratch;
  const std::string netem = absl::StrCat(" root netem delay ", time.count(), "ms");
  const std::string both = absl::StrCat("tc -n ",
                                        stem_,
                                        " qdisc add dev d",
                                        host,
                                        netem,
                                        " && tc -n ",
                                        Name(host),
                                        " qdisc add dev eth1",
                                        netem);
  if (Shell(both, scratch.path()).exit_code == 0) {
    return nullptr;
  }
  // A second cable, from the bridge to the program; the host's own then ends at the program, too.
  const std::string in = absl::StrCat("ip -n ", stem_, " ");
  const RunResult made = Shell(absl::StrCat("set -e; ",
                                            in,
                                            "link add e type veth peer name f\n",
                                            in,
                                            "link set f master br1 up\n",
                                            in,
                                            "link set e up\n",
                                            in,
                                            "link set d",
                                            host,
                                            " nomaster\n"),
                               scratch.path());
  if (made.exit_code != 0) {
    return absl::FailedPreconditionError(made.err);
  }
  const std::string ready = scratch.path() + "/ready";
  ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> process,
                   ChildProcess::Start({.arguments = {"/usr/bin/env",
                                                      "ip",
                                                      "netns",
                                                      "exec",
                                                      stem_,
                                                      "python3",
                                                      RAVEL_DELAY_LINK,
                                                      absl::StrCat("d", host),
                                                      "e",
                                                      absl::StrCat(time.count()),
                                                      ready},
                                        .error_path = scratch.path() + "/log"}));
  const bool up = Eventually(kStartTime, [&] { return ReadText(ready) == "ready"; });
  return up ? absl::StatusOr<std::unique_ptr<ChildProcess>>(std::move(process))
            : absl::UnavailableError(ReadText(scratch.path() + "/log"));
}

absl::StatusOr<std::unique_ptr<NetworkHosts>> NetworkHosts::Create(int count) {
  const ScratchFolder scratch;
  std::unique_ptr<NetworkHosts> hosts(new NetworkHosts(count));
  // The bridge has a namespace of its own: nothing is left on the machine's own network.
  std::string script = absl::StrCat("set -e; ip netns add ", hosts->stem_, "\n");
  const std::string in = absl::StrCat("ip -n ", hosts->stem_, " ");
  for (const char* bridge : {"br0", "br1"}) {
    absl::StrAppend(&script, in, "link add ", bridge, " type bridge\n");
    absl::StrAppend(&script, in, "link set ", bridge, " up\n");
  }
  for (int host = 0; host < count; ++host) {
    const std::string name = hosts->Name(host);
    const std::string there = absl::StrCat("ip -n ", name, " ");
    const std::string port = absl::StrCat("p", host);
    absl::StrAppend(&script, "ip netns add ", name, "\n");
    absl::StrAppend(&script, in, "link add ", port, " type veth peer name eth0 netns ", name, "\n");
    absl::StrAppend(&script, in, "link set ", port, " master br0 up\n");
    absl::StrAppend(&script, there, "address add ", hosts->Address(host), "/24 dev eth0\n");
    absl::StrAppend(&script, there, "address add ", hosts->AddressV6(host), "/64 dev eth0 nodad\n");
    const std::string data = absl::StrCat("d", host);
    absl::StrAppend(&script, in, "link add ", data, " type veth peer name eth1 netns ", name, "\n");
    absl::StrAppend(&script, in, "link set ", data, " master br1 up\n");
    absl::StrAppend(&script, there, "address add ", hosts->DataAddress(host), "/24 dev eth1\n");
    for (const char* link : {"lo", "eth0", "eth1"}) {
      absl::StrAppend(&script, there, "link set ", link, " up\n");
    }
  }
  const RunResult made = Shell(script, scratch.path());
  if (made.exit_code != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine makes no network namespaces: ", made.err));
  }
  return hosts;
}

NetworkHosts::~NetworkHosts() {
  const ScratchFolder scratch;
  std::string script;
  for (int host = 0; host < count_; ++host) {
    absl::StrAppend(&script, "ip netns delete ", Name(host), "\n");
  }
  Shell(absl::StrCat(script, "ip netns delete ", stem_), scratch.path());
}

absl::StatusOr<std::unique_ptr<SecureCluster>> SecureCluster::Start(const SecureOptions& options) {
  std::unique_ptr<SecureCluster> cluster(new SecureCluster(options));
  std::vector<std::string> init = {BinaryPath("ravel-coordinator"),
                                   "init",
                                   "--state-dir",
                                   cluster->folder() + "/state",
                                   "--name",
                                   absl::StrJoin(options.names, ",")};
  init.insert(init.end(), options.init_flags.begin(), options.init_flags.end());
  const RunResult made = cluster->Run(init);
  if (made.exit_code != 0) {
    return absl::InternalError(absl::StrCat("init: ", made.err));
  }
  std::filesystem::create_directories(cluster->folder() + "/config/contexts");
  std::filesystem::copy(cluster->folder() + "/state/admin.context.json",
                        cluster->folder() + "/config/contexts/admin.json");
  cluster->listen_ = options.listen;
  RETURN_IF_ERROR(cluster->StartCoordinator());
  return cluster;
}

SecureCluster::~SecureCluster() {
  workers_.clear();
  coordinator_.reset();
}

absl::Status SecureCluster::StartCoordinator() {
  const std::string port_file = folder() + "/port";
  std::filesystem::remove(port_file);
  ProcessOptions process;
  process.arguments = options_.coordinator_host;
  for (const std::string& argument : {BinaryPath("ravel-coordinator"),
                                      std::string("--listen"),
                                      listen_,
                                      std::string("--state-dir"),
                                      folder() + "/state",
                                      std::string("--port-file"),
                                      port_file,
                                      std::string("--certificate-time"),
                                      options_.certificate_time,
                                      std::string("--detection"),
                                      options_.detection}) {
    process.arguments.push_back(argument);
  }
  if (!options_.page_tokens.empty()) {
    WriteText(folder() + "/page-tokens", options_.page_tokens);
    for (const std::string& argument : {std::string("--http-listen"),
                                        std::string("0.0.0.0:0"),
                                        std::string("--http-token-file"),
                                        folder() + "/page-tokens",
                                        std::string("--http-port-file"),
                                        folder() + "/http-port"}) {
      process.arguments.push_back(argument);
    }
  }
  process.output_path = process.error_path = folder() + "/coordinator.log";
  ASSIGN_OR_RETURN(coordinator_, ChildProcess::Start(process));
  const bool up = Eventually(kStartTime, [&] {
    return absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadText(port_file)), &port_) ||
           !coordinator_->Running();
  });
  if (!up || port_ == 0) {
    return absl::UnavailableError(absl::StrCat("no coordinator: ", Log("coordinator")));
  }
  const std::string& name = options_.names.front();
  const bool six = name.find(':') != std::string::npos;
  address_ = absl::StrCat(six ? "[" : "", name, six ? "]:" : ":", port_);
  listen_ = absl::StrCat(listen_.substr(0, listen_.rfind(':')), ":", port_);
  return absl::OkStatus();
}

std::string SecureCluster::http_port() const {
  return std::string(absl::StripAsciiWhitespace(ReadText(folder() + "/http-port")));
}

absl::Status SecureCluster::RestartCoordinator() {
  coordinator_->Kill();
  return StartCoordinator();
}

RunResult SecureCluster::Run(std::vector<std::string> arguments) const {
  return RunProgram({.arguments = std::move(arguments),
                     .environment = {{"RAVEL_CONFIG_DIR", folder() + "/config"}}},
                    folder(),
                    seconds(60));
}

RunResult SecureCluster::Ctl(std::vector<std::string> arguments,
                             const std::string& user,
                             std::chrono::milliseconds deadline) const {
  ProcessOptions options{.arguments = options_.coordinator_host,
                         .environment = {{"RAVEL_CONFIG_DIR", folder() + "/config"}}};
  for (const std::string& word : {BinaryPath("ravelctl"),
                                  std::string("--context"),
                                  user,
                                  std::string("--coordinator"),
                                  address_}) {
    options.arguments.push_back(word);
  }
  options.arguments.insert(options.arguments.end(), arguments.begin(), arguments.end());
  return RunProgram(options, folder(), deadline);
}

std::string SecureCluster::Token(std::vector<std::string> arguments) const {
  arguments.insert(arguments.begin(), "enrol");
  const RunResult result = Ctl(std::move(arguments));
  return result.exit_code == 0 ? std::string(absl::StripAsciiWhitespace(result.out)) : "";
}

RunResult SecureCluster::LogIn(const std::string& user, const std::string& token) const {
  std::vector<std::string> arguments = options_.coordinator_host;
  for (const std::string& word : {BinaryPath("ravelctl"),
                                  std::string("login"),
                                  std::string("--coordinator"),
                                  address_,
                                  std::string("--context"),
                                  user,
                                  token}) {
    arguments.push_back(word);
  }
  return Run(arguments);
}

RunResult SecureCluster::Join(const std::string& node,
                              const std::string& token,
                              const std::vector<std::string>& host) const {
  std::vector<std::string> arguments = host;
  for (const std::string& word : {BinaryPath("ravel-worker"),
                                  std::string("join"),
                                  std::string("--coordinator"),
                                  address_,
                                  std::string("--node-id"),
                                  node,
                                  std::string("--work-dir"),
                                  WorkDir(node),
                                  token}) {
    arguments.push_back(word);
  }
  return Run(arguments);
}

std::string SecureCluster::CertifyStore() const {
  const std::string identity = folder() + "/store-identity";
  const RunResult certified = Run({BinaryPath("ravel-coordinator"),
                                   "certify-store",
                                   "--state-dir",
                                   folder() + "/state",
                                   "--name",
                                   "127.0.0.1",
                                   "--out",
                                   identity});
  return certified.exit_code == 0 ? identity : "";
}

absl::Status SecureCluster::StartWorker(const std::string& node,
                                        const std::vector<std::string>& host,
                                        const std::vector<std::string>& more,
                                        const std::map<std::string, std::string>& environment) {
  ProcessOptions options{.arguments = host, .environment = environment};
  for (const std::string& word :
       {BinaryPath("ravel-worker"), std::string("--work-dir"), WorkDir(node)}) {
    options.arguments.push_back(word);
  }
  options.arguments.insert(options.arguments.end(), more.begin(), more.end());
  options.output_path = options.error_path = absl::StrCat(folder(), "/", node, ".log");
  ASSIGN_OR_RETURN(workers_[node], ChildProcess::Start(options));
  return absl::OkStatus();
}

bool SecureCluster::WaitForReady(int nodes) const {
  return Eventually(kStartTime, [&] {
    const RunResult result = Ctl({"nodes", "list", "-o", "jsonl"});
    int ready = 0;
    for (const absl::string_view line : absl::StrSplit(result.out, '\n', absl::SkipEmpty())) {
      const absl::StatusOr<json::Value> node = json::Parse(std::string(line));
      ready += node.ok() && TextOf(*node, "state") == "READY" ? 1 : 0;
    }
    return ready == nodes;
  });
}

std::vector<json::Value> SecureCluster::Audit() const {
  std::vector<json::Value> records;
  const RunResult result = Ctl({"audit", "-o", "jsonl"});
  for (const absl::string_view line : absl::StrSplit(result.out, '\n', absl::SkipEmpty())) {
    absl::StatusOr<json::Value> record = json::Parse(std::string(line));
    if (record.ok()) {
      records.push_back(*std::move(record));
    }
  }
  return records;
}

int SecureCluster::Audited(const std::string& who,
                           const std::string& verb,
                           const std::string& result) const {
  int found = 0;
  for (const json::Value& record : Audit()) {
    found += (who.empty() || TextOf(record, "who") == who) &&
                     (verb.empty() || TextOf(record, "verb") == verb) &&
                     (result.empty() || TextOf(record, "result") == result)
                 ? 1
                 : 0;
  }
  return found;
}

std::string SecureCluster::Report() const {
  std::string text = absl::StrCat("coordinator:\n", Log("coordinator"));
  for (const auto& [node, worker] : workers_) {
    absl::StrAppend(&text, node, ":\n", Log(node));
  }
  return absl::StrCat(text, "audit:\n", Ctl({"audit"}).out);
}

}  // namespace ravel::testing
