#pragma once

// One call of Fleet.Connect, and Fleet.FetchPlan: the gRPC side of the daemon, without any policy.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "common/status.h"
#include "proto/fleet.pb.h"

namespace ravel::daemon {

// A connection to the coordinator. Thread-safe. Callbacks run on threads of gRPC, one at a time.
class FleetStream {
 public:
  struct Callbacks {
    std::function<void(v1::Down)> received;
    // Once, as the last callback: why the stream ended.
    std::function<void(absl::Status)> closed;
  };

  // Cancels; no callback starts afterwards.
  virtual ~FleetStream() = default;

  // Queues a message. Logs are dropped, and false is returned, while more than 4 MiB of messages
  // wait.
  enum class Kind { kControl, kLog };
  virtual bool Send(const v1::Up& message, Kind kind) = 0;

  // Fetches the plan of a job epoch and checks its SHA-256, on the same channel.
  using PlanCallback = std::function<void(absl::StatusOr<std::string>)>;
  virtual void FetchPlan(const v1::FetchPlanRequest& request, PlanCallback done) = 0;
};

// A node's certificate with its key, and the authority that it trusts, as PEM.
struct TlsIdentity {
  std::string authority;
  std::string certificate;
  std::string key;
};

// The one gRPC channel of a daemon: it outlives every stream and reconnects by itself. (A channel
// per stream, destroyed while it was connecting, ends gRPC 1.51 now and then on an assertion of its
// own.)
class FleetChannel {
 public:
  // Null: plaintext.
  static std::unique_ptr<FleetChannel> Create(const std::string& address,
                                              const TlsIdentity* identity = nullptr);
  virtual ~FleetChannel() = default;

  // Streams that are opened from now on use that certificate, on a connection of their own. Older
  // ones go on over the one they have.
  virtual void UseIdentity(const TlsIdentity& identity) = 0;
  // Asks for a new certificate. `done` runs on a thread of gRPC, also after this object is gone.
  struct Certificate {
    std::string certificate;
    std::string authority;  // whom to trust from now on; empty: as before
  };
  using CertificateCallback = std::function<void(absl::StatusOr<Certificate>)>;
  virtual void Renew(const std::string& certificate_request, CertificateCallback done) = 0;
  // Asks for a certificate of this job's trainers, as above.
  virtual void CertifyTrainer(const std::string& job_uid,
                              const std::string& certificate_request,
                              CertificateCallback done) = 0;

  // A new call; a coordinator that cannot be reached shows in `closed`. The stream may outlive the
  // channel object.
  virtual std::unique_ptr<FleetStream> Open(FleetStream::Callbacks callbacks) = 0;
};

}  // namespace ravel::daemon
