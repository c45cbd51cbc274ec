#pragma once

// State that every call of the client of ravel-store shares: the address, the process's channels
// and identity, pauses and repetitions. Only ravel_store_client.cc includes it. Thread-safe.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/net_address.h"
#include "common/status.h"
#include "common/store/object_store.h"
#include "common/store/ravel_store_client.h"
#include "proto/store.grpc.pb.h"

namespace ravel::store {

inline constexpr std::chrono::milliseconds kStoreTryTime = std::chrono::seconds(10);

// A call with the process's token.
class StoreCall : public grpc::ClientContext {
 public:
  StoreCall();
};

// `what` begins the message.
absl::Status FromGrpc(const grpc::Status& status, std::string_view what);

// Returns true for what the same call may do better a moment later: the store restarts, or the
// network was cut.
bool MayPass(const absl::Status& status);

// Pauses that grow, each of a random length: many writers do not come back at once.
class Backoff {
 public:
  std::chrono::milliseconds Next();

 private:
  std::minstd_rand random_{std::random_device()()};
  std::chrono::milliseconds longest_{20};
};

// The place of a store, and the folder in it. Immutable.
struct StoreAddress {
  HostPort host;
  std::string target;  // HOST:PORT
  std::string prefix;  // path in the store, without slashes around it
  RavelStoreOptions options;
  std::shared_ptr<std::atomic<bool>> reached = std::make_shared<std::atomic<bool>>(false);

  std::string Path(std::string_view path) const { return JoinPath(prefix, path); }
  std::string Url(std::string_view path) const {
    return absl::StrCat(std::string(kRavelScheme), JoinPath(target, Path(path)));
  }
  // The process's channel to this address. FailedPrecondition for an address beyond this host
  // without an identity.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> Channel() const;
  // A stub on that channel; the same error.
  absl::StatusOr<std::unique_ptr<v1::Store::Stub>> Stub() const;
  // After a first try that failed so. FailedPrecondition: the store speaks TLS and this process has
  // no identity, so that no other try can do better. Takes a handshake, at most a second.
  absl::Status CheckSpokenTo(const absl::Status& failed) const;
  // Time for a call with its repetitions.
  std::chrono::milliseconds CallTime() const;
  // The end of a call whose time was over: the same, or what was tried to reach the store.
  absl::Status Unreached(const absl::Status& last, int tries) const;
  // Before the next try. Connects meanwhile: gRPC's blocking calls drive a connection only while
  // one of them waits, and one that fails at once waits for nothing, so that no TLS handshake would
  // ever come to its end.
  void Pause(Backoff& backoff) const;
};

// Calls `once(stub, context)` until it passes, fails for good, or the time is over; counts the
// calls that were begun in `tries`.
template <typename Once>
absl::Status Persist(const StoreAddress& address, int& tries, const Once& once) {
  const auto end = std::chrono::steady_clock::now() + address.CallTime();
  Backoff backoff;
  for (;;) {
    ++tries;
    ASSIGN_OR_RETURN(const std::unique_ptr<v1::Store::Stub> stub, address.Stub());
    StoreCall context;
    context.set_deadline(std::chrono::system_clock::now() +
                         std::min(kStoreTryTime, address.CallTime()));
    absl::Status status = once(*stub, context);
    if (!MayPass(status)) {
      address.reached->store(true);
      return status;
    }
    if (std::chrono::steady_clock::now() >= end) {
      return address.Unreached(status, tries);
    }
    if (tries == 1) {
      RETURN_IF_ERROR(address.CheckSpokenTo(status));
    }
    address.Pause(backoff);
  }
}
template <typename Once>
absl::Status Persist(const StoreAddress& address, const Once& once) {
  int tries = 0;
  return Persist(address, tries, once);
}

}  // namespace ravel::store
