#include "common/store/ravel_store_call_client.h"

#include <cstdlib>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/strings/match.h>

#include "common/file_writer.h"
#include "common/job_token.h"
#include "common/json.h"
#include "common/mutex.h"
#include "common/peer_chain.h"
#include "common/store/block_message_client.h"

namespace ravel::store {
namespace {

using std::chrono::milliseconds;

std::atomic<int64_t> first_contact_ms = 0;

constexpr milliseconds kLongestPause{2000};
constexpr milliseconds kHandshakeTime{1000};
constexpr int64_t kMaxIdentityBytes = 64 << 10;
constexpr int64_t kMaxContextBytes = 256 << 10;

// From a context of ravelctl.
absl::StatusOr<std::optional<StoreIdentity>> IdentityOfContext(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kMaxContextBytes));
  const absl::StatusOr<json::Value> context = json::Parse(text);
  RETURN_IF_ERROR(Annotate(context.status(), path));
  StoreIdentity identity;
  for (const auto& [name, field] : {std::pair("authority", &identity.authority),
                                    std::pair("certificate", &identity.certificate),
                                    std::pair("key", &identity.key)}) {
    const json::Value* const value = context->Find(name);
    if (value == nullptr || !value->is_string()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", name, ": expected a string"));
    }
    *field = value->AsString();
  }
  return std::optional<StoreIdentity>(std::move(identity));
}

absl::StatusOr<std::optional<StoreIdentity>> IdentityOfEnvironment() {
  const char* const folder = std::getenv("RAVEL_STORE_IDENTITY");
  if (folder == nullptr || *folder == '\0') {
    return std::optional<StoreIdentity>();
  }
  StoreIdentity identity;
  const std::string at(folder);
  if (absl::EndsWith(at, ".json")) {
    return IdentityOfContext(at);
  }
  ASSIGN_OR_RETURN(identity.authority, ReadWholeFile(at + "/authority.pem", kMaxIdentityBytes));
  ASSIGN_OR_RETURN(identity.certificate, ReadWholeFile(at + "/certificate.pem", kMaxIdentityBytes));
  ASSIGN_OR_RETURN(identity.key, ReadWholeFile(at + "/key.pem", kMaxIdentityBytes));
  return std::optional<StoreIdentity>(std::move(identity));
}

// The channels of a process, by address. Thread-safe.
class Channels {
 public:
  static Channels& Get() {
    static auto* const channels = new Channels;
    return *channels;
  }

  void SetSource(StoreIdentitySource source) {
    const MutexLock lock(mutex_);
    source_ = std::move(source);
  }

  // The channel to this address was made without an identity.
  bool IsPlain(const std::string& target) {
    const MutexLock lock(mutex_);
    const auto found = entries_.find(target);
    return found != entries_.end() && found->second.certificate.empty();
  }

  absl::StatusOr<std::shared_ptr<grpc::Channel>> To(const HostPort& address,
                                                    const std::string& target) {
    StoreIdentitySource source;
    {
      const MutexLock lock(mutex_);
      source = source_;
    }
    ASSIGN_OR_RETURN(const std::optional<StoreIdentity> identity,
                     source ? source() : IdentityOfEnvironment());
    if (!identity && !IsLoopbackHost(address.host)) {
      return absl::FailedPreconditionError(
          absl::StrCat("store ",
                       target,
                       ": without an identity (RAVEL_STORE_IDENTITY, `ravelctl login`) only "
                       "loopback addresses are spoken to, because nothing would be encrypted"));
    }
    const std::string certificate = identity ? identity->certificate : "";
    const MutexLock lock(mutex_);
    Entry& entry = entries_[target];
    if (entry.channel == nullptr || entry.certificate != certificate) {
      entry.certificate = certificate;
      entry.channel = Make(target, identity);
    }
    return entry.channel;
  }

 private:
  struct Entry {
    std::string certificate;
    std::shared_ptr<grpc::Channel> channel;
  };

