// The client of ravel-store against a server that is cut off, restarted, full, or lied to. The
// contract that all stores share is in tests/common/store.

#include "common/store/ravel_store_client.h"

#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/crc32c.h"
#include "proto/store.grpc.pb.h"
#include "tests/testing/local_store_service.h"

namespace ravel::store {
namespace {

using ::testing::HasSubstr;
using testing::LocalStore;

std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

class RavelStoreTest : public ::testing::Test {
 protected:
  RavelStoreTest()
      : root_(std::filesystem::temp_directory_path() /
              ("ravel-client-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(root_);
    Start();
    store_ = *OpenRavelStore(server_->Url("job"));
    EXPECT_TRUE(store_->MakeRoot().ok());
  }
  ~RavelStoreTest() override {
    server_.reset();
    std::filesystem::remove_all(root_);
  }
  void Start(int64_t quota = 0, int port = 0) {
    server_ = std::make_unique<LocalStore>(std::vector<std::string>{root_}, quota, port);
  }
  void Restart(int64_t quota = 0) {
    const int port = server_->port();
    server_.reset();
    Start(quota, port);
  }

  const std::string root_;
  std::unique_ptr<LocalStore> server_;
  std::unique_ptr<ObjectStore> store_;
};

TEST_F(RavelStoreTest, AFileOfManyBlocksSurvivesRestartsOfTheStore) {
  std::string content;
  for (int i = 0; i < 9'000'000; ++i) {
    content.push_back(static_cast<char>(i * 7 % 251));
  }
  auto writer = store_->Create("f", static_cast<int64_t>(content.size()));
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE((*writer)->Append(Bytes(std::string_view(content).substr(0, 5'000'000))).ok());
  Restart();
  ASSERT_TRUE((*writer)->Append(Bytes(std::string_view(content).substr(5'000'000))).ok());
  Restart();
  ASSERT_TRUE((*writer)->Finish().ok());
  const auto found = ReadFile(*store_, "f", 100 << 20);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(*found == content);
  Restart();
  const auto reader = store_->Open("f");
  ASSERT_TRUE(reader.ok());
  std::string middle(3'000'000, '\0');
  ASSERT_TRUE(
      (*reader)
          ->ReadAt(1'234'567, std::as_writable_bytes(std::span(middle.data(), middle.size())))
          .ok());
  EXPECT_TRUE(middle == content.substr(1'234'567, middle.size()));
}

TEST_F(RavelStoreTest, ARestartBetweenCallsIsNotSeen) {
  ASSERT_TRUE(store_->Put("a", "1").ok());
  Restart();
  EXPECT_EQ(*ReadFile(*store_, "a", 10), "1");
  Restart();
  EXPECT_TRUE(store_->PublishIfAbsent("a", "b").ok());
  Restart();
  EXPECT_EQ(store_->List("")->size(), 1u);
}

TEST_F(RavelStoreTest, AStoreThatIsAwayIsToldInTime) {
  const std::string url = server_->Url("job");
  server_.reset();
  const auto store = *OpenRavelStore(
      url,
      {.call_time = std::chrono::milliseconds(300), .stall_time = std::chrono::milliseconds(300)});
  const absl::Status away = store->List("").status();
  EXPECT_TRUE(absl::IsUnavailable(away)) << away;
  EXPECT_THAT(std::string(away.message()), HasSubstr(url));
  EXPECT_TRUE(absl::IsUnavailable(store->Create("f", 1).status()));
}

TEST_F(RavelStoreTest, AStoreThatSpeaksTlsIsNotAskedInClearAgain) {
  const int64_t now_ms = SystemClock::Get().WallMs();
  const Authority authority = *MakeAuthority("c1", now_ms - 60'000, now_ms + 600'000);
  const std::string key = MakePrivateKey();
  grpc::SslServerCredentialsOptions tls(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  tls.pem_root_certs = authority.certificate;
  tls.pem_key_cert_pairs.push_back(
      {.private_key = key,
       .cert_chain = *IssueCertificate(authority,
                                       *MakeCertificateRequest(key),
                                       {.uri = "spiffe://c1.ravel/store",
                                        .serial = "\x01" + std::string(15, 'x'),
                                        .names = {"127.0.0.1"},
                                        .use = CertificateUse::kServer,
                                        .not_before_ms = now_ms - 60'000,
                                        .not_after_ms = now_ms + 600'000})});
  v1::Store::Service service;
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(tls), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  // Tried again and again, it would not come back within the test's time.
  const auto store = *OpenRavelStore("ravel://127.0.0.1:" + std::to_string(port) + "/job",
                                     {.call_time = std::chrono::hours(1)});
  const absl::Status refused = store->List("").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("callers with a certificate only"));
  server->Shutdown(std::chrono::system_clock::now());
}

TEST(RavelStoreClientPatience, AStoreThatWasNeverReachedIsGivenUpSoonAndNamed) {
  SetStoreFirstContactTime(std::chrono::milliseconds(300));
  const auto store = *OpenRavelStore("ravel://127.0.0.1:9/job");  // discard: nobody listens
  const auto began = std::chrono::steady_clock::now();
  const absl::Status status = Exists(*store, "x").status();
  SetStoreFirstContactTime(std::chrono::milliseconds(0));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(std::string(status.message()).find("ravel://127.0.0.1:9: no store answers there"),
            std::string::npos)
      << status;
}

TEST_F(RavelStoreTest, BeyondThisHostNothingIsSpokenInClear) {
  const auto store = *OpenRavelStore("ravel://store.example:7080/job");
  EXPECT_TRUE(absl::IsFailedPrecondition(store->List("").status()));
}

TEST_F(RavelStoreTest, TheQuotaShowsBeforeTheFirstByte) {
  Restart(100);
  EXPECT_TRUE(absl::IsResourceExhausted(store_->Create("f", 101).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(store_->CheckSpace(101)));
  EXPECT_TRUE(store_->CheckSpace(100).ok());
}

TEST_F(RavelStoreTest, FencedEpochsCannotWriteAndOthersCan) {
  const std::string save = "step-0000000020.e7.a1.3f2a9c01.tmp";
  ASSERT_TRUE(MakeDirectories(*store_, save + "/model").ok());
  auto early = store_->Create(save + "/model/f", 1);
  ASSERT_TRUE(early.ok());
  ASSERT_TRUE((*early)->Append(Bytes("x")).ok());
  ASSERT_TRUE(store_->Fence("", 0x3f2a9c01, 8).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition((*early)->Finish())) << "begun before, ended after";
  Restart();
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Create(save + "/model/g", 1).status()));
  EXPECT_TRUE(store_->Put(save + "/COMMIT", "{}").ok());
  EXPECT_EQ(server_->Count("refused"), 1);
}

TEST_F(RavelStoreTest, OfManyPublishersOneWins) {
  constexpr int kPublishers = 6;
  for (int i = 0; i < kPublishers; ++i) {
    const std::string attempt = "attempt-" + std::to_string(i);
    ASSERT_TRUE(store_->MakeDirectory(attempt).ok());
    ASSERT_TRUE(store_->Put(attempt + "/COMMIT", std::to_string(i)).ok());
  }
  std::vector<absl::Status> results(kPublishers);
  std::vector<std::thread> publishers;
  for (int i = 0; i < kPublishers; ++i) {
    publishers.emplace_back([&, i] {
      const auto own = *OpenRavelStore(server_->Url("job"));
      results[static_cast<size_t>(i)] =
          own->PublishIfAbsent("attempt-" + std::to_string(i), "step");
    });
  }
  for (std::thread& publisher : publishers) {
    publisher.join();
  }
  const std::string winner = *ReadFile(*store_, "step/COMMIT", 10);
  for (int i = 0; i < kPublishers; ++i) {
    const absl::Status& result = results[static_cast<size_t>(i)];
    EXPECT_EQ(result.ok(), winner == std::to_string(i)) << i << ": " << result;
    EXPECT_TRUE(result.ok() || absl::IsAlreadyExists(result)) << result;
  }
}

TEST_F(RavelStoreTest, ABlockThatArrivesDamagedIsRefused) {
  const auto stub = v1::Store::NewStub(grpc::CreateChannel(
      "127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->Write(&context);
  v1::StoreWriteRequest request;
  request.mutable_open()->set_path("job/f");
  request.mutable_open()->set_upload("0123456789abcdef");
  stream->Write(request);
  v1::StoreWriteReply reply;
  ASSERT_TRUE(stream->Read(&reply));
  request.Clear();
  request.set_data("abc");
  request.set_crc32c(Crc32c(0, "abd", 3));
  stream->Write(request);
  EXPECT_FALSE(stream->Read(&reply));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(server_->Count("bad_blocks"), 1);
}

TEST_F(RavelStoreTest, ANewerStreamTakesAnUploadOver) {
  const auto stub = v1::Store::NewStub(grpc::CreateChannel(
      "127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials()));
  v1::StoreWriteRequest request;
  request.mutable_open()->set_path("job/f");
  request.mutable_open()->set_upload("0123456789abcdef");
  v1::StoreWriteReply reply;
  grpc::ClientContext first;
  const auto old_stream = stub->Write(&first);
  old_stream->Write(request);
  ASSERT_TRUE(old_stream->Read(&reply));
  grpc::ClientContext second;
  const auto new_stream = stub->Write(&second);
  new_stream->Write(request);
  ASSERT_TRUE(new_stream->Read(&reply)) << "though the old one is still open";
  EXPECT_FALSE(old_stream->Read(&reply));
  EXPECT_EQ(old_stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(RavelStoreTest, WhatIsOutOfBoundsIsRefusedByName) {
  const auto stub = v1::Store::NewStub(grpc::CreateChannel(
      "127.0.0.1:" + std::to_string(server_->port()), grpc::InsecureChannelCredentials()));
  for (const char* path : {"/etc/passwd", "../../x", "job/../../x", ""}) {
    grpc::ClientContext context;
    v1::StoreReadRequest request;
    request.set_path(path);
    request.set_length(1);
    const auto stream = stub->Read(&context, request);
    v1::StoreReadReply reply;
    EXPECT_FALSE(stream->Read(&reply));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << path;
    EXPECT_THAT(status.error_message(), HasSubstr("path"));
  }
}

}  // namespace
}  // namespace ravel::store
