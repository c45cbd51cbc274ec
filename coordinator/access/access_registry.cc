// Every change is written before it holds: the row and its audit row in one transaction, then the
// maps. `changing_` orders changes and is held across the write; `mutex_` guards the maps and is
// never held across anything that waits, so a call is judged at once.

#include "coordinator/access/access_registry.h"

#include <algorithm>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "common/crypto.h"
#include "common/join_token.h"

namespace ravel::coordinator {
namespace {

constexpr size_t kEnrolmentBytes = 8;
constexpr size_t kSecretBytes = 20;
constexpr size_t kMaxRequestBytes = 8 << 10;
constexpr size_t kMaxTokens = 10'000;
// Clocks of hosts differ: a certificate is good a little before it was made.
constexpr int64_t kBackdateMs = 300'000;

// Longer than any certificate that is out: afterwards an enrolment need not be remembered.
int64_t LongestMs(const CertificateTimes& times) {
  return std::max({times.node_ms, times.user_ms, CertificateTimes().user_ms}) + kBackdateMs;
}

// One answer for every token that does not admit: who guesses learns nothing.
absl::Status NoToken() {
  return absl::UnauthenticatedError("the token is unknown, expired or used up");
}

// Bytes of an enrolment's id; the first is below 0x80, so that serial numbers keep their length.
std::string NewEnrolment() {
  std::string bytes = RandomBytes(kEnrolmentBytes);
  bytes[0] = static_cast<char>((static_cast<uint8_t>(bytes[0]) & 0x3f) | 0x40);
  return Hex(bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<AccessRegistry>> AccessRegistry::Open(const std::string& state_dir,
                                                                     AuthorityFiles files,
                                                                     const Clock* clock,
                                                                     CertificateTimes times) {
  std::unique_ptr<AccessRegistry> registry(new AccessRegistry(std::move(files), clock, times));
  ASSIGN_OR_RETURN(registry->store_, SqliteAccessStore::Open(state_dir));
  ASSIGN_OR_RETURN(StoreTokens tokens_of_stores, StoreTokens::Open(state_dir));
  registry->store_tokens_ = std::make_unique<StoreTokens>(std::move(tokens_of_stores));
  ASSIGN_OR_RETURN(std::vector<IdentityRow> identities, registry->store_->Identities());
  ASSIGN_OR_RETURN(std::vector<TokenRow> tokens, registry->store_->Tokens());
  ASSIGN_OR_RETURN(std::vector<EndedEnrolment> ended, registry->store_->EndedEnrolments());
  registry->audit_ = std::make_unique<AuditLog>(registry->store_.get(), clock);
  MutexLock lock(registry->mutex_);
  for (IdentityRow& identity : identities) {
    const Key key{identity.kind, identity.name};
    registry->identities_[key] = std::move(identity);
  }
  for (TokenRow& token : tokens) {
    const std::string hash = token.hash;
    registry->tokens_[hash] = std::move(token);
  }
  for (EndedEnrolment& enrolment : ended) {
    const std::string id = enrolment.enrolment;
    registry->ended_[id] = std::move(enrolment);
  }
  registry->RenewTrust();
  return registry;
}

AuthorityFiles AccessRegistry::files() const {
  MutexLock lock(mutex_);
  return files_;
}

absl::StatusOr<bool> AccessRegistry::ReloadAuthority() {
  const std::string folder = files().folder;
  ASSIGN_OR_RETURN(AuthorityFiles read, LoadAuthorityFiles(folder.substr(0, folder.rfind("/tls"))));
  MutexLock lock(mutex_);
  const bool other = read.trusted != files_.trusted || read.rotating != files_.rotating;
  files_ = std::move(read);
  if (other) {
    RenewTrust();
  }
  return other;
}

void AccessRegistry::RenewTrust() {
  auto trust = std::make_shared<Trust>();
  trust->authority = files_.trusted;
  trust->job_keys = {store_tokens_->public_key()};
  std::string all = absl::StrCat(trust->authority, "\n", Hex(trust->job_keys[0]));
  for (const auto& [id, ended] : ended_) {
    trust->ended.push_back(ended);
    absl::StrAppend(&all, "\n", id);
  }
  trust->version = Hex(Sha256(all));
  trust_ = std::move(trust);
}

std::shared_ptr<const Trust> AccessRegistry::trust() const {
  MutexLock lock(mutex_);
  return trust_;
}

absl::StatusOr<Identity> AccessRegistry::Identify(const CertificateFacts& certificate) const {
  Identity caller;
  if (!ParseUri(cluster_, certificate.uri, &caller.kind, &caller.name)) {
    return absl::UnauthenticatedError(
        "the certificate names no user, node, trainer or store of this cluster");
  }
  caller.serial = certificate.serial;
  caller.not_after_ms = certificate.not_after_ms;
  if (certificate.not_after_ms < clock_->WallMs()) {  // the connection is older than that
    return absl::UnauthenticatedError(
        absl::StrCat("the certificate of ", caller.Text(), " has expired"));
  }
  if (caller.kind == IdentityKind::kStore) {  // `certify-store` keeps no row of it
    return caller;
  }
  const bool trainer = caller.kind == IdentityKind::kTrainer;  // it stands and falls with its node
  const Key owner = trainer ? Key{IdentityKind::kNode, NodeOfTrainer(caller.name)}
                            : Key{caller.kind, caller.name};
  MutexLock lock(mutex_);
  const auto found = identities_.find(owner);
  if (found == identities_.end()) {
    return absl::UnauthenticatedError(
        absl::StrCat(caller.Text(), " is not known to this coordinator"));
  }
  const IdentityRow& row = found->second;
  if (row.revoked_ms != 0) {
    return absl::UnauthenticatedError(absl::StrCat(caller.Text(), " was revoked"));
  }
  if (!absl::StartsWith(certificate.serial, row.enrolment)) {
    return absl::UnauthenticatedError(absl::StrCat(
        "the certificate of ", caller.Text(), " is of an enrolment that was replaced"));
  }
  caller.role = row.role;
  caller.namespace_name = row.namespace_name;
  return caller;
}

AuditRow AccessRegistry::Row(const Asker& asker,
                             const std::string& verb,
                             const std::string& object) const {
  AuditRow row;
  row.time_ms = clock_->WallMs();
  row.who = asker.who;
  row.peer = asker.peer;
  row.verb = verb;
  row.object = object;
  row.request_id = asker.request_id;
  row.result = "OK";
  return row;
}

std::vector<EndedEnrolment> AccessRegistry::EndedBy(const AccessChange& change,
                                                    int64_t now_ms) const {
  std::vector<EndedEnrolment> ended;
  MutexLock lock(mutex_);
  for (const IdentityRow& identity : change.identities) {
    const auto before = identities_.find({identity.kind, identity.name});
    if (before != identities_.end() && before->second.revoked_ms == 0 &&
        (identity.revoked_ms != 0 || identity.enrolment != before->second.enrolment)) {
      ended.push_back({.enrolment = before->second.enrolment,
                       .kind = identity.kind,
                       .name = identity.name,
                       .ended_ms = now_ms});
    }
  }
  return ended;
}

absl::Status AccessRegistry::Change(AccessChange change) {
  const int64_t now_ms = clock_->WallMs();
  change.ended = EndedBy(change, now_ms);
  if (!change.ended.empty()) {
    change.forget_ended_before_ms = now_ms - LongestMs(times_);
  }
  RETURN_IF_ERROR(store_->Apply(change));
  MutexLock lock(mutex_);
  if (!change.ended.empty()) {
    std::erase_if(ended_, [&change](const auto& known) {
      return known.second.ended_ms < change.forget_ended_before_ms;
    });
    for (const EndedEnrolment& ended : change.ended) {
      ended_[ended.enrolment] = ended;
    }
    RenewTrust();
  }
  for (const IdentityRow& identity : change.identities) {
    identities_[{identity.kind, identity.name}] = identity;
  }
  for (const TokenRow& token : change.tokens) {
    tokens_[token.hash] = token;
  }
  for (const std::string& hash : change.removed_tokens) {
    tokens_.erase(hash);
  }
  return absl::OkStatus();
}

absl::StatusOr<Enrolment> AccessRegistry::Issue(const IdentityRow& identity,
                                                const std::string& request) const {
  return Issue(UriOf(cluster_, identity.kind, identity.name),
               identity.enrolment,
               identity.kind == IdentityKind::kNode ? times_.node_ms : times_.user_ms,
               request);
}

absl::StatusOr<Enrolment> AccessRegistry::Issue(const std::string& uri,
                                                const std::string& enrolment,
                                                int64_t time_ms,
                                                const std::string& request) const {
  if (request.size() > kMaxRequestBytes) {
    return absl::InvalidArgumentError("the certificate request: expected at most 8 KiB");
  }
  const int64_t now_ms = clock_->WallMs();
  const AuthorityFiles files = this->files();
  Enrolment issued{.certificate = {}, .authority = files.trusted, .uri = uri};
  ASSIGN_OR_RETURN(issued.certificate,
                   IssueCertificate(files.authority,
                                    request,
                                    {.uri = uri,
                                     .serial = Unhex(enrolment) + RandomBytes(kEnrolmentBytes),
                                     .use = CertificateUse::kClient,
                                     // Owners renew at two thirds of the time between the two.
                                     .not_before_ms = now_ms - std::min(kBackdateMs, time_ms / 10),
                                     .not_after_ms = now_ms + time_ms}));
  return issued;
}

absl::StatusOr<std::string> AccessRegistry::MakeToken(const TokenOrder& order, const Asker& asker) {
  const bool node = order.kind == IdentityKind::kNode;
  if (!node || !order.name.empty()) {
    RETURN_IF_ERROR(CheckIdentityName("name", order.name));
  }
  if (order.role == Role::kUser) {
    RETURN_IF_ERROR(CheckIdentityName("namespace", order.namespace_name));
  } else if (!order.namespace_name.empty()) {
    return absl::InvalidArgumentError("namespace: only the role user has one");
  }
  const int64_t most = order.name.empty() ? kMaxUses : 1;
  if (order.uses < 1 || order.uses > most) {
    return absl::InvalidArgumentError(absl::StrCat(
        "uses: expected 1 to ", most, order.name.empty() ? "" : " for a token of one name"));
  }
  if (order.ttl_ms < 1000 || order.ttl_ms > kMaxTtlMs) {
    return absl::InvalidArgumentError("ttl: expected 1s to 7d");
  }
  MutexLock changing(changing_);
  const int64_t now_ms = clock_->WallMs();
  AccessChange change;
  {
    MutexLock lock(mutex_);
    for (const auto& [hash, token] : tokens_) {
      if (token.expires_ms < now_ms) {
        change.removed_tokens.push_back(hash);
      }
    }
    if (tokens_.size() - change.removed_tokens.size() >= kMaxTokens) {
      return absl::ResourceExhaustedError("10000 tokens are waiting to be used");
    }
  }
  const std::string secret = order.secret.empty() ? RandomHex(kSecretBytes) : order.secret;
  change.tokens.push_back({.hash = Hex(Sha256(secret)),
                           .kind = order.kind,
                           .name = order.name,
                           .role = node ? Role::kNode : order.role,
                           .namespace_name = order.namespace_name,
                           .uses_left = order.uses,
                           .created_ms = now_ms,
                           .expires_ms = now_ms + order.ttl_ms,
                           .created_by = asker.who});
  AuditRow row = Row(asker,
                     "Access.CreateToken",
                     absl::StrCat(NameOf(order.kind), "/", order.name.empty() ? "*" : order.name));
  row.message = absl::StrCat("role ",
                             NameOf(change.tokens[0].role),
                             ", ",
                             order.uses,
                             " uses, ",
                             order.ttl_ms / 1000,
                             " s");
  change.audit.push_back(std::move(row));
  RETURN_IF_ERROR(Change(std::move(change)));
  return FormatJoinToken({.fingerprint = files().fingerprint, .secret = secret});
}

absl::StatusOr<IdentityRow> AccessRegistry::Admit(const TokenRow& token,
                                                  const std::string& node_name) const {
  const bool node = token.kind == IdentityKind::kNode;
  const std::string& name = token.name.empty() ? node_name : token.name;
  RETURN_IF_ERROR(CheckIdentityName("node", name));
  if (node && name != node_name) {
    return absl::PermissionDeniedError(
        absl::StrCat("the token is for the node ", name, ", not for this one"));
  }
  IdentityRow identity{.kind = token.kind,
                       .name = name,
                       .role = token.role,
                       .namespace_name = token.namespace_name,
                       .enrolment = NewEnrolment(),
                       .created_ms = clock_->WallMs()};
  MutexLock lock(mutex_);
  const auto known = identities_.find({identity.kind, name});
  if (node && known != identities_.end() && known->second.revoked_ms == 0) {
    return absl::AlreadyExistsError(absl::StrCat("a node of the name ",
                                                 name,
                                                 " is enrolled already; choose another --node-id, "
                                                 "or `ravelctl revoke node ",
                                                 name,
                                                 "` first"));
  }
  return identity;
}

absl::StatusOr<Enrolment> AccessRegistry::Enrol(const std::string& secret,
                                                const std::string& node_name,
                                                const std::string& request,
                                                const std::string& peer) {
  MutexLock changing(changing_);
  TokenRow token;
  {
    MutexLock lock(mutex_);
    const auto found = tokens_.find(Hex(Sha256(secret)));
    if (found == tokens_.end() || found->second.uses_left < 1 ||
        found->second.expires_ms < clock_->WallMs()) {
      return NoToken();
    }
    token = found->second;
  }
  ASSIGN_OR_RETURN(const IdentityRow identity, Admit(token, node_name));
  ASSIGN_OR_RETURN(Enrolment enrolment, Issue(identity, request));
  AccessChange change{.identities = {identity}};
  if (--token.uses_left > 0) {
    change.tokens.push_back(token);
  } else {
    change.removed_tokens.push_back(token.hash);
  }
  const std::string name = absl::StrCat(NameOf(identity.kind), "/", identity.name);
  AuditRow row = Row({.who = name, .peer = peer}, "Access.Enrol", name);
  row.message = absl::StrCat("role ", NameOf(identity.role), ", by a token of ", token.created_by);
  change.audit.push_back(std::move(row));
  RETURN_IF_ERROR(Change(std::move(change)));
  if (on_revoked_ != nullptr) {  // certificates of an older enrolment are no good any more
    on_revoked_(name);
  }
  return enrolment;
}

absl::StatusOr<Enrolment> AccessRegistry::EnrolHere(const IdentityRow& identity,
                                                    const std::string& request) {
  MutexLock changing(changing_);
  IdentityRow row = identity;
  row.enrolment = NewEnrolment();
  row.created_ms = clock_->WallMs();
  ASSIGN_OR_RETURN(Enrolment enrolment, Issue(row, request));
  const std::string name = absl::StrCat(NameOf(row.kind), "/", row.name);
  AccessChange change{.identities = {row}};
  change.audit.push_back(Row({.who = "init", .peer = "local"}, "Access.Enrol", name));
  RETURN_IF_ERROR(Change(std::move(change)));
  return enrolment;
}

absl::StatusOr<IdentityRow> AccessRegistry::RowOf(const Identity& caller) const {
  MutexLock lock(mutex_);
  const auto found = identities_.find({caller.kind, caller.name});
  if (found == identities_.end() || found->second.revoked_ms != 0 ||
      !absl::StartsWith(caller.serial, found->second.enrolment)) {
    return absl::UnauthenticatedError(absl::StrCat(caller.Text(), " was revoked"));
  }
  return found->second;
}

absl::StatusOr<Enrolment> AccessRegistry::Renew(const Identity& caller,
                                                const std::string& request,
                                                const Asker& asker) {
  MutexLock changing(changing_);
  ASSIGN_OR_RETURN(const IdentityRow identity, RowOf(caller));
  ASSIGN_OR_RETURN(Enrolment enrolment, Issue(identity, request));
  AccessChange change;
  change.audit.push_back(Row(asker, "Access.Renew", caller.Text()));
  RETURN_IF_ERROR(Change(std::move(change)));
  return enrolment;
}

absl::StatusOr<Enrolment> AccessRegistry::CertifyTrainer(const Identity& caller,
                                                         const std::string& job_uid,
                                                         const std::string& request,
                                                         const Asker& asker) {
  if (caller.kind != IdentityKind::kNode) {
    return absl::PermissionDeniedError("only a node has trainers");
  }
  RETURN_IF_ERROR(CheckIdentityName("job_uid", job_uid));
  ASSIGN_OR_RETURN(const IdentityRow node, RowOf(caller));
  const std::string name = TrainerName(node.name, job_uid);
  ASSIGN_OR_RETURN(Enrolment issued,
                   Issue(UriOf(cluster_, IdentityKind::kTrainer, name),
                         node.enrolment,
                         times_.trainer_ms(),
                         request));
  // Nothing of it is kept, so its row waits for no disk.
  audit_->Record(
      Row(asker, "Access.CertifyTrainer", absl::StrCat(NameOf(IdentityKind::kTrainer), "/", name)));
  return issued;
}

absl::Status AccessRegistry::Revoke(IdentityKind kind,
                                    const std::string& name,
                                    const Asker& asker) {
  RETURN_IF_ERROR(CheckIdentityName("name", name));
  const std::string text = absl::StrCat(NameOf(kind), "/", name);
  if (text == asker.who) {
    return absl::FailedPreconditionError(
        "an administrator cannot revoke itself: nobody might be left; another one can");
  }
  {
    MutexLock changing(changing_);
    AccessChange change;
    {
      MutexLock lock(mutex_);
      const auto found = identities_.find({kind, name});
      const bool known = found != identities_.end() && found->second.revoked_ms == 0;
      if (known) {
        change.identities.push_back(found->second);
        change.identities[0].revoked_ms = clock_->WallMs();
      }
      for (const auto& [hash, token] : tokens_) {
        if (token.kind == kind && token.name == name) {
          change.removed_tokens.push_back(hash);
        }
      }
      if (!known && change.removed_tokens.empty()) {
        return absl::NotFoundError(absl::StrCat(text, " is not enrolled, or was revoked before"));
      }
    }
    change.audit.push_back(Row(asker, "Access.Revoke", text));
    RETURN_IF_ERROR(Change(std::move(change)));
  }
  if (on_revoked_ != nullptr) {
    on_revoked_(text);
  }
  return absl::OkStatus();
}

std::vector<IdentityRow> AccessRegistry::Identities() const {
  MutexLock lock(mutex_);
  std::vector<IdentityRow> identities;
  for (const auto& [key, identity] : identities_) {
    identities.push_back(identity);
  }
  return identities;
}

absl::StatusOr<std::vector<AuditRow>> AccessRegistry::Audit(int64_t after, int64_t limit) {
  audit_->Flush();
  return store_->Audit(after, limit);
}

}  // namespace ravel::coordinator
