#include "tests/testing/fleet_proxy_service.h"

#include <atomic>
#include <utility>

#include <absl/strings/str_cat.h>
#include <grpcpp/grpcpp.h>

#include "common/mutex.h"
#include "proto/fleet.grpc.pb.h"
#include "tests/testing/eventually.h"
#include "worker/daemon/fleet_stream_client.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;

// The name of the member of a message's only oneof that is set.
std::string Member(const google::protobuf::Message& message) {
  const auto* field = message.GetReflection()->GetOneofFieldDescriptor(
      message, message.GetDescriptor()->oneof_decl(0));
  return field == nullptr ? "nothing" : std::string(field->name());
}

std::string KindOf(const v1::Up& up) {
  return absl::StrCat(
      "up/", Member(up), up.has_trainer() ? absl::StrCat(".", Member(up.trainer().frame())) : "");
}

std::string KindOf(const v1::Down& down) {
  return absl::StrCat("down/",
                      Member(down),
                      down.has_trainer() ? absl::StrCat(".", Member(down.trainer().frame())) : "");
}

class Proxy final : public FleetProxy, public v1::Fleet::Service {
 public:
  explicit Proxy(const std::string& coordinator)
      : coordinator_(coordinator),
        plans_(v1::Fleet::NewStub(
            grpc::CreateChannel(coordinator, grpc::InsecureChannelCredentials()))) {}
  ~Proxy() override {
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_->Wait();
    }
  }

  absl::Status Listen() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
    return server_ != nullptr && port != 0 ? absl::OkStatus()
                                           : absl::UnavailableError("no port for the proxy");
  }

  std::string address() const override { return address_; }

  void SpoilNext(const std::string& kind, Spoil spoil, milliseconds delay) override {
    const MutexLock lock(mutex_);
    kind_ = kind;
    spoil_ = spoil;
    delay_ = delay;
    spoilt_ = 0;
  }

  int spoilt() const override {
    const MutexLock lock(mutex_);
    return spoilt_;
  }

  // -- the service

  grpc::Status Connect(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<v1::Down, v1::Up>* worker) override {
    const std::unique_ptr<daemon::FleetChannel> channel =
        daemon::FleetChannel::Create(coordinator_);
    Mutex write_mutex;
    const auto to_daemon = [&](const v1::Down& down) {
      const MutexLock lock(write_mutex);
      worker->Write(down);
    };
    const std::unique_ptr<daemon::FleetStream> coordinator =
        channel->Open({.received =
                           [&](v1::Down down) {
                             if (!Pass(KindOf(down), [&] { to_daemon(down); })) {
                               context->TryCancel();
                             }
                           },
                       .closed = [&](const absl::Status&) { context->TryCancel(); }});
    v1::Up up;
    while (worker->Read(&up)) {
      const bool passed =
          Pass(KindOf(up), [&] { coordinator->Send(up, daemon::FleetStream::Kind::kControl); });
      if (!passed) {
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "cut by the test");
      }
    }
    return grpc::Status::OK;
  }

  grpc::Status FetchPlan(grpc::ServerContext* /*context*/,
                         const v1::FetchPlanRequest* request,
                         grpc::ServerWriter<v1::PlanChunk>* writer) override {
    grpc::ClientContext context;
    const auto reader = plans_->FetchPlan(&context, *request);
    v1::PlanChunk chunk;
    while (reader->Read(&chunk)) {
      writer->Write(chunk);
    }
    return reader->Finish();
  }

 private:
  // False: lost, and the stream must end.
  template <typename Forward>
  bool Pass(const std::string& kind, Forward forward) {
    bool spoilt = false;
    Spoil spoil = Spoil::kLose;
    milliseconds delay{};
    {
      const MutexLock lock(mutex_);
      spoilt = kind == kind_ && spoilt_ == 0;
      spoilt_ += spoilt ? 1 : 0;
      spoil = spoil_;
      delay = delay_;
    }
    if (spoilt && spoil == Spoil::kLose) {
      return false;
    }
    if (spoilt && spoil == Spoil::kDelay) {
      PauseBetweenLooks(delay);
    }
    if (spoilt && spoil == Spoil::kDuplicate) {
      forward();
    }
    forward();
    return true;
  }

  const std::string coordinator_;
  const std::unique_ptr<v1::Fleet::Stub> plans_;
  std::string address_;
  mutable Mutex mutex_;
  std::string kind_ ABSL_GUARDED_BY(mutex_);
  Spoil spoil_ ABSL_GUARDED_BY(mutex_) = Spoil::kLose;
  milliseconds delay_ ABSL_GUARDED_BY(mutex_){};
  int spoilt_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FleetProxy>> FleetProxy::Start(const std::string& coordinator) {
  auto proxy = std::make_unique<Proxy>(coordinator);
  RETURN_IF_ERROR(proxy->Listen());
  return std::unique_ptr<FleetProxy>(std::move(proxy));
}

}  // namespace ravel::testing
