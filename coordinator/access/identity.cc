#include "coordinator/access/identity.h"

#include <algorithm>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

namespace ravel::coordinator {
namespace {

constexpr char kScheme[] = "spiffe://";
constexpr char kDomain[] = ".ravel";
constexpr size_t kMaxName = 63;
// For nodes alone; users, however powerful, are no nodes.
constexpr int kNodesOnly = -1;
// For every node and user.
constexpr int kAnybody = -2;
// The one kind of calls that stores make.
constexpr int kStoresAndAdmins = -3;

struct MethodRule {
  std::string_view method;
  int least_role;  // a Role of users, or one of the negative numbers above
  bool changes;
};

constexpr std::string_view kEnrol = "/ravel.v1.Access/Enrol";
constexpr std::string_view kHealthCheck = "/grpc.health.v1.Health/Check";
constexpr std::string_view kHealthWatch = "/grpc.health.v1.Health/Watch";

constexpr int kViewer = static_cast<int>(Role::kViewer);
constexpr int kUser = static_cast<int>(Role::kUser);
constexpr int kOperator = static_cast<int>(Role::kOperator);
constexpr int kAdmin = static_cast<int>(Role::kAdmin);

// Deny by default: a call that is not here is nobody's.
constexpr MethodRule kRules[] = {
    {"/ravel.v1.Jobs/GetJob", kViewer, false},
    {"/ravel.v1.Jobs/ListJobs", kViewer, false},
    {"/ravel.v1.Jobs/WatchJob", kViewer, false},
    {"/ravel.v1.Jobs/WatchOperation", kViewer, false},
    {"/ravel.v1.Jobs/ListEvents", kViewer, false},
    {"/ravel.v1.Jobs/StreamEvents", kViewer, false},
    {"/ravel.v1.Jobs/StreamLogs", kViewer, false},
    {"/ravel.v1.Jobs/StreamMetrics", kViewer, false},
    {"/ravel.v1.Jobs/ListCheckpoints", kViewer, false},
    {"/ravel.v1.Jobs/ListNodes", kViewer, false},
    {"/ravel.v1.Jobs/ServerInfo", kViewer, false},
    {"/ravel.v1.Jobs/ValidateJob", kUser, false},
    {"/ravel.v1.Jobs/SubmitJob", kUser, true},
    {"/ravel.v1.Jobs/CancelJob", kUser, true},
    {"/ravel.v1.Jobs/DeleteJob", kUser, true},
    {"/ravel.v1.Jobs/RetryJob", kUser, true},
    {"/ravel.v1.Jobs/CheckpointNow", kUser, true},
    {"/ravel.v1.Jobs/RollbackJob", kUser, true},
    {"/ravel.v1.Jobs/MarkCheckpoint", kUser, true},
    {"/ravel.v1.Jobs/ForgetNode", kOperator, true},
    {"/ravel.v1.Jobs/HoldNode", kOperator, true},
    {"/ravel.v1.Access/CreateToken", kAdmin, true},
    {"/ravel.v1.Access/Revoke", kAdmin, true},
    {"/ravel.v1.Access/ListIdentities", kAdmin, false},
    {"/ravel.v1.Access/ListAudit", kAdmin, false},
    {"/ravel.v1.Access/GetTrust", kStoresAndAdmins, false},
    {"/ravel.v1.Access/Renew", kAnybody, true},
    {"/ravel.v1.Access/CertifyTrainer", kNodesOnly, true},
    {"/ravel.v1.Access/WhoAmI", kAnybody, false},
    {"/ravel.v1.Fleet/Connect", kNodesOnly, false},
    {"/ravel.v1.Fleet/FetchPlan", kNodesOnly, false},
    {kHealthWatch, kAnybody, false},
};

const MethodRule* RuleOf(std::string_view method) {
  const auto* const found =
      std::find_if(std::begin(kRules), std::end(kRules), [&](const MethodRule& rule) {
        return rule.method == method;
      });
  return found == std::end(kRules) ? nullptr : found;
}

bool Allows(const MethodRule& rule, const Identity& caller) {
  switch (caller.kind) {
    case IdentityKind::kNode:
      return rule.least_role == kAnybody || rule.least_role == kNodesOnly;
    case IdentityKind::kStore:
      return rule.least_role == kStoresAndAdmins;
    case IdentityKind::kTrainer:
      return false;  // it speaks to stores alone
    case IdentityKind::kUser:
      break;
  }
  if (rule.least_role == kStoresAndAdmins) {
    return static_cast<int>(caller.role) >= kAdmin;
  }
  return rule.least_role == kAnybody ||
         (rule.least_role >= 0 && static_cast<int>(caller.role) >= rule.least_role);
}

bool IsTrainerName(std::string_view name) {
  const size_t slash = name.find('/');
  return slash != std::string_view::npos && CheckIdentityName("node", name.substr(0, slash)).ok() &&
         CheckIdentityName("job", name.substr(slash + 1)).ok();
}

std::string NeededFor(const MethodRule* rule) {
  if (rule == nullptr || rule->least_role == kAnybody) {
    return "an identity that this release knows of";
  }
  if (rule->least_role == kNodesOnly) {
    return "the certificate of a node";
  }
  return rule->least_role == kStoresAndAdmins
             ? "the certificate of a store or the role admin"
             : absl::StrCat("the role ", NameOf(static_cast<Role>(rule->least_role)));
}

}  // namespace

std::string Identity::Text() const {
  return kind == IdentityKind::kStore ? NameOf(kind) : absl::StrCat(NameOf(kind), "/", name);
}

const char* NameOf(IdentityKind kind) {
  switch (kind) {
    case IdentityKind::kNode:
      return "node";
    case IdentityKind::kUser:
      return "user";
    case IdentityKind::kStore:
      return "store";
    case IdentityKind::kTrainer:
      return "trainer";
  }
  return "unknown";
}

const char* NameOf(Role role) {
  switch (role) {
    case Role::kNode:
      return "node";
    case Role::kViewer:
      return "viewer";
    case Role::kUser:
      return "user";
    case Role::kOperator:
      return "operator";
    case Role::kAdmin:
      return "admin";
  }
  return "unknown";
}

absl::StatusOr<Role> ParseRole(std::string_view text) {
  for (const Role role : {Role::kViewer, Role::kUser, Role::kOperator, Role::kAdmin}) {
    if (text == NameOf(role)) {
      return role;
    }
  }
  return absl::InvalidArgumentError("role: expected viewer, user, operator or admin");
}

absl::Status CheckIdentityName(std::string_view field, std::string_view name) {
  const bool good = !name.empty() && name.size() <= kMaxName && name[0] != '.' && name[0] != '-' &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' ||
                             c == '_' || c == '-';
                    });
  return good ? absl::OkStatus()
              : absl::InvalidArgumentError(absl::StrCat(
                    std::string(field),
                    ": expected 1 to 63 letters, digits, '.', '_' and '-', a letter, digit "
                    "or '_' first"));
}

