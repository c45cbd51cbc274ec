#include "worker/store/store_gate_service.h"

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/crypto.h"
#include "proto/store.grpc.pb.h"
#include "tests/testing/eventually.h"
#include "tests/testing/process.h"
#include "worker/store/store_service.h"

namespace ravel::store_server {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr int64_t kLifeMs = 4000;
constexpr char kEnrolment[] = "\x41-enrol-";  // begins all serial numbers
constexpr char kCluster[] = "0b2c6f0e-6c1f-4c55-9d3c-2f1b7a1d9e10";

// A store with an authority of its own, in this process.
class StoreGateTest : public ::testing::Test {
 protected:
  StoreGateTest() {
    const int64_t now_ms = SystemClock::Get().WallMs();
    authority_ = *MakeAuthority("test", now_ms - 60'000, now_ms + 600'000);
    const std::string identity = scratch_.path() + "/identity";
    std::filesystem::create_directories(identity);
    const std::string key = MakePrivateKey();
    testing::WriteText(identity + "/authority.pem", authority_.certificate);
    testing::WriteText(identity + "/key.pem", key);
    EXPECT_EQ(chmod((identity + "/key.pem").c_str(), 0600), 0);
    testing::WriteText(identity + "/certificate.pem",
                       Certificate(key, "store", CertificateUse::kServer, now_ms + 600'000));
    gate_ = *StoreGate::FromIdentity(identity, {});
    trust_ = *TrustBook::Open(scratch_.path() + "/trust");
    gate_->UseTrust(trust_.get());
    DiskOptions disks;
    disks.folders = {scratch_.path() + "/files"};
    std::filesystem::create_directories(disks.folders.front());
    disks_ = *DiskSet::Open(disks);
    fences_ = *FenceBook::Open(scratch_.path() + "/fences");
    service_ = std::make_unique<StoreService>(disks_.get(), fences_.get(), gate_.get(), 16);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", gate_->Credentials(), &port_);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
  }
  ~StoreGateTest() override { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string Certificate(const std::string& key,
                          const std::string& path,
                          CertificateUse use,
                          int64_t not_after_ms) const {
    CertificateOrder order{.uri = absl::StrCat("spiffe://", kCluster, ".ravel/", path),
                           .serial = kEnrolment + RandomBytes(8),
                           .use = use,
                           .not_before_ms = SystemClock::Get().WallMs() - 60'000,
                           .not_after_ms = not_after_ms};
    if (use == CertificateUse::kServer) {
      order.names = {"127.0.0.1"};
    }
    return *IssueCertificate(authority_, *MakeCertificateRequest(key), order);
  }
  // By a certificate that ends then.
  std::shared_ptr<grpc::Channel> Connect(int64_t not_after_ms,
                                         const std::string& name = "node/n1") const {
    const std::string key = MakePrivateKey();
    return grpc::CreateChannel(
        absl::StrCat("127.0.0.1:", port_),
        grpc::SslCredentials(
            {.pem_root_certs = authority_.certificate,
             .pem_private_key = key,
             .pem_cert_chain = Certificate(key, name, CertificateUse::kClient, not_after_ms)}));
  }
  static grpc::Status Ask(v1::Store::Stub& stub) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + seconds(20));
    v1::StoreSpaceReply reply;
    return stub.Space(&context, {}, &reply);
  }

  testing::ScratchFolder scratch_;
  Authority authority_;
  std::unique_ptr<TrustBook> trust_;  // outlives the gate's server
  std::unique_ptr<StoreGate> gate_;
  std::unique_ptr<DiskSet> disks_;
  std::unique_ptr<FenceBook> fences_;
  std::unique_ptr<StoreService> service_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

TEST_F(StoreGateTest, CertificateThatEndsAfterTheHandshakeIsRefusedOnItsConnection) {
  const std::shared_ptr<grpc::Channel> channel = Connect(SystemClock::Get().WallMs() + kLifeMs);
  const std::unique_ptr<v1::Store::Stub> stub = v1::Store::NewStub(channel);
  const grpc::Status first = Ask(*stub);
  ASSERT_TRUE(first.ok()) << first.error_message();
  grpc::Status last;
  ASSERT_TRUE(testing::Eventually(seconds(20), [&] {
    last = Ask(*stub);
    return !last.ok();
  }));
  EXPECT_EQ(last.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(last.error_message(), HasSubstr("the certificate of node/n1 has expired"));
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY) << "it is the first connection";

  const std::unique_ptr<v1::Store::Stub> renewed =
      v1::Store::NewStub(Connect(SystemClock::Get().WallMs() + 60'000));
  EXPECT_TRUE(Ask(*renewed).ok());
}

TEST_F(StoreGateTest, ATrainerWritesSavesOfItsJobUntilItsNodeIsRevoked) {
  const int64_t end_ms = SystemClock::Get().WallMs() + 60'000;
  const auto make =
      [](const std::shared_ptr<grpc::Channel>& channel, const std::string& path, bool parents) {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + seconds(20));
        v1::StoreMakeFolderRequest request;
        request.set_path(path);
        request.set_parents(parents);
        v1::StoreMakeFolderReply reply;
        return v1::Store::NewStub(channel)->MakeFolder(&context, request, &reply);
      };
  for (const char* job : {"team/job", "team/other"}) {
    ASSERT_TRUE(make(Connect(end_ms, "coordinator"), job, true).ok());
  }
  const std::shared_ptr<grpc::Channel> trainer =
      Connect(end_ms, "trainer/n1/3f2a9c01-0000-4000-8000-000000000000");
  const grpc::Status own = make(trainer, "team/job/step-0000000020.e7.a1.3f2a9c01.tmp", false);
  EXPECT_TRUE(own.ok()) << own.error_message();
  const grpc::Status other = make(trainer, "team/other/step-0000000020.e7.a1.3f2a9c02.tmp", false);
  EXPECT_EQ(other.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(other.error_message(), HasSubstr("its certificate is of another job"));
  EXPECT_EQ(make(trainer, "team/third", false).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  ASSERT_EQ(trust_->Keep({{.owner = "node/n1", .serial_prefix = Hex(kEnrolment), .revoked_ms = 1}}),
            absl::OkStatus());
  const grpc::Status revoked = Ask(*v1::Store::NewStub(trainer));
  EXPECT_EQ(revoked.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(revoked.error_message(), HasSubstr("node/n1 was revoked"));
}

}  // namespace
}  // namespace ravel::store_server
