#pragma once

// A Ravel with certificates, made as an administrator makes one: init, enrol, join. Its programs
// may run on "hosts": network namespaces, or all on this machine's loopback.

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"
#include "tests/testing/process.h"

namespace ravel::testing {

// Network namespaces with two interfaces each, joined by two bridges; gone with this object.
class NetworkHosts {
 public:
  // FailedPrecondition says why this machine has none: no root, no `ip`, no rights.
  static absl::StatusOr<std::unique_ptr<NetworkHosts>> Create(int count);
  ~NetworkHosts();
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;

  std::string Address(int host) const;
  std::string AddressV6(int host) const;
  // The host's second interface, eth1, is on a bridge of its own and has this address.
  std::string DataAddress(int host) const;
  // Hosts of this list reach each other at DataAddress alone.
  absl::Status PartControl(const std::vector<int>& hosts) const;
  // What a command line begins with to run there.
  std::vector<std::string> Prefix(int host) const;
  // As above, and what is seen as `folder` there is SeenFolder(folder, host): such hosts share no
  // file of it.
  std::vector<std::string> Prefix(int host, const std::string& folder) const;
  static std::string SeenFolder(const std::string& folder, int host);
  // The cable between a host and the bridge.
  absl::Status CutLink(int host) const;
  absl::Status MendLink(int host) const;
  // Connections made from now on send frames of their own, as a wire carries them: not whole
  // segments, which the cables of namespaces would carry past any limit.
  absl::Status SendFrames() const;
  // Longer frames vanish, and no end is told, between a host and the bridge (kBoth), or on their
  // way to the host alone. 1500: none do.
  enum class Way { kBoth, kToHost };
  absl::Status LimitFrames(int host, Way way, int bytes) const;
  // Bits to the host go that fast, by a token bucket (tbf). FailedPrecondition where the kernel has
  // none.
  absl::Status Throttle(int host, int64_t bits_per_second) const;
  absl::Status EndThrottle(int host) const;
  // Frames between a host's second interface and the bridge take that much longer, each way: by
  // netem, which holds until the host ends, or where the kernel has none by the process that is
  // returned, which holds while it runs.
  absl::StatusOr<std::unique_ptr<ChildProcess>> Delay(int host,
                                                      std::chrono::milliseconds time) const;

 private:
  explicit NetworkHosts(int count);
  std::string Name(int host) const;
  // Port 0 of the bridge leads to host 0.
  absl::Status ChangePort(const std::string& program, const std::string& change) const;

  const int count_;
  const std::string stem_;
};

struct SecureOptions {
  std::string listen = "127.0.0.1:0";
  std::vector<std::string> names = {"127.0.0.1", "localhost"};
  std::vector<std::string> coordinator_host = {};  // NetworkHosts::Prefix
  std::string certificate_time = "24h";
  std::string detection = "5s";
  std::vector<std::string> init_flags = {};  // of `ravel-coordinator init`, beyond names and state
  // Tokens of its pages, which it then serves at 0.0.0.0; empty: it serves none.
  std::string page_tokens = {};
};

// Used only from the test's main thread.
class SecureCluster {
 public:
  // The administrator's context is in use.
  static absl::StatusOr<std::unique_ptr<SecureCluster>> Start(const SecureOptions& options);
  ~SecureCluster();

  const std::string& folder() const { return scratch_.path(); }
  const std::string& address() const { return address_; }
  int port() const { return port_; }
  std::string http_port() const;
  absl::Status RestartCoordinator();
  void KillCoordinator() { coordinator_->Kill(); }

  // ravelctl by a context of that user: `admin`, or one that has logged in.
  RunResult Ctl(std::vector<std::string> arguments,
                const std::string& user = "admin",
                std::chrono::milliseconds deadline = std::chrono::seconds(60)) const;
  RunResult Run(std::vector<std::string> arguments) const;
  // The token that `enrol` prints; empty when it is refused.
  std::string Token(std::vector<std::string> arguments) const;
  // A context named for the user.
  RunResult LogIn(const std::string& user, const std::string& token) const;
  RunResult Join(const std::string& node,
                 const std::string& token,
                 const std::vector<std::string>& host = {}) const;
  // A folder with a new identity of a store on 127.0.0.1; empty when it is refused.
  std::string CertifyStore() const;
  absl::Status StartWorker(const std::string& node,
                           const std::vector<std::string>& host = {},
                           const std::vector<std::string>& more = {},
                           const std::map<std::string, std::string>& environment = {});
  ChildProcess& Worker(const std::string& node) { return *workers_.at(node); }
  std::string WorkDir(const std::string& node) const { return folder() + "/" + node; }
  std::string Log(const std::string& program) const {
    return ReadText(folder() + "/" + program + ".log");
  }
  bool WaitForReady(int nodes) const;
  // `ravelctl audit -o jsonl`
  std::vector<json::Value> Audit() const;
  // Number of records with these values; an empty one matches all.
  int Audited(const std::string& who, const std::string& verb, const std::string& result) const;
  // What there is to read of a failure.
  std::string Report() const;

 private:
  explicit SecureCluster(SecureOptions options) : options_(std::move(options)) {}
  absl::Status StartCoordinator();

  const SecureOptions options_;
  ScratchFolder scratch_;
  std::string listen_;
  std::string address_;
  int port_ = 0;
  std::unique_ptr<ChildProcess> coordinator_;
  std::map<std::string, std::unique_ptr<ChildProcess>> workers_;
};

}  // namespace ravel::testing
