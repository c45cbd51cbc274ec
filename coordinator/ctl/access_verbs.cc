#include "coordinator/ctl/access_verbs.h"

#include <iostream>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/join_token.h"
#include "common/net_address.h"
#include "common/time_text.h"
#include "coordinator/ctl/access_client.h"
#include "coordinator/ctl/contexts.h"
#include "coordinator/ctl/exit_code.h"

namespace ravel::ctl {
namespace {

// One client, one call, what it answers printed by `print`.
template <typename Ask, typename PrintAnswer>
int Asked(const CommonOptions& common, const Ask& ask, const PrintAnswer& print) {
  const absl::StatusOr<std::unique_ptr<AccessClient>> client =
      AccessClient::Connect(common.coordinator);
  if (!client.ok()) {
    return Report(client.status());
  }
  const auto answer = ask(**client);
  if (!answer.ok()) {
    return Report(answer.status());
  }
  print(*answer);
  return kExitOk;
}

template <typename Entry>
void PrintEntries(const CommonOptions& common, const Table& table, const std::vector<Entry>& all) {
  if (common.format == Format::kTable || common.format == Format::kName) {
    Print(table.Text(!common.no_headers));
    return;
  }
  json::Array items;
  for (const Entry& entry : all) {
    items.push_back(entry.document);
  }
  Print(FormatDocument(ListDocument(std::move(items)), common.format));
}

}  // namespace

int RunLogin(const LoginOptions& options) {
  const absl::StatusOr<HostPort> address = ParseHostPort(options.coordinator);
  if (!address.ok()) {
    return Report(Annotate(address.status(), "--coordinator"));
  }
  std::string name = options.context;
  if (name.empty()) {
    name = ContextNameOf(*address, options.coordinator);
  }
  // Before the token is spent.
  const absl::StatusOr<std::string> path = ContextPath(name);
  if (!path.ok()) {
    return Report(path.status());
  }
  const absl::StatusOr<coordinator::ContextFile> context =
      Login(options.coordinator, TokenOf(options.token, std::cin));
  absl::Status status = context.status();
  if (status.ok()) {
    status = SaveContext(name, *context);
  }
  const bool named = name.find('/') == std::string::npos;
  if (status.ok() && named) {
    status = UseContext(name);
  }
  if (status.ok()) {
    Say(absl::StrCat(
        "logged in to ", options.coordinator, "; context ", name, named ? " is in use" : ""));
  }
  return Report(status);
}

int RunContextList(const CommonOptions& common) {
  const std::string current = CurrentContext();
  Table table({"NAME", "COORDINATOR", "IN USE"});
  json::Array items;
  for (const std::string& name : ContextNames()) {
    const absl::StatusOr<std::string> path = ContextPath(name);
    const absl::StatusOr<coordinator::ContextFile> context =
        path.ok() ? coordinator::ReadContext(*path) : path.status();
    const std::string address =
        context.ok() ? context->coordinator : std::string(context.status().message());
    table.AddRow({name, address, name == current ? "yes" : ""});
    json::Value item;
    item.Set("name", name);
    item.Set("coordinator", address);
    item.Set("inUse", name == current);
    items.push_back(std::move(item));
  }
  if (common.format == Format::kTable || common.format == Format::kName) {
    Print(table.Text(!common.no_headers));
  } else {
    Print(FormatDocument(ListDocument(std::move(items)), common.format));
  }
  return kExitOk;
}

int RunContextUse(const std::string& name) {
  return Report(UseContext(name));
}

int RunEnrol(const CommonOptions& common, const EnrolOptions& options) {
  const absl::StatusOr<int64_t> ttl_ms = ParseDurationMs(options.ttl);
  if (!ttl_ms.ok()) {
    return Report(Annotate(ttl_ms.status(), "--ttl"));
  }
  TokenRequest request{.identity = {.node = options.node, .name = options.name},
                       .role = options.role,
                       .uses = options.uses,
                       .ttl_ms = *ttl_ms};
  if (options.role == "user") {
    request.namespace_name = common.namespace_name;
  }
  return Asked(
      common,
      [&](AccessClient& client) { return client.CreateToken(request); },
      [&](const TokenAnswer& answer) {
        if (common.format == Format::kTable || common.format == Format::kName) {
          Print(answer.token + "\n");
          Say(absl::StrCat("good for ",
                           options.ttl,
                           " and ",
                           options.uses,
                           options.uses == 1 ? " use" : " uses",
                           "; not shown again"));
        } else {
          json::Value document;
          document.Set("token", answer.token);
          document.Set("expiresMs", answer.expires_ms);
          Print(FormatDocument(WithSchemaVersion(document), common.format));
        }
      });
}

int RunRevoke(const CommonOptions& common, bool node, const std::string& name) {
  const absl::StatusOr<std::unique_ptr<AccessClient>> client =
      AccessClient::Connect(common.coordinator);
  return Report(client.ok() ? (*client)->Revoke({.node = node, .name = name}) : client.status());
}

int RunIdentities(const CommonOptions& common) {
  return Asked(
      common,
      [](AccessClient& client) { return client.Identities(); },
      [&](const std::vector<IdentityEntry>& entries) {
        Table table({"KIND", "NAME", "ROLE", "NAMESPACE", "REVOKED"});
        for (const IdentityEntry& entry : entries) {
          table.AddRow({entry.kind,
                        entry.name,
                        entry.role,
                        entry.namespace_name,
                        entry.revoked_ms == 0 ? "" : FormatTime(entry.revoked_ms)});
        }
        PrintEntries(common, table, entries);
      });
}

int RunWhoAmI(const CommonOptions& common) {
  return Asked(
      common,
      [](AccessClient& client) { return client.WhoAmI(); },
      [&](const Caller& caller) {
        if (common.format != Format::kTable && common.format != Format::kName) {
          json::Value document = caller.identity.document;
          document.Set("certificateExpiresMs", caller.expires_ms);
          Print(FormatDocument(WithSchemaVersion(document), common.format));
          return;
        }
        Print(absl::StrCat(caller.identity.kind,
                           "/",
                           caller.identity.name,
                           ", role ",
                           caller.identity.role,
                           caller.identity.namespace_name.empty() ? "" : ", namespace ",
                           caller.identity.namespace_name,
                           "\n"));
      });
}

int RunAudit(const CommonOptions& common, int64_t after_seq) {
  return Asked(
      common,
      [&](AccessClient& client) { return client.Audit(after_seq); },
      [&](const std::vector<AuditEntry>& entries) {
        Table table({"TIME", "WHO", "VERB", "OBJECT", "RESULT", "MESSAGE"});
        for (const AuditEntry& entry : entries) {
          table.AddRow({FormatTime(entry.time_ms),
                        entry.who,
                        entry.verb,
                        entry.object,
                        entry.result,
                        entry.message});
        }
        PrintEntries(common, table, entries);
      });
}

absl::Status RenewNow(const std::string& context_path, Endpoint& endpoint) {
  ASSIGN_OR_RETURN(const std::unique_ptr<AccessClient> client, AccessClient::Connect(endpoint));
  ASSIGN_OR_RETURN(const std::string request, MakeCertificateRequest(endpoint.context->key));
  coordinator::ContextFile renewed = *endpoint.context;
  RETURN_IF_ERROR(client->Renew(request, renewed));
  RETURN_IF_ERROR(coordinator::WriteContext(context_path, renewed));
  endpoint.context = std::make_shared<const coordinator::ContextFile>(std::move(renewed));
  return absl::OkStatus();
}

void RenewWhenDue(const std::string& context_path, Endpoint& endpoint) {
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(endpoint.context->certificate);
  const int64_t now_ms = SystemClock::Get().WallMs();
  if (!facts.ok() ||
      now_ms < facts->not_before_ms + (facts->not_after_ms - facts->not_before_ms) / 3 * 2) {
    return;
  }
  const absl::Status status = RenewNow(context_path, endpoint);
  if (!status.ok()) {
    Say(absl::StrCat("ravelctl: the certificate of ",
                     context_path,
                     " could not be renewed: ",
                     std::string(status.message())));
  }
}

}  // namespace ravel::ctl
