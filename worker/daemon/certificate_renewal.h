#pragma once

// Renews the node's certificate while the daemon runs.

#include <chrono>
#include <memory>
#include <string>

#include "worker/daemon/fleet_client.h"
#include "worker/daemon/node_identity.h"

namespace ravel::daemon {

// From two thirds of a certificate's time on it asks for another one, again and again until it has
// it: written to disk first, then used by a new stream. Trainers do not notice. Used only from the
// thread of its io_context.
class CertificateRenewal {
 public:
  // All arguments outlive it.
  CertificateRenewal(boost::asio::io_context& context,
                     std::string work_dir,
                     NodeIdentity identity,
                     FleetClient* fleet);
  ~CertificateRenewal();

  void Start();

 private:
  struct Timer;

  void Wait();
  void Renew();
  void OnCertificate(const absl::StatusOr<FleetChannel::Certificate>& certificate);

  const std::string work_dir_;
  NodeIdentity identity_;
  FleetClient* const fleet_;
  std::unique_ptr<Timer> timer_;
  int failures_ = 0;  // since the last success
};

}  // namespace ravel::daemon
