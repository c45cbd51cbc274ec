#include "worker/daemon/launch_settings_proto.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"
#include "common/field_error.h"
#include "common/job_environment.h"
#include "common/net_address.h"
#include "common/signed_size.h"
#include "common/store/ravel_url.h"
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

// A refusal of a field: its message and its payload name the field.
absl::Status InField(const absl::Status& why, const std::string& field) {
  return why.ok()
             ? why
             : WithFieldErrors(Annotate(why, field), {{field, std::string(why.message()), ""}});
}

absl::StatusOr<std::string> TextOf(const NeededVariable& variable,
                                   const std::string& namespace_name,
                                   const LaunchRules& rules) {
  if (!MayHoldSecret(variable.name)) {
    return absl::InvalidArgumentError("expected a variable that no library prints");
  }
  return ReadSecret(rules.secrets_root, namespace_name, variable.secret);
}

// `values`: texts of the variables that come by value; none in a look, which has no launch yet.
absl::Status AddVariables(const JobNeeds& needs,
                          const std::vector<std::string>& values,
                          const LaunchRules& rules,
                          LaunchSettings& settings) {
  if (needs.environment.size() > Size(kMaxJobVariables)) {
    return InField(absl::InvalidArgumentError(
                       absl::StrCat("expected at most ", kMaxJobVariables, " variables")),
                   "environment");
  }
  std::set<std::string> names;
  for (size_t i = 0; i < needs.environment.size(); ++i) {
    const NeededVariable& variable = needs.environment[i];
    const std::string field = absl::StrCat("environment[", i, "]");
    RETURN_IF_ERROR(InField(CheckName(variable.name, rules), field + ".name"));
    if (!names.insert(variable.name).second) {
      return InField(absl::InvalidArgumentError("expected each name once"), field + ".name");
    }
    std::string text = i < values.size() ? values[i] : "";
    if (!variable.secret.empty()) {
      absl::StatusOr<std::string> secret = TextOf(variable, needs.namespace_name, rules);
      RETURN_IF_ERROR(InField(secret.status(), field + ".secret"));
      text = *std::move(secret);
    }
    if (static_cast<int64_t>(text.size()) > kMaxSecretBytes ||
        text.find('\0') != std::string::npos) {
      return InField(absl::InvalidArgumentError("expected a short text without zero bytes"),
                     field + ".value");
    }
    settings.variables.push_back(absl::StrCat(variable.name, "=", text));
  }
  return absl::OkStatus();
}

absl::Status ChooseNetwork(const std::string& name,
                           const LaunchRules& rules,
                           LaunchSettings& settings) {
  if (name.empty()) {
    return absl::OkStatus();
  }
  const auto network = rules.networks.find(name);
  if (network == rules.networks.end()) {
    std::vector<std::string> names;
    for (const auto& [known, ignored] : rules.networks) {
      names.push_back(known);
    }
    return InField(
        absl::NotFoundError(absl::StrCat("this node has no network '",
                                         name,
                                         "' (--network); it has ",
                                         names.empty() ? "none" : absl::StrJoin(names, ", "))),
        "communication.network");
  }
  settings.host_address = network->second.address;
  // NCCL takes no address but this name, `=`: exactly.
  settings.variables.push_back("NCCL_SOCKET_IFNAME==" + network->second.interface);
  return absl::OkStatus();
}

absl::StatusOr<LaunchSettings> Serve(const JobNeeds& needs,
                                     const std::vector<std::string>& values,
                                     const LaunchRules& rules) {
  LaunchSettings settings;
  RETURN_IF_ERROR(AddVariables(needs, values, rules, settings));
  RETURN_IF_ERROR(ChooseNetwork(needs.network, rules, settings));
  return settings;
}

bool IsNetworkName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxNetworkNameBytes &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
         });
}

}  // namespace

bool HasSecrets(const v1::Launch& launch) {
  v1::PlannedJob job;
  return !launch.trainers().empty() && job.ParseFromString(launch.trainers(0).job()) &&
         std::any_of(
             job.environment().begin(),
             job.environment().end(),
             [](const v1::PlannedVariable& variable) { return !variable.secret().empty(); });
}

absl::StatusOr<LaunchSettings> SettingsOf(const v1::Launch& launch, const LaunchRules& rules) {
  v1::PlannedJob job;
  if (launch.trainers().empty() || !job.ParseFromString(launch.trainers(0).job())) {
    return LaunchSettings{};  // the trainer says what is wrong with its job
  }
  JobNeeds needs{.namespace_name = job.namespace_(), .network = job.network()};
  std::vector<std::string> values;
  for (const v1::PlannedVariable& variable : job.environment()) {
    needs.environment.push_back({variable.name(), variable.secret()});
    values.push_back(variable.value());
  }
  ASSIGN_OR_RETURN(LaunchSettings settings, Serve(needs, values, rules));
  settings.certify_trainers = rules.certify_trainers &&
                              (job.store().starts_with(store::kRavelScheme) ||
                               launch.trainers(0).restore_path().starts_with(store::kRavelScheme));
  return settings;
}

std::optional<NeedRefusal> RefusalOf(const JobNeeds& needs, const LaunchRules& rules) {
  const absl::Status served = Serve(needs, {}, rules).status();
  if (served.ok()) {
    return std::nullopt;
  }
  const std::vector<FieldError> errors = FieldErrorsOf(served);
  CHECK(!errors.empty());
  return NeedRefusal{errors.front().path, errors.front().expected};
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
