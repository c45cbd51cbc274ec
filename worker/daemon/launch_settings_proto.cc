#include "worker/daemon/launch_settings_proto.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/job_environment.h"
#include "common/net_address.h"
#include "proto/plan.pb.h"
#include "worker/daemon/job_secrets.h"

namespace ravel::daemon {
namespace {

constexpr size_t kMaxNetworks = 16;
constexpr size_t kMaxNetworkNameBytes = 63;

absl::Status CheckName(const std::string& name, const LaunchRules& rules) {
  if (const std::string expected = ExpectedName(name); !expected.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("expected ", expected));
  }
  return MatchesAny(name, rules.allowed)
             ? absl::OkStatus()
             : absl::PermissionDeniedError(
                   absl::StrCat(name,
                                ": this node allows no variable of this name (--job-environment ",
                                absl::StrJoin(rules.allowed, ","),
                                ")"));
}

absl::StatusOr<std::string> TextOf(const v1::PlannedVariable& variable,
                                   const std::string& namespace_name,
                                   const LaunchRules& rules) {
  if (variable.secret().empty()) {
    return variable.value();
  }
  if (!MayHoldSecret(variable.name())) {
    return absl::InvalidArgumentError("expected a variable that no library prints");
  }
  return ReadSecret(rules.secrets_root, namespace_name, variable.secret());
}

absl::Status AddVariables(const v1::PlannedJob& job,
                          const LaunchRules& rules,
                          LaunchSettings& settings) {
  if (job.environment_size() > kMaxJobVariables) {
    return absl::InvalidArgumentError(
        absl::StrCat("environment: expected at most ", kMaxJobVariables, " variables"));
  }
  std::set<std::string> names;
  for (int i = 0; i < job.environment_size(); ++i) {
    const v1::PlannedVariable& variable = job.environment(i);
    const std::string field = absl::StrCat("environment[", i, "]");
    RETURN_IF_ERROR(Annotate(CheckName(variable.name(), rules), field + ".name"));
    if (!names.insert(variable.name()).second) {
      return absl::InvalidArgumentError(absl::StrCat(field, ".name: expected each name once"));
    }
    const absl::StatusOr<std::string> text = TextOf(variable, job.namespace_(), rules);
    RETURN_IF_ERROR(
        Annotate(text.status(), field + (variable.secret().empty() ? ".value" : ".secret")));
    if (static_cast<int64_t>(text->size()) > kMaxSecretBytes ||
        text->find('\0') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ".value: expected a short text without zero bytes"));
    }
    settings.variables.push_back(absl::StrCat(variable.name(), "=", *text));
  }
  return absl::OkStatus();
}

bool IsNetworkName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNetworkNameBytes &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
         });
}

}  // namespace

absl::StatusOr<LaunchSettings> SettingsOf(const v1::Launch& launch, const LaunchRules& rules) {
  LaunchSettings settings;
  v1::PlannedJob job;
  if (launch.trainers().empty() || !job.ParseFromString(launch.trainers(0).job())) {
    return settings;  // the trainer says what is wrong with its job
  }
  RETURN_IF_ERROR(AddVariables(job, rules, settings));
  for (const std::string* place : {&job.store(), &launch.trainers(0).restore_path()}) {
    if (rules.without_certificate && absl::StartsWith(*place, "ravel://")) {
      return absl::FailedPreconditionError(
          absl::StrCat(place == &job.store() ? "checkpoint.store: " : "checkpoint.resumeFrom: ",
                       "trainers of this node are another user than its daemon (--trainer-user) "
                       "and cannot show the node's certificate to a ravel-store"));
    }
  }
  if (job.network().empty()) {
    return settings;
  }
  const auto network = rules.networks.find(job.network());
  if (network == rules.networks.end()) {
    std::vector<std::string> names;
    for (const auto& [name, ignored] : rules.networks) {
      names.push_back(name);
    }
    return absl::NotFoundError(absl::StrCat("communication.network: this node has no network '",
                                            job.network(),
                                            "' (--network); it has ",
                                            names.empty() ? "none" : absl::StrJoin(names, ", ")));
  }
  settings.host_address = network->second.address;
  // NCCL takes no address but this name, `=`: exactly.
  settings.variables.push_back("NCCL_SOCKET_IFNAME==" + network->second.interface);
  return settings;
}

absl::StatusOr<std::map<std::string, JobNetwork>> ParseNetworks(
    const std::vector<std::string>& flags) {
  std::map<std::string, JobNetwork> networks;
  for (const std::string& flag : flags) {
    const size_t equals = flag.find('=');
    const std::string name = flag.substr(0, equals);
    if (equals == std::string::npos || !IsNetworkName(name) || equals + 1 == flag.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          flag, ": expected NAME=INTERFACE, the name of lower-case letters, digits and -"));
    }
    if (networks.contains(name) || networks.size() >= kMaxNetworks) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": expected at most ", kMaxNetworks, " networks, each once"));
    }
    JobNetwork network{.interface = flag.substr(equals + 1), .address = {}};
    absl::StatusOr<std::string> address = AddressOfInterface(network.interface);
    RETURN_IF_ERROR(Annotate(address.status(), flag));
    network.address = *std::move(address);
    networks.emplace(name, std::move(network));
  }
  return networks;
}

}  // namespace ravel::daemon
