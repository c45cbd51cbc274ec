#pragma once

// Measures the calls of a gRPC server for an RpcMeter. The fleet's streams are left out: what they
// carry is counted where it is handled.

#include <memory>

#include <grpcpp/support/server_interceptor.h>

#include "coordinator/jobs/rpc_meter.h"

namespace ravel::coordinator {

// For ServerBuilder::experimental().SetInterceptorCreators. `meter` outlives the server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MeterCalls(RpcMeter* meter);

}  // namespace ravel::coordinator
