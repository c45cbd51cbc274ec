#pragma once

// Calls of any gRPC method with bytes that need not be a message.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

namespace ravel::testing {

struct RawAnswer {
  grpc::Status status;
  std::vector<std::string> messages;
};

struct RawCall {
  std::string method;                 // "/ravel.v1.Jobs/GetJob"
  std::vector<std::string> messages;  // one, or those of a stream
  size_t most_answers = 4;            // then the call is cancelled
  std::chrono::milliseconds deadline{5000};
};

// Sends all messages, as far as the server takes them, and reads answers.
RawAnswer CallRaw(const std::shared_ptr<grpc::Channel>& channel, const RawCall& call);

// grpc.health.v1.Health/Check says SERVING.
bool IsServing(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace ravel::testing
