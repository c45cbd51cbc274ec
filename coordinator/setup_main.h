#pragma once

// Verbs of ravel-coordinator that run and end: `init` makes a cluster, `authority` rotates what
// signs its certificates. Both work on the state directory; a coordinator that runs on it sees a
// new authority by itself.

#include <optional>
#include <string>

#include "coordinator/access/cluster_init.h"

namespace CLI {
class App;
}

namespace ravel::coordinator {

struct SetupVerbs {
  InitOrder init;
  std::string state_dir;  // of `authority`
  bool force = false;
};

void AddSetupVerbs(CLI::App& app, SetupVerbs& verbs);
// Runs the verb that the command line names; nothing when it names none. The exit code.
std::optional<int> RunSetupVerb(const CLI::App& app, const SetupVerbs& verbs);

}  // namespace ravel::coordinator
