#pragma once

// Identities: names in certificates (SPIFFE), and the calls that each role may make. Pure.

#include <string>
#include <string_view>

#include "common/status.h"
#include "coordinator/store/access_record.h"

namespace ravel::coordinator {

// A caller whose certificate was accepted. Value semantics.
struct Identity {
  IdentityKind kind = IdentityKind::kUser;
  std::string name = {};  // empty for a store; of a trainer: TrainerName
  Role role = Role::kViewer;
  std::string namespace_name = {};  // of role kUser
  std::string serial = {};
  int64_t not_after_ms = 0;

  // "user/alice", "node/n1", "store", "trainer/n1/JOB_UID"
  std::string Text() const;
};

const char* NameOf(IdentityKind kind);  // "node", "user", "store", "trainer"
const char* NameOf(Role role);          // "viewer", "user", "operator", "admin"; "node"
// InvalidArgument names the roles of users.
absl::StatusOr<Role> ParseRole(std::string_view text);

// 1 to 63 letters, digits, '.', '_', '-', not '.' or '-' first: it becomes part of a URI and of
// file names.
absl::Status CheckIdentityName(std::string_view field, std::string_view name);

// spiffe://CLUSTER.ravel/node/NAME, spiffe://CLUSTER.ravel/user/NAME.
std::string UriOf(std::string_view cluster, IdentityKind kind, std::string_view name);
// The trainers of one job on one node: "NODE/JOB_UID", as the name in UriOf, too.
std::string TrainerName(std::string_view node, std::string_view job_uid);
std::string NodeOfTrainer(std::string_view trainer_name);
std::string CoordinatorUri(std::string_view cluster);
std::string StoreUri(std::string_view cluster);  // of every store
// False for a URI of another cluster or another form.
bool ParseUri(std::string_view cluster,
              std::string_view uri,
              IdentityKind* kind,
              std::string* name);

// PermissionDenied unless that role may call the method ("/ravel.v1.Jobs/GetJob"). A method that is
// not in the table is denied to all.
absl::Status CheckMethod(const Identity& caller, std::string_view method);
// The methods that need no identity: the one that gives one, and the look at the server's health,
// which tells nothing else.
bool IsOpenMethod(std::string_view method);
// Calls that change something: they are audited when they are allowed, too.
bool IsChange(std::string_view method);
// "/ravel.v1.Jobs/GetJob" -> "Jobs.GetJob"
std::string VerbOf(std::string_view method);

// PermissionDenied unless the caller may change jobs of that namespace.
absl::Status CheckNamespace(const Identity& caller, std::string_view namespace_name);

}  // namespace ravel::coordinator