  static std::shared_ptr<grpc::Channel> Make(const std::string& target,
                                             const std::optional<StoreIdentity>& identity) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, static_cast<int>(4 * kStoreBlockBytes));
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetMaxReceiveMessageSize(static_cast<int>(2 * kStoreBlockBytes));
    std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
    if (identity) {
      credentials = grpc::SslCredentials({.pem_root_certs = identity->authority,
                                          .pem_private_key = identity->key,
                                          .pem_cert_chain = identity->certificate});
    }
    return grpc::CreateCustomChannel(target, credentials, arguments);
  }

  Mutex mutex_;
  StoreIdentitySource source_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe.
class ProcessToken {
 public:
  static ProcessToken& Get() {
    static auto* const token = new ProcessToken;
    return *token;
  }
  void Set(std::string text) {
    const MutexLock lock(mutex_);
    text_ = std::move(text);
  }
  std::string text() {
    const MutexLock lock(mutex_);
    return text_;
  }

 private:
  Mutex mutex_;
  std::string text_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::Status FromGrpc(const grpc::Status& status, std::string_view what) {
  if (status.ok()) {
    return absl::OkStatus();
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      absl::StrCat(std::string(what), ": ", status.error_message()));
}

bool MayPass(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status) || absl::IsAborted(status);
}

void SetStoreFirstContactTime(milliseconds time) {
  first_contact_ms = time.count();
}

milliseconds StoreAddress::CallTime() const {
  const int64_t first_ms = first_contact_ms;
  return first_ms == 0 || reached->load() ? options.call_time
                                          : std::min(options.call_time, milliseconds(first_ms));
}

absl::Status StoreAddress::Unreached(const absl::Status& last, int tries) const {
  if (first_contact_ms == 0 || reached->load()) {
    return last;
  }
  return absl::UnavailableError(absl::StrCat(std::string(kRavelScheme),
                                             target,
                                             ": no store answers there (",
                                             tries,
                                             " tries in ",
                                             static_cast<double>(CallTime().count()) / 1000,
                                             " s): ",
                                             std::string(last.message())));
}

milliseconds Backoff::Next() {
  std::uniform_int_distribution<int64_t> length(longest_.count() / 4, longest_.count());
  const milliseconds next(length(random_));
  longest_ = std::min(longest_ * 2, kLongestPause);
  return next;
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> StoreAddress::Channel() const {
  return Channels::Get().To(host, target);
}

absl::StatusOr<std::unique_ptr<v1::Store::Stub>> StoreAddress::Stub() const {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::Channel> channel, Channel());
  return v1::Store::NewStub(channel);
}

absl::Status StoreAddress::CheckSpokenTo(const absl::Status& failed) const {
  if (!absl::IsUnavailable(failed) || !Channels::Get().IsPlain(target)) {
    return absl::OkStatus();
  }
  // No certificate has this fingerprint: what is asked is whether there is a chain at all, which is
  // PermissionDenied, or FailedPrecondition where it is not a coordinator's.
  const absl::Status shown = FetchAuthority(target, "", kHandshakeTime).status();
  return absl::IsPermissionDenied(shown) || absl::IsFailedPrecondition(shown)
             ? absl::FailedPreconditionError(
                   absl::StrCat("store ",
                                target,
                                ": it takes callers with a certificate only, and this process has "
                                "none; `ravelctl login`, or RAVEL_STORE_IDENTITY, gives it one"))
             : absl::OkStatus();
}

void StoreAddress::Pause(Backoff& backoff) const {
  const milliseconds length = backoff.Next();
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = Channels::Get().To(host, target);
  if (!channel.ok() || (*channel)->GetState(true) == GRPC_CHANNEL_READY) {
    std::this_thread::sleep_for(length);
    return;
  }
  (*channel)->WaitForConnected(std::chrono::system_clock::now() + length);
}

StoreCall::StoreCall() {
  const std::string token = ProcessToken::Get().text();
  if (!token.empty()) {
    AddMetadata(std::string(kJobTokenMetadata), token);
  }
}

void SetStoreToken(std::string token) {
  ProcessToken::Get().Set(std::move(token));
}

void SetStoreIdentitySource(StoreIdentitySource source) {
  Channels::Get().SetSource(std::move(source));
}

}  // namespace ravel::store
