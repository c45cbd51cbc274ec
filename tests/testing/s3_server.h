#pragma once

// An S3 server that is not ours (moto, from PyPI) with one empty bucket, `bucket`, behind a proxy
// that fails on purpose: of each six changing requests one is answered 503, one is done but its
// answer lost, and others answered as if two writers had come at once, or with an error in a 200.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/testing/process.h"

namespace ravel::testing {

// Used only from the test's main thread.
class S3Server {
 public:
  // NotFound without moto_server: tests/testing/moto.sh makes one, or RAVEL_MOTO_SERVER names it.
  static absl::StatusOr<std::unique_ptr<S3Server>> Start();
  // Over TLS, by an authority of its own, and without the proxy: "https://localhost:PORT", whose
  // certificate is good for bucket.localhost, too.
  static absl::StatusOr<std::unique_ptr<S3Server>> StartSecure();

  // SIGKILL to the proxy, with all that it was about to pass on, and another at its address: what a
  // client sees of a service that dies. The objects stay.
  absl::Status KillAndStart();

  // Points this process, and the programs that it starts, to the server.
  void UseHere() const;
  // Its address and the keys to it, for programs.
  const std::map<std::string, std::string>& environment() const { return environment_; }

 private:
  S3Server() = default;
  // `more`: arguments of the server; `address`: how its log begins a URL.
  absl::StatusOr<int> StartServer(const std::vector<std::string>& more, const std::string& address);
  void SetEnvironment(const std::string& endpoint);
  // `known`: its port; 0: a free one.
  absl::StatusOr<int> StartProxy(int known);

  ScratchFolder scratch_;
  std::unique_ptr<ChildProcess> server_;
  std::unique_ptr<ChildProcess> proxy_;
  std::map<std::string, std::string> environment_;
  int server_port_ = 0;
  int proxy_port_ = 0;
};

}  // namespace ravel::testing
