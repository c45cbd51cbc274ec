// The gRPC side of the daemon: one bidirectional call with a write queue, and the fetching of
// plans. gRPC permits one write at a time and calls back on its own threads, so writes are queued
// under mutex_ and callbacks run under callback_mutex_; Detach takes the latter, after which no
// callback can start. The reactor keeps itself alive until OnDone, because gRPC may use it until
// then. Logs are dropped when 4 MiB wait; control messages never.

#include "worker/daemon/fleet_stream_client.h"

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/client_callback.h>

#include "common/crypto.h"
#include "common/mutex.h"
#include "proto/access.grpc.pb.h"
#include "proto/fleet.grpc.pb.h"

namespace ravel::daemon {
namespace {

constexpr size_t kMaxQueuedLogBytes = size_t{4} << 20;
constexpr size_t kMaxPlanBytes = size_t{64} << 20;
constexpr int kMaxMessageBytes = 64 << 20;
constexpr std::chrono::seconds kPlanDeadline{60};
constexpr std::chrono::seconds kCertificateDeadline{30};
constexpr int kKeepaliveMs = 20000;
// Between attempts of the channel; how often a daemon tries is its own policy.
constexpr int kReconnectMs = 200;
// Time that one connect may take: gRPC reads its "minimum back-off" as that too, and a busy host
// needs more than an instant.
constexpr int kConnectMs = 5000;

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// Holds itself alive from StartCall to OnDone.
class StreamReactor final : public grpc::ClientBidiReactor<v1::Up, v1::Down>,
                            public std::enable_shared_from_this<StreamReactor> {
 public:
  explicit StreamReactor(FleetStream::Callbacks callbacks) {
    // Under the lock, so that a thread of gRPC sees them by a hand-over that sanitizers see too.
    const MutexLock lock(callback_mutex_);
    callbacks_ = std::move(callbacks);
  }

  void Start(v1::Fleet::Stub& stub) {
    {
      const MutexLock lock(callback_mutex_);
      self_ = shared_from_this();
    }
    stub.async()->Connect(&context_, this);
    AddHold();  // writes come from outside of reactions
    StartRead(&received_);
    StartCall();
  }

  bool Send(const v1::Up& message, FleetStream::Kind kind) {
    const MutexLock lock(mutex_);
    const size_t bytes = message.ByteSizeLong();
    if (closing_ ||
        (kind == FleetStream::Kind::kLog && queued_bytes_ + bytes > kMaxQueuedLogBytes)) {
      return false;
    }
    queued_bytes_ += bytes;
    queue_.push_back(message);
    if (queue_.size() == 1) {
      StartWrite(&queue_.front());
    }
    return true;
  }

  // No callback starts after it has returned.
  void Detach() {
    {
      const MutexLock lock(callback_mutex_);
      callbacks_ = {};
    }
    context_.TryCancel();
    Close();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      Close();
      return;
    }
    {
      const MutexLock lock(callback_mutex_);
      if (callbacks_.received) {
        callbacks_.received(std::move(received_));
      }
    }
    received_.Clear();
    StartRead(&received_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) {
      Close();
      return;
    }
    const MutexLock lock(mutex_);
    queued_bytes_ -= queue_.front().ByteSizeLong();
    queue_.pop_front();
    if (!closing_ && !queue_.empty()) {
      StartWrite(&queue_.front());
    }
  }

  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<StreamReactor> last;  // outlives the lock
    {
      const MutexLock lock(callback_mutex_);
      if (callbacks_.closed) {
        callbacks_.closed(FromGrpc(status));
      }
      callbacks_ = {};
      last = std::move(self_);
    }
  }

 private:
  void Close() {
    {
      const MutexLock lock(mutex_);
      if (closing_) {
        return;
      }
      closing_ = true;
    }
    RemoveHold();
  }

