#pragma once

// The part of ravelctl's command line that is about identities, and about which coordinator is
// meant.

#include <cstdint>
#include <functional>
#include <string>

#include "coordinator/ctl/access_verbs.h"
#include "coordinator/ctl/contexts.h"

namespace CLI {
class App;
}

namespace ravel::ctl {

// The parsed options of these verbs.
struct AccessLine {
  EndpointOptions endpoint;
  LoginOptions login;
  EnrolOptions enrol;
  std::string revoked;
  std::string context;
  int64_t after_seq = 0;
  bool renew = false;
};

// Options of every verb: --coordinator and --context.
void AddEndpoint(CLI::App& app, AccessLine& line);
// Adds the verbs; the one that is chosen puts its work into `run`. All arguments outlive `app`.
void AddAccessVerbs(CLI::App& app,
                    CommonOptions& common,
                    AccessLine& line,
                    std::function<int()>& run);
// False for verbs that set contexts up: they run when the one in use is broken.
bool NeedsEndpoint(const CLI::App& app);
// Sets common.coordinator from what the command line says, and renews its certificate when due.
absl::Status FindCoordinator(const AccessLine& line, CommonOptions& common);

}  // namespace ravel::ctl
