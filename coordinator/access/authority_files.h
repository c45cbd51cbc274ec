#pragma once

// The cluster's authority and the coordinator's own certificate, as files in STATE/tls: ca.pem,
// ca.key, server.pem (its certificate, then the authority's), server.key, cluster (the name in
// URIs). Folder 0700, files 0600. Thread-compatible.

#include <cstdint>
#include <string>
#include <vector>

#include "common/certificate.h"
#include "common/status.h"

namespace ravel::coordinator {

struct AuthorityFiles {
  std::string folder;   // STATE/tls
  std::string cluster;  // in every URI
  Authority authority;
  std::string fingerprint;  // of the authority's certificate

  std::string CaPath() const { return folder + "/ca.pem"; }
  std::string ServerPath() const { return folder + "/server.pem"; }
  std::string ServerKeyPath() const { return folder + "/server.key"; }
};

// Makes all of it. AlreadyExists when there is an authority: making another would lock every node
// out. `names`: how clients may call the coordinator, host names and addresses.
absl::StatusOr<AuthorityFiles> MakeAuthorityFiles(const std::string& state_dir,
                                                  const std::vector<std::string>& names,
                                                  int64_t now_ms);
// NotFound: there is no authority in that state.
absl::StatusOr<AuthorityFiles> LoadAuthorityFiles(const std::string& state_dir);
// Writes a new certificate of the same key and names when two thirds of the old one's time have
// passed; gRPC reads the file again by itself. False: it was not due.
absl::StatusOr<bool> RenewServerCertificate(const AuthorityFiles& files, int64_t now_ms);

// A name of a server: letters, digits, '-' and '.', or an address of IPv4 or IPv6.
absl::Status CheckServerName(const std::string& name);

}  // namespace ravel::coordinator
