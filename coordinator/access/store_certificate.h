#pragma once

// Certificates that the authority makes for ravel-store, and for the coordinator towards it.

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "coordinator/access/authority_files.h"

namespace ravel::coordinator {

struct StoreCertificateOrder {
  std::string state_dir;
  std::vector<std::string> names;  // how clients call the store: host names, addresses
  std::string output;              // folder; what it holds is replaced
};

// Writes authority.pem, certificate.pem and key.pem (0600) for `ravel-store --identity`, good for a
// year, and for its calls of Access.GetTrust. The certificate is the old authority's while one is
// rotated: after `authority finish` it is to be made again. InvalidArgument names a name that is
// none; NotFound: the state has no authority.
absl::Status CertifyStore(const StoreCertificateOrder& order, int64_t now_ms);

// A client's certificate of the coordinator, with a fresh key.
struct StoreClientCertificate {
  std::string trusted;  // PEM of the authorities
  std::string certificate;
  std::string key;
  int64_t renew_ms = 0;  // wall time from which on another one is to be made
};
absl::StatusOr<StoreClientCertificate> MakeStoreClientCertificate(const AuthorityFiles& files,
                                                                  int64_t now_ms);

}  // namespace ravel::coordinator