  grpc::ClientContext context_;
  v1::Down received_;
  std::shared_ptr<StreamReactor> self_;
  Mutex callback_mutex_;
  FleetStream::Callbacks callbacks_ ABSL_GUARDED_BY(callback_mutex_);
  Mutex mutex_;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<v1::Up> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Closed when the owner of the stream is gone: callbacks of plans in flight then stay unsaid.
struct PlanGate {
  Mutex mutex;
  bool open ABSL_GUARDED_BY(mutex) = true;
};

// Holds itself alive from StartCall to OnDone.
class PlanReactor final : public grpc::ClientReadReactor<v1::PlanChunk>,
                          public std::enable_shared_from_this<PlanReactor> {
 public:
  PlanReactor(v1::FetchPlanRequest request,
              FleetStream::PlanCallback done,
              std::shared_ptr<PlanGate> gate)
      : request_(std::move(request)), done_(std::move(done)), gate_(std::move(gate)) {}

  void Start(v1::Fleet::Stub& stub) {
    {
      // Under a lock, so that a thread of gRPC sees it by a hand-over that sanitizers see too.
      const MutexLock lock(gate_->mutex);
      self_ = shared_from_this();
    }
    context_.set_deadline(std::chrono::system_clock::now() + kPlanDeadline);
    stub.async()->FetchPlan(&context_, &request_, this);
    StartRead(&chunk_);
    StartCall();
  }

  // Nobody wants the plan any more; from any thread.
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      return;
    }
    if (plan_.size() + chunk_.data().size() > kMaxPlanBytes) {
      too_long_ = true;
      context_.TryCancel();
      return;
    }
    plan_ += chunk_.data();
    StartRead(&chunk_);
  }

  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<PlanReactor> last;  // outlives the lock
    const MutexLock lock(gate_->mutex);
    last = std::move(self_);
    if (gate_->open) {
      done_(Result(status));
    }
  }

 private:
  absl::StatusOr<std::string> Result(const grpc::Status& status) {
    const std::string what =
        absl::StrCat("plan of job ", request_.job_uid(), ", epoch ", request_.epoch());
    if (too_long_) {
      return absl::ResourceExhaustedError(
          absl::StrCat(what, ": more than ", kMaxPlanBytes, " bytes"));
    }
    if (!status.ok()) {
      return Annotate(FromGrpc(status), what);
    }
    const Sha256Digest digest = Sha256(plan_);
    if (Hex(digest) != Hex(request_.digest())) {
      return absl::DataLossError(
          absl::StrCat(what, ": SHA-256 is ", Hex(digest), ", expected ", Hex(request_.digest())));
    }
    return std::move(plan_);
  }

  grpc::ClientContext context_;
  const v1::FetchPlanRequest request_;
  const FleetStream::PlanCallback done_;
  const std::shared_ptr<PlanGate> gate_;  // shared with the stream and its other plans in flight
  std::shared_ptr<PlanReactor> self_;
  v1::PlanChunk chunk_;
  std::string plan_;
  bool too_long_ = false;
};

class GrpcFleetStream final : public FleetStream {
 public:
  GrpcFleetStream(const std::shared_ptr<grpc::Channel>& channel, Callbacks callbacks)
      : stub_(v1::Fleet::NewStub(channel)),
        reactor_(std::make_shared<StreamReactor>(std::move(callbacks))) {
    reactor_->Start(*stub_);
  }
  ~GrpcFleetStream() override {
    {
      const MutexLock lock(gate_->mutex);
      gate_->open = false;
    }
    for (const std::weak_ptr<PlanReactor>& plan : plans_) {
      if (const std::shared_ptr<PlanReactor> reactor = plan.lock()) {
        reactor->Cancel();  // else the coordinator goes on sending, to its deadline
      }
    }
    reactor_->Detach();
  }

  bool Send(const v1::Up& message, Kind kind) override { return reactor_->Send(message, kind); }

  void FetchPlan(const v1::FetchPlanRequest& request, PlanCallback done) override {
    std::erase_if(plans_, [](const auto& plan) { return plan.expired(); });
    const auto reactor = std::make_shared<PlanReactor>(request, std::move(done), gate_);
    plans_.push_back(reactor);
    reactor->Start(*stub_);
  }

 private:
  std::unique_ptr<v1::Fleet::Stub> stub_;
  // Shared with the call, which ends some time after this object.
  std::shared_ptr<StreamReactor> reactor_;
  std::shared_ptr<PlanGate> gate_ = std::make_shared<PlanGate>();
  std::vector<std::weak_ptr<PlanReactor>> plans_;  // in flight, and some that are done
};

