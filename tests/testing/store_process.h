#pragma once

// ravel-store as a process that tests kill and start again.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "tests/testing/process.h"

namespace ravel::testing {

struct StorePlace {
  std::string folder;                   // as the program sees it; data is below `data`
  std::string seen_folder = {};         // the same folder as the test sees it; empty: `folder`
  std::vector<std::string> host = {};   // NetworkHosts::Prefix; empty: here
  std::string address = "127.0.0.1";    // listens there
  std::vector<std::string> flags = {};  // --dev-loopback, or --identity DIR and the like
};

// On the same port after each start. Used only from the test's main thread.
class StoreProcess {
 public:
  explicit StoreProcess(StorePlace place);

  // Returns once it answers; what runs is killed first.
  absl::Status Start(const std::map<std::string, std::string>& environment = {});
  // SIGKILL, and gone when this returns.
  void Kill();
  absl::Status KillAndStart();
  // After a fault has killed it.
  bool WaitForDeath();
  std::string Url(const std::string& path) const;
  // The file behind a path of the store, as the test sees it.
  std::string File(const std::string& path) const { return Seen() + "/data/files/" + path; }
  std::string Log() const { return ReadText(Seen() + "/log"); }

 private:
  const std::string& Seen() const {
    return place_.seen_folder.empty() ? place_.folder : place_.seen_folder;
  }

  const StorePlace place_;
  std::unique_ptr<ChildProcess> process_;
  int port_ = 0;
};

}  // namespace ravel::testing
