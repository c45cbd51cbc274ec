// The gate before every call, over real connections: whoever has no certificate of this cluster, or
// one that is no good any more, gets nowhere, whatever the method.

#include "coordinator/api/access_gate_service.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <gtest/gtest.h>

#include "common/join_token.h"
#include "coordinator/access/cluster_init.h"
#include "coordinator/access/store_certificate.h"
#include "coordinator/api/access_service.h"
#include "coordinator/api/jobs_service.h"
#include "proto/fleet.pb.h"
#include "proto/jobs.grpc.pb.h"
#include "tests/testing/eventually.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

using ravel::testing::Eventually;
using ::testing::HasSubstr;

std::vector<std::string> AllMethods() {
  std::vector<std::string> methods;
  for (const auto* file : {v1::SubmitJobRequest::descriptor()->file(),
                           v1::Hello::descriptor()->file(),
                           v1::EnrolRequest::descriptor()->file()}) {
    for (int i = 0; i < file->service_count(); ++i) {
      for (int j = 0; j < file->service(i)->method_count(); ++j) {
        methods.push_back(absl::StrCat(
            "/", file->service(i)->full_name(), "/", file->service(i)->method(j)->name()));
      }
    }
  }
  methods.push_back("/ravel.v1.Jobs/NoSuchCall");
  return methods;
}

class AccessGateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string state = scratch_.path() + "/state";
    ASSERT_TRUE(InitCluster({.state_dir = state, .names = {"127.0.0.1"}}, SystemClock::Get()).ok());
    absl::StatusOr<AuthorityFiles> files = LoadAuthorityFiles(state);
    ASSERT_TRUE(files.ok()) << files.status();
    auto opened = AccessRegistry::Open(state, *files, &SystemClock::Get(), {});
    ASSERT_TRUE(opened.ok()) << opened.status();
    registry_ = *std::move(opened);
    service_ = std::make_unique<AccessService>(registry_.get());
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort(
        "127.0.0.1:0", GateCredentials(registry_.get(), &budget_, &live_), &port_);
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> watchers;
    watchers.push_back(CallWatcher(registry_.get(), &live_));
    builder.experimental().SetInterceptorCreators(std::move(watchers));
    builder.RegisterService(service_.get());
    JobsServiceParts jobs;
    jobs.pools = &pools_;
    jobs.access = registry_.get();
    jobs_ = std::make_unique<JobsService>(std::move(jobs));
    builder.RegisterService(jobs_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override {
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server_->Wait();
  }

  std::shared_ptr<grpc::Channel> Open(
      const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port_), credentials, arguments);
  }
  std::shared_ptr<grpc::Channel> Tls(const std::string& certificate, const std::string& key) {
    return Open(grpc::SslCredentials({.pem_root_certs = registry_->files().authority.certificate,
                                      .pem_private_key = key,
                                      .pem_cert_chain = certificate}));
  }
  static grpc::Status Call(const std::shared_ptr<grpc::Channel>& channel,
                           const std::string& method) {
    grpc::GenericStub stub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    grpc::CompletionQueue queue;
    const grpc::ByteBuffer request(nullptr, 0);
    grpc::ByteBuffer response;
    const auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
    call->StartCall();
    grpc::Status status;
    call->Finish(&response, &status, nullptr);
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    queue.Shutdown();
    return status;
  }
  // A channel of a user that has just been enrolled.
  std::shared_ptr<grpc::Channel> Enrolled(const std::string& user,
                                          Role role,
                                          const std::string& namespace_name = "") {
    const std::string token = *registry_->MakeToken(
        {.kind = IdentityKind::kUser, .name = user, .role = role, .namespace_name = namespace_name},
        admin_);
    const absl::StatusOr<Enrolment> enrolment =
        registry_->Enrol(ParseJoinToken(token)->secret, "", *MakeCertificateRequest(key_), "here");
    EXPECT_TRUE(enrolment.ok()) << enrolment.status();
    return enrolment.ok() ? Tls(enrolment->certificate, key_) : nullptr;
  }
  size_t Refusals(const std::string& who, const std::string& result) {
    size_t found = 0;
    const absl::StatusOr<std::vector<AuditRow>> rows = registry_->Audit(0, 1000);
    for (const AuditRow& row : *rows) {
      found += row.who == who && row.result == result ? 1 : 0;
    }
    return found;
  }

  testing::ScratchFolder scratch_;
  std::unique_ptr<AccessRegistry> registry_;
  LiveCalls live_{LiveCallLimits{.of_identity = 3, .of_users = 5, .in_all = 1000}};
  testing::FakeClock clock_;
  CallBudget budget_{clock_, {.per_second = 1, .burst = 20}};
  std::unique_ptr<AccessService> service_;
  WorkPools pools_{WorkPools::Options()};
  std::unique_ptr<JobsService> jobs_;  // refuses, and looks at jobs that nodes need not see
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
  const std::string key_ = MakePrivateKey();
  const Asker admin_{.who = "user/admin", .peer = ""};
};

