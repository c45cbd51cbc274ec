#pragma once

// Contexts of ravelctl on this machine: FOLDER/contexts/NAME.json, and FOLDER/current with the name
// of the one in use. FOLDER: $RAVEL_CONFIG_DIR, else $XDG_CONFIG_HOME/ravel, else ~/.config/ravel.

#include <optional>
#include <string>
#include <vector>

#include "common/net_address.h"
#include "common/status.h"
#include "coordinator/ctl/endpoint.h"

namespace ravel::ctl {

std::string ContextFolder();
// A name, or with a '/' the path of a file.
absl::StatusOr<std::string> ContextPath(const std::string& name);
// Empty: none is in use.
std::string CurrentContext();
absl::Status UseContext(const std::string& name);
std::vector<std::string> ContextNames();
// The name of a context that is new: the host of its coordinator, HOST-PORT where another
// coordinator of that host has the name, "coordinator" for an IPv6 address.
std::string ContextNameOf(const HostPort& address, const std::string& coordinator);
// Writes it, makes its folder (0700) when there is none.
absl::Status SaveContext(const std::string& name, const coordinator::ContextFile& context);

// The command line's options that choose a coordinator.
struct EndpointOptions {
  std::optional<std::string> coordinator;  // also from RAVEL_COORDINATOR
  std::string context;                     // also from RAVEL_CONTEXT; empty: none
};
struct ChosenEndpoint {
  Endpoint endpoint;
  std::string context_path;  // empty: plaintext
};
// A context that is named; else a coordinator that is named, in plaintext; else the context in use;
// else the plaintext coordinator of this machine.
absl::StatusOr<ChosenEndpoint> ChooseEndpoint(const EndpointOptions& options);

}  // namespace ravel::ctl
