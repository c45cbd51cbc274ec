#pragma once

// Mutated requests to every method of services, over real connections.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/grpcpp.h>

#include "tests/testing/fuzz.h"
#include "tests/testing/raw_calls_client.h"

namespace ravel::testing {

struct ServiceFuzz {
  std::shared_ptr<grpc::Channel> channel;
  std::vector<const google::protobuf::FileDescriptor*> files;
  // Names that exist at the server, and values that mean something.
  std::vector<std::string> words = {};
  // Words for methods that change things, in place of `words`: what is there must stay.
  std::vector<std::string> words_of_changes = {};
  std::function<bool(const std::string& method)> changes = nullptr;
  // Valid requests, by type: "ravel.v1.SubmitJobRequest". Others begin empty.
  std::map<std::string, std::vector<std::string>> seeds = {};
  // Calls of each method; times RAVEL_FUZZ_RUNS / 300.
  int64_t requests = 60;
  // False: the server is gone, and there is no use in going on.
  std::function<bool()> alive = nullptr;
  // Called with each call that was answered OK.
  std::function<void(const RawCall& call, const RawAnswer& answer)> accepted = nullptr;
};

struct ServiceCounts {
  std::map<std::string, int64_t> calls = {};  // by method
  std::map<int, int64_t> codes = {};          // by code of gRPC
};

ServiceCounts FuzzServices(const ServiceFuzz& fuzz);
std::string Summary(const ServiceCounts& counts);

}  // namespace ravel::testing
