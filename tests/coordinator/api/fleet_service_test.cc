// Fleet streams of a coordinator that is going down.

#include "coordinator/api/fleet_service.h"

#include <chrono>
#include <memory>

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "proto/fleet.grpc.pb.h"

namespace ravel::coordinator {
namespace {

// A node whose stream was closed comes back at once: the end does not wait for it.
TEST(FleetServiceTest, AStreamThatBeginsAfterTheLastIsRefused) {
  FleetService service(nullptr, nullptr);
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  service.CloseAll();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  const auto stub = v1::Fleet::NewStub(server->InProcessChannel(grpc::ChannelArguments()));
  const auto stream = stub->Connect(&context);
  v1::Down down;
  EXPECT_FALSE(stream->Read(&down));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  server->Shutdown();
}

}  // namespace
}  // namespace ravel::coordinator
