#pragma once

// Verbs of ravel-coordinator that run and end: `init` makes a cluster, `authority` rotates what
// signs its certificates, `certify-store` makes those of a ravel-store. All work on the state
// directory; a coordinator that runs on it sees a new authority by itself.

#include <optional>
#include <string>

#include "coordinator/access/cluster_init.h"
#include "coordinator/access/store_certificate.h"

namespace CLI {
class App;
}

namespace ravel::coordinator {

struct SetupVerbs {
  InitOrder init;
  std::string state_dir;  // of `authority`
  bool force = false;
  StoreCertificateOrder certify = {};
};

void AddSetupVerbs(CLI::App& app, SetupVerbs& verbs);
// Towards stores a running coordinator is itself, by certificates of a day that are made as they
// are needed. An identity in the environment (RAVEL_STORE_IDENTITY) goes first.
void UseOwnIdentityForStores(const std::string& state_dir);
// Runs the verb that the command line names; nothing when it names none. The exit code.
std::optional<int> RunSetupVerb(const CLI::App& app, const SetupVerbs& verbs);

}  // namespace ravel::coordinator
