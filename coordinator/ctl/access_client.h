#pragma once

// The coordinator's Access service as plain values. Thread-safe.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/json.h"
#include "common/status.h"
#include "coordinator/access/context_file.h"
#include "coordinator/ctl/endpoint.h"

namespace ravel::ctl {

struct IdentityName {
  bool node = false;  // false: a user
  std::string name;
};

struct TokenRequest {
  IdentityName identity;
  std::string role = {};            // of a user
  std::string namespace_name = {};  // of the role user
  int64_t uses = 1;
  int64_t ttl_ms = 3600'000;
};

struct TokenAnswer {
  std::string token;
  int64_t expires_ms = 0;
};

struct IdentityEntry {
  std::string kind;
  std::string name;
  std::string role;
  std::string namespace_name;
  int64_t created_ms = 0;
  int64_t revoked_ms = 0;
  json::Value document;
};

struct AuditEntry {
  int64_t seq = 0;
  int64_t time_ms = 0;
  std::string who;
  std::string verb;
  std::string object;
  std::string result;
  std::string message;
  json::Value document;
};

struct Caller {
  IdentityEntry identity;
  int64_t expires_ms = 0;
};

class AccessClient {
 public:
  static absl::StatusOr<std::unique_ptr<AccessClient>> Connect(const Endpoint& endpoint);
  virtual ~AccessClient() = default;

  virtual absl::StatusOr<TokenAnswer> CreateToken(const TokenRequest& request) = 0;
  virtual absl::Status Revoke(const IdentityName& identity) = 0;
  virtual absl::StatusOr<std::vector<IdentityEntry>> Identities() = 0;
  // All records, page by page.
  virtual absl::StatusOr<std::vector<AuditEntry>> Audit(int64_t after_seq) = 0;
  virtual absl::StatusOr<Caller> WhoAmI() = 0;
  // A new certificate of the same key.
  // The context's certificate and whom it trusts, renewed; its key and coordinator stay.
  virtual absl::Status Renew(const std::string& certificate_request,
                             coordinator::ContextFile& context) = 0;
};

// Makes a key, and a certificate for it by a one-time token. Neither the token's secret nor the key
// is sent before the coordinator has shown the authority whose fingerprint is in the token.
absl::StatusOr<coordinator::ContextFile> Login(const std::string& address,
                                               const std::string& token);

}  // namespace ravel::ctl
