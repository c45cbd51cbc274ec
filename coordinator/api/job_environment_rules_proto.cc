// JobRules: the needs of a job beside devices and paths. Names, secrets and networks that a node
// has are its operator's to say: nodes are asked at a submission (job_looks_proto) and refuse at a
// launch (worker/daemon/launch_settings_proto).

#include <algorithm>
#include <set>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "common/job_environment.h"
#include "coordinator/api/field_rules_proto.h"
#include "coordinator/api/job_rules_proto.h"

namespace ravel {
namespace {

constexpr size_t kMaxNetworkNameBytes = 63;

}  // namespace

void JobRules::CheckEnvironment() {
  const int count = job().environment_size();
  if (count > kMaxJobVariables) {
    Fail("spec.environment",
         absl::StrCat("at most ", kMaxJobVariables, " variables"),
         absl::StrCat(count));
    return;
  }
  std::set<std::string> names;
  for (int i = 0; i < count; ++i) {
    CheckVariable(i);
    const std::string& name = job().environment(i).name();
    if (!names.insert(name).second) {
      Fail(absl::StrCat("spec.environment[", i, "].name"), "each name once", QuotedOrNothing(name));
    }
  }
}

void JobRules::CheckVariable(int index) {
  const v1::EnvironmentVariable& variable = job().environment(index);
  const std::string at = absl::StrCat("spec.environment[", index, "]");
  const std::string& name = variable.name();
  const bool by_reference = !variable.secret().empty();
  if (const std::string expected = ExpectedName(name); !expected.empty()) {
    Fail(at + ".name", expected, QuotedOrNothing(name));
  } else if (variable.has_value() == by_reference) {
    Fail(at, "exactly one of value and secret", by_reference ? "both" : "neither");
  } else if (!by_reference && SoundsSecret(name)) {
    Fail(at + ".value", "`secret: SECRET/KEY` instead, since everybody sees a value", "a value");
  } else if (by_reference && !MayHoldSecret(name)) {
    Fail(at + ".secret", "a variable that no library prints into the job's log", name);
  }
  if (const std::string expected = ExpectedSecret(variable.secret());
      by_reference && !expected.empty()) {
    Fail(at + ".secret", expected, "another text");
  }
  spec().environment.push_back({name, variable.value(), variable.secret()});
}

void JobRules::CheckCommunication() {
  const std::string& network = job().communication().network();
  const bool spelled = network.size() <= kMaxNetworkNameBytes &&
                       std::all_of(network.begin(), network.end(), [](unsigned char c) {
                         return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
                       });
  if (!spelled) {
    Fail("spec.communication.network",
         "the name of a network: lower-case letters, digits and -, at most 63",
         QuotedOrNothing(network));
  }
  spec().network = network;
}

JobNeeds NeedsOf(const CanonicalJob& job) {
  JobNeeds needs{.namespace_name = job.spec.namespace_name, .network = job.spec.network};
  for (const plan::EnvironmentVariable& variable : job.spec.environment) {
    needs.environment.push_back({variable.name, variable.secret});
  }
  return needs;
}

}  // namespace ravel
