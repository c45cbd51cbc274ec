#include "coordinator/api/rpc_meter_service.h"

#include <array>
#include <chrono>
#include <string>

#include <grpcpp/support/interceptor.h>

namespace ravel::coordinator {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

std::string CodeName(grpc::StatusCode code) {
  static constexpr std::array<const char*, 17> kNames = {"OK",
                                                         "CANCELLED",
                                                         "UNKNOWN",
                                                         "INVALID_ARGUMENT",
                                                         "DEADLINE_EXCEEDED",
                                                         "NOT_FOUND",
                                                         "ALREADY_EXISTS",
                                                         "PERMISSION_DENIED",
                                                         "RESOURCE_EXHAUSTED",
                                                         "FAILED_PRECONDITION",
                                                         "ABORTED",
                                                         "OUT_OF_RANGE",
                                                         "UNIMPLEMENTED",
                                                         "INTERNAL",
                                                         "UNAVAILABLE",
                                                         "DATA_LOSS",
                                                         "UNAUTHENTICATED"};
  const auto index = static_cast<size_t>(code);
  return index < kNames.size() ? kNames[index] : "UNKNOWN";
}

// "/ravel.v1.Jobs/GetJob" is GetJob.
std::string MethodName(const char* path) {
  const std::string text = path == nullptr ? "" : path;
  return text.substr(text.rfind('/') + 1);
}

// Lives as long as its call, whose hooks come one after another.
class CallMeter : public grpc::experimental::Interceptor {
 public:
  CallMeter(RpcMeter* meter, const ServerRpcInfo& call)
      : meter_(meter),
        method_(MethodName(call.method())),
        one_answer_(call.type() == ServerRpcInfo::Type::UNARY) {}

  // A client that went away took no status.
  ~CallMeter() override {
    if (!recorded_) {
      meter_->Record(method_, CodeName(grpc::StatusCode::CANCELLED), -1);
    }
  }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began_;
      meter_->Record(method_,
                     CodeName(methods->GetSendStatus().error_code()),
                     one_answer_ ? taken.count() : -1);
      recorded_ = true;
    }
    methods->Proceed();
  }

 private:
  RpcMeter* const meter_;
  const std::string method_;
  const bool one_answer_;
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  bool recorded_ = false;
};

class CallMeters : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit CallMeters(RpcMeter* meter) : meter_(meter) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* call) override {
    // Hooks of each message would cost the fleet's streams more than they tell.
    return call->type() == ServerRpcInfo::Type::BIDI_STREAMING ? nullptr
                                                               : new CallMeter(meter_, *call);
  }

 private:
  RpcMeter* const meter_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MeterCalls(RpcMeter* meter) {
  return std::make_unique<CallMeters>(meter);
}

}  // namespace ravel::coordinator
