#pragma once

// Durable records of access: who may speak to this coordinator, which tokens admit others, and
// who changed what. On disk: do not renumber.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ravel::coordinator {

// Stores and trainers have a certificate alone: no row is theirs.
enum class IdentityKind { kNode = 1, kUser = 2, kStore = 3, kTrainer = 4 };

// Each role may do what those before it may.
enum class Role { kNode = 0, kViewer = 1, kUser = 2, kOperator = 3, kAdmin = 4 };

struct IdentityRow {
  IdentityKind kind = IdentityKind::kUser;
  std::string name = {};
  Role role = Role::kViewer;
  std::string namespace_name = {};  // of a kUser role: where it may change jobs
  // Hex; begins the serial number of every certificate of this enrolment. A new enrolment ends the
  // certificates of the one before.
  std::string enrolment = {};
  int64_t created_ms = 0;
  int64_t revoked_ms = 0;  // 0: not
};

// An enrolment that was revoked, or replaced by a newer one of the same name, while certificates of
// it may still be in use.
struct EndedEnrolment {
  std::string enrolment = {};
  IdentityKind kind = IdentityKind::kNode;
  std::string name = {};
  int64_t ended_ms = 0;
};

struct TokenRow {
  std::string hash = {};  // SHA-256 of the secret, hex
  IdentityKind kind = IdentityKind::kNode;
  std::string name = {};  // of a user; of a node: "" lets it choose
  Role role = Role::kNode;
  std::string namespace_name = {};
  int64_t uses_left = 1;
  int64_t created_ms = 0;
  int64_t expires_ms = 0;
  std::string created_by = {};
};

// One call that changed something, or was not allowed.
struct AuditRow {
  int64_t seq = 0;  // given by the store
  int64_t time_ms = 0;
  std::string who = {};     // "user/alice", "node/n1", "anonymous"
  std::string peer = {};    // the address; empty where the transport does not tell it
  std::string verb = {};    // "Jobs.SubmitJob"
  std::string object = {};  // "default/my-job", "node/n1"
  std::string request_id = {};
  std::string result = {};  // "OK", "PERMISSION_DENIED", ...
  std::string message = {};
};

// One transaction.
struct AccessChange {
  std::vector<IdentityRow> identities = {};  // inserted or replaced, by kind and name
  std::vector<TokenRow> tokens = {};         // inserted or replaced, by hash
  std::vector<std::string> removed_tokens = {};
  std::vector<AuditRow> audit = {};
  std::vector<EndedEnrolment> ended = {};  // inserted or replaced, by enrolment
  int64_t forget_ended_before_ms = 0;      // older ones are removed
};

}  // namespace ravel::coordinator