// Deletes itself when the answer is there.
template <typename Request>
struct CertificateCall {
  using Method = void (v1::Access::StubInterface::async_interface::*)(
      grpc::ClientContext*, const Request*, v1::EnrolResponse*, std::function<void(grpc::Status)>);
  grpc::ClientContext context;
  Request request;
  v1::EnrolResponse response;
  FleetChannel::CertificateCallback done;
  std::unique_ptr<v1::Access::Stub> stub;

  void Start(Method method) {
    context.set_deadline(std::chrono::system_clock::now() + kCertificateDeadline);
    (stub->async()->*method)(&context, &request, &response, [this](const grpc::Status& status) {
      const std::unique_ptr<CertificateCall> self(this);
      if (status.ok()) {
        done(FleetChannel::Certificate{.certificate = response.certificate(),
                                       .authority = response.authority()});
      } else {
        done(FromGrpc(status));
      }
    });
  }
};

// gRPC 1.51 runs callbacks on threads that all channels of a process share, and ends them with the
// last channel that has made a call. It joins them then, also from one of them, while calls that
// were cancelled are still ending: a process dies of that ("double free", or "prior > 0"). One
// channel that leads nowhere keeps them to the end: a call on it fails at once and connects to
// nothing.
void KeepCallbackThreads() {
  struct Keeper {
    Keeper() : stub(v1::Access::NewStub(grpc::CreateChannel("", nullptr))) {
      stub->async()->Renew(&context, &request, &response, [](const grpc::Status&) {});
    }
    grpc::ClientContext context;
    v1::RenewRequest request;
    v1::EnrolResponse response;
    std::unique_ptr<v1::Access::Stub> stub;
  };
  // Volatile, or the compiler keeps no pointer to it, and leak checkers report it.
  static Keeper* volatile keeper = new Keeper;
  static_cast<void>(keeper);
}

class GrpcFleetChannel final : public FleetChannel {
 public:
  GrpcFleetChannel(std::string address, const TlsIdentity* identity)
      : address_(std::move(address)), channel_(Make(identity)) {
    KeepCallbackThreads();
  }

  std::unique_ptr<FleetStream> Open(FleetStream::Callbacks callbacks) override {
    return std::make_unique<GrpcFleetStream>(channel_, std::move(callbacks));
  }

  void UseIdentity(const TlsIdentity& identity) override { channel_ = Make(&identity); }

  void Renew(const std::string& certificate_request, CertificateCallback done) override {
    auto* call = new CertificateCall<v1::RenewRequest>;
    call->request.set_certificate_request(certificate_request);
    call->done = std::move(done);
    call->stub = v1::Access::NewStub(channel_);
    call->Start(&v1::Access::StubInterface::async_interface::Renew);
  }

  void CertifyTrainer(const std::string& job_uid,
                      const std::string& certificate_request,
                      CertificateCallback done) override {
    auto* call = new CertificateCall<v1::CertifyTrainerRequest>;
    call->request.set_certificate_request(certificate_request);
    call->request.set_job_uid(job_uid);
    call->done = std::move(done);
    call->stub = v1::Access::NewStub(channel_);
    call->Start(&v1::Access::StubInterface::async_interface::CertifyTrainer);
  }

 private:
  std::shared_ptr<grpc::Channel> Make(const TlsIdentity* identity) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    const std::shared_ptr<grpc::ChannelCredentials> credentials =
        identity == nullptr ? grpc::InsecureChannelCredentials()
                            : grpc::SslCredentials({.pem_root_certs = identity->authority,
                                                    .pem_private_key = identity->key,
                                                    .pem_cert_chain = identity->certificate});
    return grpc::CreateCustomChannel(address_, credentials, arguments);
  }

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;  // streams that are still ending hold it too
};

}  // namespace

std::unique_ptr<FleetChannel> FleetChannel::Create(const std::string& address,
                                                   const TlsIdentity* identity) {
  return std::make_unique<GrpcFleetChannel>(address, identity);
}

}  // namespace ravel::daemon
