#pragma once

// Identities, tokens, certificates and the audit log of one coordinator: what the gate asks at each
// call, and what administrators change.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/clock.h"
#include "common/mutex.h"
#include "coordinator/access/audit_log.h"
#include "coordinator/access/authority_files.h"
#include "coordinator/access/identity.h"
#include "coordinator/access/store_tokens.h"
#include "coordinator/store/sqlite_access_store.h"

namespace ravel::coordinator {

// Lifetimes of certificates; owners renew them at two thirds.
struct CertificateTimes {
  int64_t node_ms = int64_t{24} * 3600 * 1000;
  int64_t user_ms = int64_t{90} * 24 * 3600 * 1000;
  int64_t trainer_ms() const { return node_ms / 4; }
};

// The caller of a change, for the audit log.
struct Asker {
  std::string who;
  std::string peer;
  std::string request_id = {};
};

struct TokenOrder {
  IdentityKind kind = IdentityKind::kNode;
  std::string name = {};  // of a user; of a node it may be empty
  Role role = Role::kNode;
  std::string namespace_name = {};
  int64_t uses = 1;
  int64_t ttl_ms = 3600'000;
  std::string secret = {};  // that was made elsewhere: of JoinToken; empty: a random one
};

// A certificate with what its owner needs beside it.
struct Enrolment {
  std::string certificate;
  std::string authority;
  std::string uri;
};

// The revocations that a store asks for at its own door. Immutable.
struct Trust {
  std::string version;                // hash of the rest
  std::vector<EndedEnrolment> ended;  // by enrolment
  std::string authority;              // PEM of those in force
  std::vector<std::string> job_keys;  // that verify tokens of jobs; 32 bytes each
};

// Thread-safe. Changes wait for the disk; Identify does not.
class AccessRegistry {
 public:
  static constexpr int64_t kMaxUses = 10'000;
  static constexpr int64_t kMaxTtlMs = int64_t{7} * 24 * 3600 * 1000;

  static absl::StatusOr<std::unique_ptr<AccessRegistry>> Open(const std::string& state_dir,
                                                              AuthorityFiles files,
                                                              const Clock* clock,
                                                              CertificateTimes times);

  // The owner of a certificate that TLS has verified. Unauthenticated: unknown, revoked, enrolled
  // anew since, or expired.
  absl::StatusOr<Identity> Identify(const CertificateFacts& certificate) const;

  // The token's text: it is kept as a hash only, and never told again.
  absl::StatusOr<std::string> MakeToken(const TokenOrder& order, const Asker& asker);
  // Spends one use of the token. A node's name that is taken is AlreadyExists until it is revoked;
  // a user who enrols again ends the older certificates of that name.
  absl::StatusOr<Enrolment> Enrol(const std::string& secret,
                                  const std::string& node_name,
                                  const std::string& request,
                                  const std::string& peer);
  absl::StatusOr<Enrolment> Renew(const Identity& caller,
                                  const std::string& request,
                                  const Asker& asker);
  // A certificate for a trainer of that job on the calling node, for a ravel-store (identity.h). It
  // is worth less than the node's own, so that the job need not be one that runs there.
  absl::StatusOr<Enrolment> CertifyTrainer(const Identity& caller,
                                           const std::string& job_uid,
                                           const std::string& request,
                                           const Asker& asker);
  // Ends an identity and the tokens that name it; `on_revoked` ends its calls.
  absl::Status Revoke(IdentityKind kind, const std::string& name, const Asker& asker);
  // For `init`: an identity without a token, on the coordinator's own host.
  absl::StatusOr<Enrolment> EnrolHere(const IdentityRow& identity, const std::string& request);

  std::vector<IdentityRow> Identities() const;
  // Made anew when it changes only, so it is cheap to ask for. Never null.
  std::shared_ptr<const Trust> trust() const;
  absl::StatusOr<std::vector<AuditRow>> Audit(int64_t after, int64_t limit);
  AuditLog& audit() { return *audit_; }
  const StoreTokens& store_tokens() const { return *store_tokens_; }
  AuthorityFiles files() const;
  // Reads STATE/tls again. True: it has another authority than before, which signs from now on.
  absl::StatusOr<bool> ReloadAuthority();
  // Before the server starts.
  void OnRevoked(std::function<void(const std::string& identity)> work) {
    on_revoked_ = std::move(work);
  }

 private:
  using Key = std::pair<IdentityKind, std::string>;

  AccessRegistry(AuthorityFiles files, const Clock* clock, CertificateTimes times)
      : cluster_(files.cluster), clock_(clock), times_(times), files_(std::move(files)) {}
  absl::StatusOr<Enrolment> Issue(const IdentityRow& identity, const std::string& request) const;
  absl::StatusOr<Enrolment> Issue(const std::string& uri,
                                  const std::string& enrolment,
                                  int64_t time_ms,
                                  const std::string& request) const;
  // The row of a caller whose certificate is of the enrolment in force.
  absl::StatusOr<IdentityRow> RowOf(const Identity& caller) const;
  // What the token admits, and the row of it after that.
  absl::StatusOr<IdentityRow> Admit(const TokenRow& token, const std::string& node_name) const;
  AuditRow Row(const Asker& asker, const std::string& verb, const std::string& object) const;
  // Also ends the enrolments that the change revokes or replaces.
  absl::Status Change(AccessChange change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(changing_);
  std::vector<EndedEnrolment> EndedBy(const AccessChange& change, int64_t now_ms) const;
  void RenewTrust() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string cluster_;
  const Clock* const clock_;
  const CertificateTimes times_;
  std::function<void(const std::string&)> on_revoked_;
  std::unique_ptr<SqliteAccessStore> store_;
  std::unique_ptr<AuditLog> audit_;
  std::unique_ptr<const StoreTokens> store_tokens_;
  Mutex changing_;  // one change at a time; held while the disk is waited for
  mutable Mutex mutex_;
  AuthorityFiles files_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, IdentityRow> identities_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, TokenRow> tokens_ ABSL_GUARDED_BY(mutex_);       // by hash
  std::map<std::string, EndedEnrolment> ended_ ABSL_GUARDED_BY(mutex_);  // by enrolment
  // Shared: answers are made of it while a change replaces it.
  std::shared_ptr<const Trust> trust_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
