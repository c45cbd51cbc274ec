#pragma once

// An S3 server that is not ours with one empty bucket, `bucket`, behind a proxy that fails on
// purpose: of each six changing requests one is answered 503, one is done but its answer lost, and
// others answered as if two writers had come at once, or with an error in a 200. The server is moto
// (from PyPI), or Swift (from Debian; see swift_server.py).

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
  // `kind`: "moto" or "swift". NotFound without it: moto_server is made by tests/testing/moto.sh or
  // named by RAVEL_MOTO_SERVER; Swift's packages are in deploy/packages.txt.
  static absl::StatusOr<std::unique_ptr<S3Server>> Start(const std::string& kind = "moto");
  // Over TLS, by an authority of its own, and without the proxy: "https://localhost:PORT", whose
  // certificate is good for bucket.localhost, too.
  static absl::StatusOr<std::unique_ptr<S3Server>> StartSecure();

  // SIGKILL to the proxy, with all that it was about to pass on, and another at its address: what a
  // client sees of a service that dies. The objects stay.
  absl::Status KillAndStart();

  // Points this process, and the programs that it starts, to the server.
  void UseHere() const;
  // The same without the proxy that fails: to one of Swift's own, "shipped", "late" or
  // "conditional".
  void UseSwiftHere(const std::string& name) const;
  // To one of Swift's servers, by the names in swift_server.py. One that dies of it is back, as
  // another process at the same port, when this returns.
  absl::Status SignalSwift(const std::string& name, int number) const;
  std::string SwiftLog() const;
  // True while a server of objects has taken a megabyte of an object that it does not have whole.
  bool SwiftWritesPart() const;
  // Its address and the keys to it, for programs.
  const std::map<std::string, std::string>& environment() const { return environment_; }

 private:
  S3Server() = default;
  // `more`: arguments of the server; `address`: how its log begins a URL.
  absl::StatusOr<int> StartServer(const std::vector<std::string>& more, const std::string& address);
  absl::Status StartSwift();
  struct SwiftPlace {
    int port = 0;
    int process = 0;
  };
  std::map<std::string, SwiftPlace> SwiftPlaces() const;
  void SetEnvironment(const std::string& endpoint);
  // `known`: its port; 0: a free one.
  absl::StatusOr<int> StartProxy(int known);

  ScratchFolder scratch_;
  std::string access_key_ = "id";
  std::unique_ptr<ChildProcess> server_;
  std::unique_ptr<ChildProcess> proxy_;
  std::map<std::string, std::string> environment_;
  int server_port_ = 0;
  int proxy_port_ = 0;
};

}  // namespace ravel::testing
