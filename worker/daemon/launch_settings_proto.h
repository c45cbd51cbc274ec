#pragma once

// The things that a job asks of a node beside devices and paths, and what the node's operator
// allows: variables and secrets of the trainers' environment, and the network between them.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/path_facts.h"
#include "common/status.h"
#include "proto/fleet.pb.h"

namespace ravel::daemon {

struct JobNetwork {
  std::string interface;
  std::string address;
};

// The values of --job-environment, --secrets-root and --network.
struct LaunchRules {
  std::vector<std::string> allowed = {};  // patterns of names
  std::string secrets_root = {};          // empty: none
  std::map<std::string, JobNetwork> networks = {};
  // Trainers are another user, who cannot read the node's key: to a ravel-store they show a
  // certificate of their own.
  bool certify_trainers = false;
};

struct LaunchSettings {
  std::vector<std::string> variables = {};  // "NAME=text", secrets included: never logged
  std::string host_address = {};            // empty: the node's own
  bool certify_trainers = false;            // the job names a store that asks for a certificate
};

// A variable of the job is a secret. False where the job cannot be read.
bool HasSecrets(const v1::Launch& launch);

// Reads secrets, which may hang. A status that is not OK names the field of the job file, never a
// secret's text; its reason is EnvironmentRefused. Launches of no trainer ask for nothing.
absl::StatusOr<LaunchSettings> SettingsOf(const v1::Launch& launch, const LaunchRules& rules);

// A field of the job file, below `spec`, that this node cannot serve, and why.
struct NeedRefusal {
  std::string field;
  std::string why;  // never a secret's text
};
// The refusal that a launch with these needs would meet now. Reads secrets and keeps none.
std::optional<NeedRefusal> RefusalOf(const JobNeeds& needs, const LaunchRules& rules);

// --network NAME=INTERFACE: the address of the interface now. InvalidArgument says what was
// expected.
absl::StatusOr<std::map<std::string, JobNetwork>> ParseNetworks(
    const std::vector<std::string>& flags);

}  // namespace ravel::daemon
