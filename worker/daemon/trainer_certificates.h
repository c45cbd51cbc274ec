#pragma once

// Certificates of trainers that are another user (--trainer-user) and cannot read the node's key:
// they show them to a ravel-store, which takes them for saves of their job alone.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "common/status.h"
#include "worker/daemon/fleet_stream_client.h"

namespace boost::asio {
class io_context;
}

namespace ravel::daemon {

struct JobEpoch {
  std::string job_uid;
  int64_t epoch = 0;
  auto operator<=>(const JobEpoch&) const = default;
};

// One key for each epoch of a job, in memory alone: a daemon that is killed leaves none. From two
// thirds of a certificate's time on it asks for another one, again and again until it has it. Used
// only from the thread of its io_context.
class TrainerCertificates {
 public:
  struct Callbacks {
    // FleetClient::CertifyTrainer.
    std::function<void(const std::string& job_uid,
                       const std::string& request,
                       FleetChannel::CertificateCallback done)>
        certify;
    // Trainers that run get the same key with a new certificate.
    std::function<void(const JobEpoch& of, const TlsIdentity& identity)> renewed;
  };

  TrainerCertificates(boost::asio::io_context& context, Callbacks callbacks);
  ~TrainerCertificates();

  // `done` is called once, from inside this call when a certificate is there that is not due.
  // Cancelled: the epoch was forgotten meanwhile.
  using Done = std::function<void(const absl::StatusOr<TlsIdentity>& identity)>;
  void Get(const JobEpoch& of, const Done& done);
  // Forgets the keys of all others.
  void Keep(const std::set<JobEpoch>& used);

 private:
  struct Timer;
  struct Entry {
    TlsIdentity identity;  // without a certificate at first
    int64_t next_ms = 0;   // wall time from which on another certificate is asked for
    int64_t end_ms = 0;
    bool asking = false;
    int failures = 0;  // of renewals since the last success
  };

  void Ask(const JobEpoch& of, const Done& done);
  absl::StatusOr<TlsIdentity> Take(const JobEpoch& of,
                                   const absl::StatusOr<FleetChannel::Certificate>& certificate);
  void Renew(const JobEpoch& of);
  void OnRenewed(const JobEpoch& of, const absl::StatusOr<TlsIdentity>& identity);
  void WaitForNext();

  const Callbacks callbacks_;
  std::unique_ptr<Timer> timer_;
  std::map<JobEpoch, Entry> entries_;
};

// The message by which a trainer gets it.
void Fill(const TlsIdentity& identity, v1::StoreIdentity& message);

}  // namespace ravel::daemon
