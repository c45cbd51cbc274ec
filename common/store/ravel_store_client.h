#pragma once

// ObjectStore over ravel-store (proto/store.proto). A call that the network or a restart of the
// store cuts off is tried again, with jitter, and goes on where the store is; what it has done
// already is not done twice.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "common/status.h"
#include "common/store/object_store.h"
#include "common/store/ravel_url.h"

namespace ravel::store {

// This process's identity towards stores, as PEM.
struct StoreIdentity {
  std::string authority;
  std::string certificate;
  std::string key;
};
// Asked before each new connection; empty: plaintext, which only loopback addresses get.
using StoreIdentitySource = std::function<absl::StatusOr<std::optional<StoreIdentity>>()>;
// For the whole process, before the first store is opened. Without it: the folder that the
// environment variable RAVEL_STORE_IDENTITY names (authority.pem, certificate.pem, key.pem), or the
// context of ravelctl, if it names a .json file.
void SetStoreIdentitySource(StoreIdentitySource source);
// For the whole process: shown to stores with each call that follows (common/job_token.h). Empty:
// none. Thread-safe.
void SetStoreToken(std::string token);

struct RavelStoreOptions {
  // Limits: of one small call with its repetitions, and of a write or read that stands still.
  std::chrono::milliseconds call_time = std::chrono::seconds(20);
  std::chrono::milliseconds stall_time = std::chrono::seconds(60);
};

// For the whole process: a person waits, so a store that was never reached is given up after this
// time, with a message that names it; 0: after call_time, as in daemons. Thread-safe.
void SetStoreFirstContactTime(std::chrono::milliseconds time);

// From "ravel://HOST:PORT" or "ravel://HOST:PORT/PATH". InvalidArgument says what is wrong with the
// URL; nothing is connected to. An address beyond this host without an identity is
// FailedPrecondition at the first call.
absl::StatusOr<std::unique_ptr<ObjectStore>> OpenRavelStore(std::string_view url,
                                                            const RavelStoreOptions& options = {});

}  // namespace ravel::store
