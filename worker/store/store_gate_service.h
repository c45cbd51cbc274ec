#pragma once

// The identity of a store's caller: TLS on both sides with certificates of one cluster, or
// plaintext on loopback.

#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "common/status.h"
#include "worker/store/store_rules.h"
#include "worker/store/trust_book.h"

namespace ravel::store_server {

// Thread-safe.
class StoreGate {
 public:
  // Plaintext: every caller is anyone.
  StoreGate() = default;
  // From DIR/authority.pem, certificate.pem and key.pem, which are read again when they change.
  // `operators`: names of users who may change everything. Errors name the file.
  static absl::StatusOr<std::unique_ptr<StoreGate>> FromIdentity(
      const std::string& folder, std::vector<std::string> operators);

  std::shared_ptr<grpc::ServerCredentials> Credentials() const;
  // Before the server starts. The book outlives the server.
  void UseTrust(const TrustBook* trust) { trust_ = trust; }
  // Asked at every call: connections have no limit of age. Unauthenticated says why the connection
  // names nobody. Unavailable: its certificate has ended; PermissionDenied: it was revoked.
  absl::StatusOr<Caller> CallerOf(const grpc::ServerContextBase& context) const;
  // For each message of a stream. Unavailable when the caller's certificate has ended since,
  // PermissionDenied when it was revoked. Cheap.
  absl::Status CheckStill(const Caller& caller) const;

 private:
  void TakeToken(const grpc::ServerContextBase& context, Caller& caller) const;

  std::string folder_;   // empty: plaintext
  std::string cluster_;  // in the URIs of certificates
  std::vector<std::string> operators_;
  const TrustBook* trust_ = nullptr;  // null: nobody is ever revoked
};

}  // namespace ravel::store_server
