// The store's calls to a coordinator that revokes, rotates its authority, goes away and lies.

#include "worker/store/trust_client.h"

#include <filesystem>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/file_writer.h"
#include "tests/testing/eventually.h"

namespace ravel::store_server {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Eventually;
using ::testing::HasSubstr;

constexpr int64_t kHourMs = 3600'000;
constexpr char kSerialOfNode[] = "4100000000000001ffffffffffffffff";

// Answers as it is told to.
class FakeAccess final : public v1::Access::Service {
 public:
  grpc::Status GetTrust(grpc::ServerContext* /*context*/,
                        const v1::GetTrustRequest* request,
                        v1::GetTrustResponse* response) override {
    const MutexLock lock(mutex_);
    ++calls_;
    if (request->version() == answer_.version()) {
      response->set_version(answer_.version());
      response->set_unchanged(true);
    } else {
      *response = answer_;
      ++answers_;
    }
    return grpc::Status::OK;
  }
  void Answer(const v1::GetTrustResponse& answer) {
    const MutexLock lock(mutex_);
    answer_ = answer;
  }
  int calls() const {
    const MutexLock lock(mutex_);
    return calls_;
  }
  int answers() const {
    const MutexLock lock(mutex_);
    return answers_;
  }

 private:
  mutable Mutex mutex_;
  v1::GetTrustResponse answer_ ABSL_GUARDED_BY(mutex_);
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
  int answers_ ABSL_GUARDED_BY(mutex_) = 0;  // those with all of it
};

class TrustClientTest : public ::testing::Test {
 protected:
  TrustClientTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("ravel-trust-client-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(Identity());
  }
  ~TrustClientTest() override {
    StopServer();
    std::filesystem::remove_all(folder_);
  }
  void SetUp() override {
    WriteIdentity(CertificateUse::kServerAndClient);
    answer_.set_version("v1");
    answer_.set_authority(authority_.certificate);
    access_.Answer(answer_);
    StartServer();
    book_ = *TrustBook::Open(Book());
  }

