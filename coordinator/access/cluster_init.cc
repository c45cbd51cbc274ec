#include "coordinator/access/cluster_init.h"

#include <optional>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "common/file_writer.h"
#include "common/join_token.h"
#include "common/time_text.h"
#include "coordinator/access/access_registry.h"
#include "coordinator/access/context_file.h"

namespace ravel::coordinator {

namespace {

constexpr int64_t kMaxTokenBytes = 256;
constexpr int64_t kMaxCertificateBytes = 64 << 10;

// The token in a file. It has the fingerprint of the authority that the cluster will have, else
// nobody could join by it.
absl::StatusOr<JoinToken> ReadToken(const InitOrder& order) {
  absl::StatusOr<std::string> text = ReadWholeFile(order.node_token.path, kMaxTokenBytes);
  RETURN_IF_ERROR(Annotate(text.status(), "--node-token"));
  absl::StatusOr<JoinToken> token = ParseJoinToken(std::string(absl::StripAsciiWhitespace(*text)));
  RETURN_IF_ERROR(Annotate(token.status(), "--node-token"));
  const absl::StatusOr<std::string> authority =
      ReadWholeFile(order.authority.folder + "/tls.crt", kMaxCertificateBytes);
  RETURN_IF_ERROR(Annotate(authority.status(), "--authority"));
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(*authority);
  RETURN_IF_ERROR(Annotate(facts.status(), "--authority"));
  if (facts->fingerprint != token->fingerprint) {
    return absl::InvalidArgumentError(absl::StrCat("--node-token: has the fingerprint ",
                                                   token->fingerprint,
                                                   ", that of --authority is ",
                                                   facts->fingerprint));
  }
  return token;
}

absl::StatusOr<TokenOrder> ReadNodeToken(const InitOrder& order) {
  if (order.authority.folder.empty()) {
    return absl::InvalidArgumentError(
        "--node-token: needs --authority, whose fingerprint the token has");
  }
  const absl::StatusOr<int64_t> ttl_ms = ParseDurationMs(order.node_token.ttl);
  RETURN_IF_ERROR(Annotate(ttl_ms.status(), "--node-token-ttl"));
  if (*ttl_ms < 1000 || *ttl_ms > AccessRegistry::kMaxTtlMs) {
    return absl::InvalidArgumentError("--node-token-ttl: expected 1s to 7d");
  }
  if (order.node_token.uses < 1 || order.node_token.uses > AccessRegistry::kMaxUses) {
    return absl::InvalidArgumentError(
        absl::StrCat("--node-token-uses: expected 1 to ", AccessRegistry::kMaxUses));
  }
  ASSIGN_OR_RETURN(const JoinToken token, ReadToken(order));
  return TokenOrder{.uses = order.node_token.uses, .ttl_ms = *ttl_ms, .secret = token.secret};
}

}  // namespace

absl::StatusOr<InitResult> InitCluster(const InitOrder& order, const Clock& clock) {
  RETURN_IF_ERROR(CheckIdentityName("--admin", order.admin));
  std::optional<TokenOrder> node_token;
  if (!order.node_token.path.empty()) {
    ASSIGN_OR_RETURN(node_token, ReadNodeToken(order));
  }
  ASSIGN_OR_RETURN(
      const AuthorityFiles files,
      MakeAuthorityFiles(order.state_dir, order.names, order.authority, clock.WallMs()));
  InitResult result{
      .context_path = absl::StrCat(order.state_dir, "/", order.admin, ".context.json"),
      .coordinator = {},
      .fingerprint = files.fingerprint};
  const std::string& host = order.names.front();
  const bool six = host.find(':') != std::string::npos;
  result.coordinator = absl::StrCat(six ? "[" : "", host, six ? "]:" : ":", order.port);
  ASSIGN_OR_RETURN(const std::unique_ptr<AccessRegistry> registry,
                   AccessRegistry::Open(order.state_dir, files, &clock, {}));
  if (node_token.has_value()) {
    RETURN_IF_ERROR(registry->MakeToken(*node_token, {.who = "init", .peer = "local"}).status());
  }
  ContextFile context{.coordinator = result.coordinator,
                      .authority = registry->files().trusted,
                      .certificate = {},
                      .key = MakePrivateKey()};
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(context.key));
  ASSIGN_OR_RETURN(
      const Enrolment enrolment,
      registry->EnrolHere({.kind = IdentityKind::kUser, .name = order.admin, .role = Role::kAdmin},
                          request));
  context.certificate = enrolment.certificate;
  RETURN_IF_ERROR(WriteContext(result.context_path, context));
  RETURN_IF_ERROR(PublishAuthorityFiles(files, order.state_dir));
  return result;
}

}  // namespace ravel::coordinator