std::string UriOf(std::string_view cluster, IdentityKind kind, std::string_view name) {
  return absl::StrCat(
      kScheme, std::string(cluster), kDomain, "/", NameOf(kind), "/", std::string(name));
}

std::string TrainerName(std::string_view node, std::string_view job_uid) {
  return absl::StrCat(std::string(node), "/", std::string(job_uid));
}

std::string NodeOfTrainer(std::string_view trainer_name) {
  return std::string(trainer_name.substr(0, trainer_name.find('/')));
}

std::string CoordinatorUri(std::string_view cluster) {
  return absl::StrCat(kScheme, std::string(cluster), kDomain, "/coordinator");
}

std::string StoreUri(std::string_view cluster) {
  return absl::StrCat(kScheme, std::string(cluster), kDomain, "/store");
}

bool ParseUri(std::string_view cluster,
              std::string_view uri,
              IdentityKind* kind,
              std::string* name) {
  if (uri == StoreUri(cluster)) {
    *kind = IdentityKind::kStore;
    name->clear();
    return true;
  }
  for (const IdentityKind each :
       {IdentityKind::kNode, IdentityKind::kUser, IdentityKind::kTrainer}) {
    const std::string beginning = UriOf(cluster, each, "");
    if (uri.starts_with(beginning)) {
      *kind = each;
      *name = std::string(uri.substr(beginning.size()));
      return each == IdentityKind::kTrainer ? IsTrainerName(*name)
                                            : CheckIdentityName("name", *name).ok();
    }
  }
  return false;
}

absl::Status CheckMethod(const Identity& caller, std::string_view method) {
  const MethodRule* const rule = RuleOf(method);
  if (rule != nullptr && Allows(*rule, caller)) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat(VerbOf(method),
                   " needs ",
                   NeededFor(rule),
                   "; ",
                   caller.Text(),
                   " is ",
                   caller.kind == IdentityKind::kUser ? NameOf(caller.role) : "a ",
                   caller.kind == IdentityKind::kUser ? "" : NameOf(caller.kind)));
}

bool IsOpenMethod(std::string_view method) {
  return method == kEnrol || method == kHealthCheck;
}

bool IsChange(std::string_view method) {
  const MethodRule* const rule = RuleOf(method);
  return method == kEnrol || (rule != nullptr && rule->changes);
}

std::string VerbOf(std::string_view method) {
  constexpr std::string_view kPackage = "/ravel.v1.";
  std::string verb(method.substr(0, 128));
  if (verb.starts_with(kPackage)) {
    verb.erase(0, kPackage.size());
  }
  std::replace(verb.begin(), verb.end(), '/', '.');
  return verb;
}

absl::Status CheckNamespace(const Identity& caller, std::string_view namespace_name) {
  const std::string_view wanted = namespace_name.empty() ? "default" : namespace_name;
  if (static_cast<int>(caller.role) > kUser ||
      (caller.role == Role::kUser && caller.namespace_name == wanted)) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(caller.Text(),
                                                  " may change jobs of the namespace ",
                                                  caller.namespace_name,
                                                  " only, not of ",
                                                  std::string(wanted.substr(0, 63))));
}

}  // namespace ravel::coordinator