  std::string Identity() const { return folder_ + "/identity"; }
  std::string Book() const { return folder_ + "/trust.json"; }
  std::string Read(const std::string& name) const {
    return *ReadWholeFile(Identity() + "/" + name, 1 << 20);
  }
  std::string Issue(const std::string& key, const std::string& name, CertificateUse use) const {
    const int64_t now_ms = SystemClock::Get().WallMs();
    return *IssueCertificate(authority_,
                             *MakeCertificateRequest(key),
                             {.uri = "spiffe://c1.ravel/" + name,
                              .serial = "\x01" + std::string(15, 'x'),
                              .names = {"127.0.0.1"},
                              .use = use,
                              .not_before_ms = now_ms - kHourMs,
                              .not_after_ms = now_ms + kHourMs});
  }
  void WriteIdentity(CertificateUse use) const {
    const std::string key = MakePrivateKey();
    for (const auto& [name, text] : {std::pair("authority.pem", authority_.certificate),
                                     std::pair("certificate.pem", Issue(key, "store", use)),
                                     std::pair("key.pem", key)}) {
      ASSERT_TRUE(WriteFileAtomically(Identity() + "/" + name, text, FileAccess::kOwner).ok());
    }
  }
  // On the same port each time.
  void StartServer() {
    const std::string key = MakePrivateKey();
    grpc::SslServerCredentialsOptions options(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = authority_.certificate;
    options.pem_key_cert_pairs.push_back(
        {.private_key = key, .cert_chain = Issue(key, "coordinator", CertificateUse::kServer)});
    grpc::ServerBuilder builder;
    builder.AddListeningPort(
        absl::StrCat("127.0.0.1:", port_), grpc::SslServerCredentials(options), &port_);
    builder.RegisterService(&access_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void StopServer() {
    if (server_ != nullptr) {
      server_->Shutdown(std::chrono::system_clock::now());
      server_->Wait();
      server_.reset();
    }
  }
  absl::StatusOr<std::unique_ptr<TrustClient>> Start() {
    return TrustClient::Start({.coordinator = absl::StrCat("127.0.0.1:", port_),
                               .identity_folder = Identity(),
                               .interval = milliseconds(20),
                               .deadline = seconds(5)},
                              book_.get());
  }
  void Revoke(const std::string& version) {
    v1::RevokedEnrolment& revoked = *answer_.add_revoked();
    revoked.set_kind(v1::NODE);
    revoked.set_name("n1");
    revoked.set_serial_prefix("4100000000000001");
    answer_.set_version(version);
    access_.Answer(answer_);
  }
  bool IsRefused() const { return absl::IsPermissionDenied(book_->Check(kSerialOfNode)); }

  const std::string folder_;
  const Authority authority_ = *MakeAuthority(
      "c1", SystemClock::Get().WallMs() - kHourMs, SystemClock::Get().WallMs() + kHourMs);
  v1::GetTrustResponse answer_;
  FakeAccess access_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<TrustBook> book_;
};

TEST_F(TrustClientTest, ARevocationHoldsBeforeAndAfterTheCoordinatorIsAway) {
  auto client = Start();
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(access_.calls(), 1) << "asked before it serves";
  EXPECT_GT(book_->heard_ms(), 0);
  EXPECT_FALSE(IsRefused());
  Revoke("v2");
  EXPECT_TRUE(Eventually(seconds(20), [&] { return IsRefused(); }));
  StopServer();
  EXPECT_TRUE(IsRefused());
  client->reset();
  book_ = *TrustBook::Open(Book());
  EXPECT_TRUE(IsRefused()) << "kept over a restart";
  StartServer();
  client = Start();
  ASSERT_TRUE(client.ok()) << client.status();
  answer_.clear_revoked();
  answer_.set_version("v3");
  access_.Answer(answer_);
  EXPECT_TRUE(Eventually(seconds(20), [&] { return !IsRefused(); }));
}

TEST_F(TrustClientTest, KeysOfTokensComeWithTheAnswer) {
  const auto client = Start();
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE(book_->job_keys().empty());
  answer_.add_job_keys(std::string(32, '\xfe'));
  answer_.set_version("v2");
  access_.Answer(answer_);
  EXPECT_TRUE(Eventually(seconds(20), [&] { return book_->job_keys().size() == 1; }));
  EXPECT_EQ(book_->job_keys()[0], std::string(32, '\xfe'));
}

TEST_F(TrustClientTest, WhatHasNotChangedIsToldOnce) {
  const auto client = Start();
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Eventually(seconds(20), [&] { return access_.calls() > 5; }));
  EXPECT_EQ(access_.answers(), 1);
}

TEST_F(TrustClientTest, ARotationReachesTheIdentitysFolder) {
  const auto client = Start();
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(Read("authority.pem"), authority_.certificate);
  const int64_t now_ms = SystemClock::Get().WallMs();
  const std::string both = absl::StrCat(
      MakeAuthority("c1", now_ms - kHourMs, now_ms + kHourMs)->certificate, authority_.certificate);
  answer_.set_authority(both);
  answer_.set_version("v2");
  access_.Answer(answer_);
  EXPECT_TRUE(Eventually(seconds(20), [&] { return Read("authority.pem") == both; }));
  // It goes on with the new bundle.
  Revoke("v3");
  EXPECT_TRUE(Eventually(seconds(20), [&] { return IsRefused(); }));
}

TEST_F(TrustClientTest, AnAnswerThatIsNoneChangesNothing) {
  const auto client = Start();
  Revoke("v2");
  ASSERT_TRUE(Eventually(seconds(20), [&] { return IsRefused(); }));
  v1::GetTrustResponse bad = answer_;
  bad.set_version("v3");
  bad.set_authority("no certificate");
  bad.clear_revoked();
  access_.Answer(bad);
  int seen = access_.answers();
  ASSERT_TRUE(Eventually(seconds(20), [&] { return access_.answers() > seen + 1; }));
  bad = answer_;
  bad.set_version("v4");
  bad.mutable_revoked(0)->set_serial_prefix("41");
  access_.Answer(bad);
  seen = access_.answers();
  ASSERT_TRUE(Eventually(seconds(20), [&] { return access_.answers() > seen + 1; }));
  EXPECT_TRUE(IsRefused());
  EXPECT_EQ(Read("authority.pem"), authority_.certificate);
}

TEST_F(TrustClientTest, ACertificateOfAServerAloneIsRefusedAtTheStart) {
  WriteIdentity(CertificateUse::kServer);
  const absl::Status refused = Start().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("certify-store"));
}

}  // namespace
}  // namespace ravel::store_server
