#pragma once

// The cluster's authority and the coordinator's own certificate, as files in STATE/tls: ca.pem
// (what is trusted, first what signs), ca.key, server.pem (its certificate, then its authority's),
// server.key, cluster (the name in URIs). Folder 0700, files 0600. Thread-compatible.
//
// An authority is rotated in two steps, each one exchange of the folder. Between them old.pem and
// old.key are there: both authorities are trusted, the new one signs users and nodes, who learn to
// trust it with each certificate that they get, and the old one still signs the coordinator's own
// certificate, so that whoever has not heard of the new one goes on.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/certificate.h"
#include "common/status.h"

namespace ravel::coordinator {

struct AuthorityFiles {
  std::string folder;       // STATE/tls
  std::string cluster;      // in every URI
  Authority authority;      // signs users and nodes
  Authority server_signer;  // signs the coordinator's own certificate
  std::string trusted;      // PEM, one or two certificates
  std::string fingerprint;  // of server_signer's certificate: what a newcomer can compare
  bool rotating = false;
  // Of an `init` that is under way: no other works in this state directory while it lives.
  std::shared_ptr<void> turn = nullptr;

  std::string CaPath() const { return folder + "/ca.pem"; }
  std::string CaKeyPath() const { return folder + "/ca.key"; }
  std::string ServerPath() const { return folder + "/server.pem"; }
  std::string ServerKeyPath() const { return folder + "/server.key"; }
  std::string OldCaPath() const { return folder + "/old.pem"; }
  std::string OldCaKeyPath() const { return folder + "/old.key"; }
};

// An authority from elsewhere: a folder with tls.crt and tls.key, as a secret of cert-manager has
// them, which is read once. Empty: a new one is made.
struct AuthoritySource {
  std::string folder = {};
  std::string cluster = {};  // the name in URIs; empty: a random one
};

// Makes all of it, in a folder beside its place. AlreadyExists when there is an authority, because
// making another would lock every node out; Aborted when another `init` is making one. `names`: how
// clients may call the coordinator, host names and addresses. InvalidArgument names the flag of
// `init` that is wrong.
absl::StatusOr<AuthorityFiles> MakeAuthorityFiles(const std::string& state_dir,
                                                  const std::vector<std::string>& names,
                                                  const AuthoritySource& source,
                                                  int64_t now_ms);
// Moves it to its place, from where on the state has an authority: the last step of an `init`, so
// that one that is cut off can be made again.
absl::Status PublishAuthorityFiles(const AuthorityFiles& files, const std::string& state_dir);
// NotFound: there is no authority in that state.
absl::StatusOr<AuthorityFiles> LoadAuthorityFiles(const std::string& state_dir);
// Writes a new certificate of the same key and names when two thirds of the old one's time have
// passed; gRPC reads the file again by itself. False: it was not due.
absl::StatusOr<bool> RenewServerCertificate(const AuthorityFiles& files, int64_t now_ms);

// The first step. FailedPrecondition: a rotation is under way.
absl::Status BeginRotation(const std::string& state_dir, int64_t now_ms);
// The second: the old authority is gone, and so are the certificates that it signed.
// FailedPrecondition: no rotation is under way, or one that is younger than the longest time of a
// certificate, so that somebody may not have heard of the new authority; `force` ends it all the
// same.
absl::Status FinishRotation(const std::string& state_dir, int64_t now_ms, bool force);

// A name of a server: letters, digits, '-' and '.', or an address of IPv4 or IPv6.
absl::Status CheckServerName(const std::string& name);

}  // namespace ravel::coordinator
