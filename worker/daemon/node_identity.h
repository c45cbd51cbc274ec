#pragma once

// The identity of a node of a cluster, as files in WORK/identity (0700, files 0600): the
// private key, which never leaves it, the certificate, the authority that signs both sides, and
// which coordinator that is.

#include <cstdint>
#include <string>

#include "common/status.h"
#include "worker/daemon/fleet_stream_client.h"

namespace ravel::daemon {

struct NodeIdentity {
  std::string node_id;
  std::string coordinator;  // HOST:PORT
  TlsIdentity tls;
};

// AlreadyExists when the folder has an identity: nothing is changed.
absl::Status CheckNoIdentity(const std::string& work_dir);
absl::Status SaveIdentity(const std::string& work_dir, const NodeIdentity& identity);
// NotFound: this host has not joined. FailedPrecondition: others may read the key.
absl::StatusOr<NodeIdentity> LoadIdentity(const std::string& work_dir);
// The renewed certificate, of the same key, and whom to trust, in the places of the old ones.
absl::Status SaveCertificate(const std::string& work_dir, const NodeIdentity& identity);

// When the certificate is to be renewed, and when it ends; wall time.
struct CertificateDates {
  int64_t renew_ms = 0;  // two thirds of its time are over
  int64_t end_ms = 0;
};
absl::StatusOr<CertificateDates> DatesOf(const std::string& certificate);

}  // namespace ravel::daemon