TEST_F(AccessGateTest, WithoutACertificateOnlyEnrolIsHeard) {
  const std::shared_ptr<grpc::Channel> channel = Tls("", "");
  for (const std::string& method : AllMethods()) {
    const grpc::Status status = Call(channel, method);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method;
    EXPECT_THAT(status.error_message(),
                HasSubstr(method == "/ravel.v1.Access/Enrol" ? "the token" : "client certificate"))
        << method;
  }
  EXPECT_EQ(Refusals("anonymous", "UNAUTHENTICATED"), AllMethods().size());
}

TEST_F(AccessGateTest, CertificatesOfNoUserOrNodeAreNoIdentity) {
  const std::string request = *MakeCertificateRequest(key_);
  const int64_t now_ms = SystemClock::Get().WallMs();
  const CertificateOrder good{
      .uri = UriOf(registry_->files().cluster, IdentityKind::kUser, "admin"),
      .serial = "\x42" + std::string(15, 'x'),
      .not_before_ms = now_ms - 60'000,
      .not_after_ms = now_ms + 600'000};
  // Signed by the right authority, but of no enrolment, of nobody, and of a stranger.
  for (const std::string& uri : {good.uri,
                                 CoordinatorUri(registry_->files().cluster),
                                 std::string("spiffe://other.ravel/user/admin")}) {
    CertificateOrder order = good;
    order.uri = uri;
    const std::string certificate = *IssueCertificate(registry_->files().authority, request, order);
    EXPECT_EQ(Call(Tls(certificate, key_), "/ravel.v1.Access/WhoAmI").error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << uri;
  }
  // Everything right, but signed by another authority of the same name: no connection.
  const Authority other = *MakeAuthority("Ravel cluster", now_ms - 60'000, now_ms + 600'000);
  EXPECT_EQ(Call(Tls(*IssueCertificate(other, request, good), key_), "/ravel.v1.Access/WhoAmI")
                .error_code(),
            grpc::StatusCode::UNAVAILABLE);
  // Expired: none either.
  CertificateOrder old = good;
  old.not_after_ms = now_ms - 30'000;
  EXPECT_EQ(Call(Tls(*IssueCertificate(registry_->files().authority, request, old), key_),
                 "/ravel.v1.Access/WhoAmI")
                .error_code(),
            grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Call(Open(grpc::InsecureChannelCredentials()), "/ravel.v1.Access/WhoAmI").error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(AccessGateTest, AnOpenConnectionDoesNotOutliveItsIdentity) {
  const std::shared_ptr<grpc::Channel> channel = Enrolled("vera", Role::kViewer);
  ASSERT_NE(channel, nullptr);
  EXPECT_TRUE(Call(channel, "/ravel.v1.Access/WhoAmI").ok());
  EXPECT_EQ(Call(channel, "/ravel.v1.Access/CreateToken").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Refusals("user/vera", "PERMISSION_DENIED"), 1u);
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kUser, "vera", admin_).ok());
  const grpc::Status after = Call(channel, "/ravel.v1.Access/WhoAmI");
  EXPECT_EQ(after.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(after.error_message(), HasSubstr("was revoked"));
  EXPECT_EQ(Refusals("user/vera", "UNAUTHENTICATED"), 1u);
}

TEST_F(AccessGateTest, ATrainersCertificateOpensNothingHere) {
  const std::string token = *registry_->MakeToken({}, admin_);
  const absl::StatusOr<Enrolment> node =
      registry_->Enrol(ParseJoinToken(token)->secret, "n1", *MakeCertificateRequest(key_), "here");
  ASSERT_TRUE(node.ok()) << node.status();
  const std::shared_ptr<grpc::Channel> of_node = Tls(node->certificate, key_);
  const std::string key = MakePrivateKey();
  v1::CertifyTrainerRequest request;
  request.set_certificate_request(*MakeCertificateRequest(key));
  request.set_job_uid("4f-9");
  v1::EnrolResponse made;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const grpc::Status certified =
      v1::Access::NewStub(of_node)->CertifyTrainer(&context, request, &made);
  ASSERT_TRUE(certified.ok()) << certified.error_message();
  const std::shared_ptr<grpc::Channel> channel = Tls(made.certificate(), key);
  for (const std::string& method : AllMethods()) {
    if (IsOpenMethod(method)) {
      continue;
    }
    const grpc::Status status = Call(channel, method);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << method;
    EXPECT_THAT(status.error_message(), HasSubstr("trainer/n1/4f-9 is a trainer")) << method;
  }
  EXPECT_GT(Refusals("trainer/n1/4f-9", "PERMISSION_DENIED"), 20u);
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", admin_).ok());
  EXPECT_EQ(Call(channel, "/ravel.v1.Fleet/Connect").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Call(of_node, "/ravel.v1.Access/CertifyTrainer").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(AccessGateTest, AStoreIsToldWhomToRefuseAndOnlyWhatIsNew) {
  const std::string out = scratch_.path() + "/store";
  ASSERT_EQ(
      CertifyStore({.state_dir = scratch_.path() + "/state", .names = {"127.0.0.1"}, .output = out},
                   SystemClock::Get().WallMs()),
      absl::OkStatus());
  const std::shared_ptr<grpc::Channel> channel =
      Tls(testing::ReadText(out + "/certificate.pem"), testing::ReadText(out + "/key.pem"));
  const auto ask = [&channel](const std::string& version) {
    v1::GetTrustRequest request;
    request.set_version(version);
    v1::GetTrustResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    const grpc::Status status =
        v1::Access::NewStub(channel)->GetTrust(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  const v1::GetTrustResponse first = ask("");
  EXPECT_FALSE(first.unchanged());
  EXPECT_EQ(first.revoked_size(), 0);
  EXPECT_EQ(first.authority(), registry_->files().trusted);
  const v1::GetTrustResponse second = ask(first.version());
  EXPECT_TRUE(second.unchanged());
  EXPECT_EQ(second.version(), first.version());
  EXPECT_EQ(second.authority(), "");
  ASSERT_NE(Enrolled("vera", Role::kViewer), nullptr);
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kUser, "vera", admin_).ok());
  const v1::GetTrustResponse third = ask(first.version());
  EXPECT_FALSE(third.unchanged());
  ASSERT_EQ(third.revoked_size(), 1);
  EXPECT_EQ(third.revoked(0).kind(), v1::USER);
  EXPECT_EQ(third.revoked(0).name(), "vera");
  EXPECT_EQ(third.revoked(0).serial_prefix().size(), 16u);
  EXPECT_GT(third.revoked(0).revoked_ms(), 0);
  // A store does nothing else, and who is no store is not told.
  EXPECT_EQ(Call(channel, "/ravel.v1.Access/WhoAmI").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Refusals("store", "PERMISSION_DENIED"), 1u);
  EXPECT_EQ(Call(Enrolled("otto", Role::kOperator), "/ravel.v1.Access/GetTrust").error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_TRUE(Call(Enrolled("root", Role::kAdmin), "/ravel.v1.Access/GetTrust").ok());
}

TEST_F(AccessGateTest, APageOfTheAuditLogHasBounds) {
  const std::shared_ptr<grpc::Channel> root = Enrolled("root", Role::kAdmin);
  const auto ask = [&root](int32_t page_size, v1::ListAuditResponse* response) {
    v1::ListAuditRequest request;
    request.set_page_size(page_size);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return v1::Access::NewStub(root)->ListAudit(&context, request, response);
  };
  for (const int32_t wrong : {-1, 1001, INT32_MAX}) {
    v1::ListAuditResponse none;
    const grpc::Status refused = ask(wrong, &none);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(refused.error_message(), absl::StrCat("page_size: expected 0 to 1000, got ", wrong));
  }
  v1::ListAuditResponse one;
  ASSERT_TRUE(ask(1, &one).ok());
  EXPECT_EQ(one.records_size(), 1);
  EXPECT_TRUE(one.more());
  v1::ListAuditResponse all;
  ASSERT_TRUE(ask(1000, &all).ok());
  EXPECT_GT(all.records_size(), 1);
  EXPECT_FALSE(all.more());
  v1::ListAuditResponse usual;
  ASSERT_TRUE(ask(0, &usual).ok());
  EXPECT_GE(usual.records_size(), all.records_size());
}

// Nodes tell which secrets a namespace has, and what lies beneath its roots.
TEST_F(AccessGateTest, JobsOfOtherNamespacesAreNotValidated) {
  const std::shared_ptr<grpc::Channel> uma = Enrolled("uma", Role::kUser, "team");
  const auto validate = [](const std::shared_ptr<grpc::Channel>& channel, const char* space) {
    v1::ValidateJobRequest request;
    request.mutable_job()->mutable_metadata()->set_namespace_(space);
    v1::ValidateJobResponse response;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    const grpc::Status status =
        v1::Jobs::NewStub(channel)->ValidateJob(&context, request, &response);
    EXPECT_EQ(status.ok(), response.violations_size() > 0) << "an empty job has faults";
    return status;
  };
  const grpc::Status own = validate(uma, "team");
  EXPECT_TRUE(own.ok()) << own.error_message();
  for (const char* other : {"other", ""}) {
    const grpc::Status refused = validate(uma, other);
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
    EXPECT_THAT(refused.error_message(),
                HasSubstr("user/uma may change jobs of the namespace team only"));
  }
  EXPECT_TRUE(validate(Enrolled("otto", Role::kOperator), "other").ok());
}

TEST_F(AccessGateTest, WhoCallsTooOftenWaitsAndNobodyElse) {
  const std::shared_ptr<grpc::Channel> vera = Enrolled("vera", Role::kViewer);
  const std::shared_ptr<grpc::Channel> otto = Enrolled("otto", Role::kOperator);
  for (int call = 0; call < 20; ++call) {
    ASSERT_TRUE(Call(vera, "/ravel.v1.Access/WhoAmI").ok()) << call;
  }
  const grpc::Status refused = Call(vera, "/ravel.v1.Access/WhoAmI");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("user/vera calls more than 1 times a second"));
  EXPECT_TRUE(Call(otto, "/ravel.v1.Access/WhoAmI").ok());
  clock_.AdvanceMs(1000);
  EXPECT_TRUE(Call(vera, "/ravel.v1.Access/WhoAmI").ok());
  EXPECT_EQ(Refusals("user/vera", "RESOURCE_EXHAUSTED"), 0u) << "they would fill the log";
}

// Calls that stay under way count; nodes have room although users have none.
TEST_F(AccessGateTest, CallsBeyondTheLimitsAreRefusedUntilOthersEnd) {
  const std::shared_ptr<grpc::Channel> channel = Enrolled("busy", Role::kViewer);
  const auto call = [&channel] { return Call(channel, "/ravel.v1.Access/WhoAmI"); };
  EXPECT_NE(call().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  std::vector<LiveCalls::CallId> held;
  for (int i = 0; i < 3; ++i) {
    held.push_back(live_.Add("user/busy", INT64_MAX, [] {}));
  }
  const grpc::Status own = call();
  EXPECT_EQ(own.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(own.error_message(), HasSubstr("user/busy may have 3 calls"));
  live_.Remove(held.back());
  held.pop_back();
  // A call leaves the list a moment after its caller has the answer.
  const auto has_room = [this] { return live_.CheckRoom("user/busy").ok(); };
  ASSERT_TRUE(Eventually(std::chrono::seconds(10), has_room));
  EXPECT_NE(call().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ASSERT_TRUE(Eventually(std::chrono::seconds(10), has_room));
  for (const char* other : {"user/a", "user/b", "user/c"}) {
    held.push_back(live_.Add(other, INT64_MAX, [] {}));
  }
  EXPECT_THAT(call().error_message(), HasSubstr("all users together may have 5 calls"));
  EXPECT_EQ(live_.CheckRoom("node/n1"), absl::OkStatus());
  for (const LiveCalls::CallId id : held) {
    live_.Remove(id);
  }
  EXPECT_NE(call().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(AccessGateTest, HealthIsToldToAnybodyButWatchedByIdentitiesAlone) {
  const std::shared_ptr<grpc::Channel> stranger = Tls("", "");
  const grpc::Status health = Call(stranger, "/grpc.health.v1.Health/Check");
  EXPECT_TRUE(health.ok()) << health.error_message();
  EXPECT_EQ(Call(stranger, "/grpc.health.v1.Health/Watch").error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(Refusals("anonymous", "OK"), 0u) << "a probe is no change";
}

}  // namespace
}  // namespace ravel::coordinator
