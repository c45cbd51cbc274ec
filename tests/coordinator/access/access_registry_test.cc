#include "coordinator/access/access_registry.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include <absl/strings/match.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/file_writer.h"
#include "common/join_token.h"
#include "coordinator/access/cluster_init.h"
#include "coordinator/access/context_file.h"
#include "coordinator/access/store_certificate.h"
#include "tests/testing/fake_clock.h"
#include "tests/testing/process.h"

namespace ravel::coordinator {
namespace {

using testing::FakeClock;
using testing::ReadText;
using testing::ScratchFolder;

constexpr int64_t kHourMs = 3600'000;
const Asker kAdmin{.who = "user/admin", .peer = "ipv4:10.0.0.9:1", .request_id = "r1"};

class AccessRegistryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::StatusOr<InitResult> made =
        InitCluster({.state_dir = State(), .names = {"localhost", "::1"}}, clock_);
    ASSERT_TRUE(made.ok()) << made.status();
    context_path_ = made->context_path;
    Open();
  }
  void Open() {
    registry_.reset();
    absl::StatusOr<AuthorityFiles> files = LoadAuthorityFiles(State());
    ASSERT_TRUE(files.ok()) << files.status();
    auto registry = AccessRegistry::Open(State(), *files, &clock_, {});
    ASSERT_TRUE(registry.ok()) << registry.status();
    registry_ = *std::move(registry);
  }
  std::string State() const { return scratch_.path() + "/state"; }

  std::string Token(const TokenOrder& order) {
    const absl::StatusOr<std::string> token = registry_->MakeToken(order, kAdmin);
    EXPECT_TRUE(token.ok()) << token.status();
    return token.ok() ? ParseJoinToken(*token)->secret : "";
  }
  absl::StatusOr<Enrolment> Enrol(const std::string& secret, const std::string& node = "") {
    return registry_->Enrol(secret, node, *MakeCertificateRequest(MakePrivateKey()), "peer");
  }
  absl::StatusOr<Identity> Identify(const Enrolment& enrolment) {
    return registry_->Identify(*ReadCertificate(enrolment.certificate));
  }

  ScratchFolder scratch_;
  FakeClock clock_;
  std::string context_path_;
  std::unique_ptr<AccessRegistry> registry_;
};

TEST_F(AccessRegistryTest, TheFirstAdministratorIsKnown) {
  const absl::StatusOr<ContextFile> context = ReadContext(context_path_);
  ASSERT_TRUE(context.ok()) << context.status();
  EXPECT_EQ(context->coordinator, "localhost:7070");
  const absl::StatusOr<Identity> admin =
      registry_->Identify(*ReadCertificate(context->certificate));
  ASSERT_TRUE(admin.ok()) << admin.status();
  EXPECT_EQ(admin->Text(), "user/admin");
  EXPECT_EQ(admin->role, Role::kAdmin);
}

TEST_F(AccessRegistryTest, AnAuthorityIsMadeOnce) {
  const std::string before = ReadText(State() + "/tls/ca.pem");
  const absl::StatusOr<InitResult> again =
      InitCluster({.state_dir = State(), .names = {"localhost"}}, clock_);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReadText(State() + "/tls/ca.pem"), before);
}

// A folder with the files of an authority, as cert-manager has them.
std::string AuthorityFolder(const std::string& folder, const Authority& authority) {
  std::filesystem::create_directories(folder);
  EXPECT_TRUE(
      WriteFileAtomically(folder + "/tls.crt", authority.certificate, FileAccess::kOwner).ok());
  EXPECT_TRUE(WriteFileAtomically(folder + "/tls.key", authority.key, FileAccess::kOwner).ok());
  return folder;
}

TEST_F(AccessRegistryTest, ANewClusterTakesATokenThatWasMadeBeforeIt) {
  const int64_t now_ms = clock_.WallMs();
  const absl::StatusOr<Authority> authority =
      MakeAuthority("elsewhere", now_ms - kHourMs, now_ms + 24 * kHourMs);
  ASSERT_TRUE(authority.ok()) << authority.status();
  const std::string secret(40, 'a');
  const std::string token_path = scratch_.path() + "/token";
  const auto write = [&](const std::string& fingerprint) {
    ASSERT_TRUE(WriteFileAtomically(
                    token_path, FormatJoinToken({fingerprint, secret}) + "\n", FileAccess::kOwner)
                    .ok());
  };
  write(ReadCertificate(authority->certificate)->fingerprint);
  InitOrder order{.state_dir = scratch_.path() + "/another",
                  .names = {"localhost"},
                  .authority = {.folder = AuthorityFolder(scratch_.path() + "/ca", *authority)},
                  .node_token = {.path = token_path, .uses = 2, .ttl = "1h"}};
  const auto refused = [&](InitOrder wrong, const std::string& flag) {
    const absl::Status status = InitCluster(wrong, clock_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << flag;
    EXPECT_TRUE(absl::StartsWith(status.message(), flag)) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), secret));
    EXPECT_FALSE(std::filesystem::exists(order.state_dir));
  };
  InitOrder wrong = order;
  wrong.node_token.ttl = "8d";
  refused(wrong, "--node-token-ttl");
  wrong = order;
  wrong.node_token.uses = 0;
  refused(wrong, "--node-token-uses");
  wrong = order;
  wrong.authority = {};
  refused(wrong, "--node-token: needs --authority");
  write(std::string(64, 'b'));
  refused(order, "--node-token: has the fingerprint bbbb");

  write(ReadCertificate(authority->certificate)->fingerprint);
  ASSERT_TRUE(InitCluster(order, clock_).ok());
  auto registry =
      AccessRegistry::Open(order.state_dir, *LoadAuthorityFiles(order.state_dir), &clock_, {});
  ASSERT_TRUE(registry.ok()) << registry.status();
  const auto enrol = [&](const std::string& node) {
    return (*registry)
        ->Enrol(secret, node, *MakeCertificateRequest(MakePrivateKey()), "peer")
        .status()
        .code();
  };
  EXPECT_EQ(enrol("n1"), absl::StatusCode::kOk);
  clock_.AdvanceMs(kHourMs - 1000);
  EXPECT_EQ(enrol("n2"), absl::StatusCode::kOk);
  EXPECT_NE(enrol("n3"), absl::StatusCode::kOk) << "it was good for two";
}

TEST_F(AccessRegistryTest, KeysAreTheirOwnersAlone) {
  struct stat facts = {};
  for (const auto& entry : std::filesystem::directory_iterator(State() + "/tls")) {
    ASSERT_EQ(stat(entry.path().c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600u) << entry.path();
  }
  ASSERT_EQ(stat((State() + "/tls").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  for (const std::string& path : {State() + "/access.db", context_path_}) {
    ASSERT_EQ(stat(path.c_str(), &facts), 0) << path;
    EXPECT_EQ(facts.st_mode & 0777, 0600u) << path;
  }
  std::filesystem::permissions(context_path_, std::filesystem::perms(0644));
  EXPECT_EQ(ReadContext(context_path_).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AccessRegistryTest, ATokenAdmitsAsOftenAsItSaysAndSurvivesARestart) {
  const std::string secret = Token({.uses = 2});
  ASSERT_TRUE(Enrol(secret, "n1").ok());
  Open();
  const absl::StatusOr<Enrolment> second = Enrol(secret, "n2");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(Identify(*second)->Text(), "node/n2");
  EXPECT_EQ(Enrol(secret, "n3").status().code(), absl::StatusCode::kUnauthenticated);
  Open();
  EXPECT_EQ(Enrol(secret, "n3").status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessRegistryTest, SecretsAreNotKept) {
  const std::string secret = Token({});
  registry_.reset();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(State())) {
    if (entry.is_regular_file()) {
      EXPECT_FALSE(absl::StrContains(ReadText(entry.path()), secret)) << entry.path();
    }
  }
}

TEST_F(AccessRegistryTest, TokensThatAreOldOrUnknownGetOneAnswer) {
  const std::string secret = Token({.ttl_ms = kHourMs});
  const absl::Status unknown = Enrol(std::string(40, '0'), "n1").status();
  clock_.AdvanceMs(kHourMs + 1);
  const absl::Status expired = Enrol(secret, "n1").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(expired, unknown);
}

TEST_F(AccessRegistryTest, ATokenDoesNotTakeALivingNodesName) {
  const std::string secret = Token({.uses = 3});
  const absl::StatusOr<Enrolment> first = Enrol(secret, "n1");
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Enrol(secret, "n1").status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Identify(*first).ok());
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", kAdmin).ok());
  const absl::StatusOr<Enrolment> second = Enrol(secret, "n1");
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(Identify(*second).ok());
  // The name is good again; the first certificate is not.
  EXPECT_EQ(Identify(*first).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessRegistryTest, ATokenOfANameIsForThatNameAlone) {
  const std::string secret = Token({.name = "n1"});
  EXPECT_EQ(Enrol(secret, "n2").status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(Enrol(secret, "n1").ok());
}

TEST_F(AccessRegistryTest, ABadRequestDoesNotSpendTheToken) {
  const std::string secret = Token({});
  EXPECT_EQ(registry_->Enrol(secret, "n1", "no request", "peer").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Enrol(secret, "../n1").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Enrol(secret, "n1").ok());
}

TEST_F(AccessRegistryTest, RevocationEndsCertificatesTokensAndCalls) {
  std::optional<std::string> ended;
  registry_->OnRevoked([&ended](const std::string& identity) { ended = identity; });
  const TokenOrder alice{.kind = IdentityKind::kUser, .name = "alice", .role = Role::kViewer};
  const absl::StatusOr<Enrolment> enrolment = Enrol(Token(alice));
  ASSERT_TRUE(enrolment.ok()) << enrolment.status();
  const absl::StatusOr<Identity> caller = Identify(*enrolment);
  ASSERT_TRUE(caller.ok());
  const std::string waiting = Token(alice);
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kUser, "alice", kAdmin).ok());
  EXPECT_EQ(ended, "user/alice");
  for (int restarts = 0; restarts < 2; ++restarts) {
    EXPECT_EQ(Identify(*enrolment).status().code(), absl::StatusCode::kUnauthenticated);
    EXPECT_EQ(Enrol(waiting).status().code(), absl::StatusCode::kUnauthenticated);
    EXPECT_EQ(registry_->Renew(*caller, *MakeCertificateRequest(MakePrivateKey()), kAdmin)
                  .status()
                  .code(),
              absl::StatusCode::kUnauthenticated);
    Open();
  }
  EXPECT_EQ(registry_->Revoke(IdentityKind::kUser, "alice", kAdmin).code(),
            absl::StatusCode::kNotFound);
}

TEST_F(AccessRegistryTest, TrustNamesEnrolmentsThatEndedAndOutlivesARestart) {
  const auto is_ended = [this](const Enrolment& enrolment) {
    const std::string serial = ReadCertificate(enrolment.certificate)->serial;
    const std::shared_ptr<const Trust> trust = registry_->trust();
    return std::any_of(trust->ended.begin(), trust->ended.end(), [&](const auto& ended) {
      return absl::StartsWith(serial, ended.enrolment);
    });
  };
  const TokenOrder alice{.kind = IdentityKind::kUser, .name = "alice", .role = Role::kViewer};
  const std::string before = registry_->trust()->version;
  const std::string nodes = Token({.uses = 3});
  const absl::StatusOr<Enrolment> node = Enrol(nodes, "n1");
  const absl::StatusOr<Enrolment> other = Enrol(nodes, "n2");
  const absl::StatusOr<Enrolment> user = Enrol(Token(alice));
  EXPECT_EQ(registry_->trust()->version, before) << "nobody is refused so far";
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", kAdmin).ok());
  const std::string revoked = registry_->trust()->version;
  EXPECT_NE(revoked, before);
  const absl::StatusOr<Enrolment> again = Enrol(nodes, "n1");
  EXPECT_EQ(registry_->trust()->version, revoked);
  const absl::StatusOr<Enrolment> anew = Enrol(Token(alice));
  const std::string replaced = registry_->trust()->version;
  EXPECT_NE(replaced, revoked);
  for (int restarts = 0; restarts < 2; ++restarts) {
    EXPECT_TRUE(is_ended(*node));
    EXPECT_TRUE(is_ended(*user)) << "replaced";
    EXPECT_FALSE(is_ended(*other));
    EXPECT_FALSE(is_ended(*again));
    EXPECT_FALSE(is_ended(*anew));
    EXPECT_EQ(registry_->trust()->version, replaced);
    EXPECT_EQ(registry_->trust()->authority, registry_->files().trusted);
    Open();
  }
}

TEST_F(AccessRegistryTest, AnEnrolmentIsForgottenWhenItsLastCertificateHasEnded) {
  const std::string nodes = Token({.uses = 2});
  ASSERT_TRUE(Enrol(nodes, "n1").ok() && Enrol(nodes, "n2").ok());
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", kAdmin).ok());
  clock_.AdvanceMs(91 * 24 * kHourMs);
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n2", kAdmin).ok());
  for (int restarts = 0; restarts < 2; ++restarts) {
    ASSERT_EQ(registry_->trust()->ended.size(), 1u);
    EXPECT_EQ(registry_->trust()->ended[0].name, "n2");
    Open();
  }
}

TEST_F(AccessRegistryTest, AStoreIsKnownByTheAuthorityAloneUntilItsCertificateEnds) {
  const std::string out = scratch_.path() + "/store";
  ASSERT_EQ(
      CertifyStore({.state_dir = State(), .names = {"localhost"}, .output = out}, clock_.WallMs()),
      absl::OkStatus());
  const absl::StatusOr<CertificateFacts> facts =
      ReadCertificate(ReadText(out + "/certificate.pem"));
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_TRUE(facts->is_client);
  EXPECT_FALSE(ReadCertificate(ReadText(registry_->files().ServerPath()))->is_client);
  const absl::StatusOr<Identity> store = registry_->Identify(*facts);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_EQ(store->Text(), "store");
  clock_.AdvanceMs(366 * 24 * kHourMs);
  EXPECT_EQ(registry_->Identify(*facts).status().code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessRegistryTest, NobodyRevokesItself) {
  EXPECT_EQ(registry_->Revoke(IdentityKind::kUser, "admin", kAdmin).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(AccessRegistryTest, ARenewedCertificateOutlivesTheOldOne) {
  const absl::StatusOr<Enrolment> first = Enrol(Token({}), "n1");
  ASSERT_TRUE(first.ok());
  clock_.AdvanceMs(16 * kHourMs);
  const absl::StatusOr<Enrolment> second = registry_->Renew(
      *Identify(*first), *MakeCertificateRequest(MakePrivateKey()), {.who = "node/n1", .peer = ""});
  ASSERT_TRUE(second.ok()) << second.status();
  clock_.AdvanceMs(9 * kHourMs);
  EXPECT_EQ(Identify(*first).status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(Identify(*second).ok());
}

TEST_F(AccessRegistryTest, ATrainersCertificateIsBriefAndStandsAndFallsWithItsNode) {
  const std::string nodes = Token({.uses = 2});
  const absl::StatusOr<Enrolment> node = Enrol(nodes, "n1");
  ASSERT_TRUE(node.ok()) << node.status();
  const absl::StatusOr<Identity> caller = Identify(*node);
  ASSERT_TRUE(caller.ok()) << caller.status();
  const std::string request = *MakeCertificateRequest(MakePrivateKey());
  const Asker asker{.who = "node/n1", .peer = ""};
  const auto certify = [&](const std::string& job) {
    return registry_->CertifyTrainer(*caller, job, request, asker);
  };
  const absl::StatusOr<Enrolment> trainer = certify("4f-9");
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  EXPECT_THAT(trainer->uri, ::testing::EndsWith(".ravel/trainer/n1/4f-9"));
  EXPECT_EQ(trainer->authority, registry_->files().trusted);
  const absl::StatusOr<Identity> identity = Identify(*trainer);
  ASSERT_TRUE(identity.ok()) << identity.status();
  EXPECT_EQ(identity->Text(), "trainer/n1/4f-9");
  EXPECT_EQ(identity->not_after_ms / 1000, (clock_.WallMs() + 6 * kHourMs) / 1000);
  EXPECT_FALSE(CheckMethod(*identity, "/ravel.v1.Fleet/Connect").ok());
  for (const char* bad : {"", "a/b", "../a"}) {
    EXPECT_EQ(certify(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(registry_->CertifyTrainer(*identity, "4f-9", request, asker).status().code(),
            absl::StatusCode::kPermissionDenied);
  const absl::StatusOr<std::vector<AuditRow>> rows = registry_->Audit(0, 1000);
  EXPECT_TRUE(std::any_of(rows->begin(), rows->end(), [](const AuditRow& row) {
    return row.who == "node/n1" && row.verb == "Access.CertifyTrainer" &&
           row.object == "trainer/n1/4f-9" && row.result == "OK";
  }));
  // Its node's end is its own: stores tell enrolments by the beginning of the serial.
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", kAdmin).ok());
  EXPECT_THAT(std::string(Identify(*trainer).status().message()), ::testing::HasSubstr("revoked"));
  EXPECT_EQ(certify("4f-9").status().code(), absl::StatusCode::kUnauthenticated);
  const std::shared_ptr<const Trust> trust = registry_->trust();
  ASSERT_EQ(trust->ended.size(), 1u);
  EXPECT_TRUE(
      absl::StartsWith(ReadCertificate(trainer->certificate)->serial, trust->ended[0].enrolment));
  ASSERT_TRUE(Enrol(nodes, "n1").ok());
  EXPECT_FALSE(Identify(*trainer).ok()) << "of an enrolment that was replaced";
}

TEST_F(AccessRegistryTest, OrdersOutOfBoundsAreRefused) {
  for (const TokenOrder& bad : {TokenOrder{.uses = 0},
                                TokenOrder{.uses = 10'001},
                                TokenOrder{.name = "n1", .uses = 2},
                                TokenOrder{.ttl_ms = 0},
                                TokenOrder{.ttl_ms = 8 * 24 * kHourMs},
                                TokenOrder{.name = "a/b"},
                                TokenOrder{.kind = IdentityKind::kUser, .role = Role::kViewer},
                                TokenOrder{.kind = IdentityKind::kUser,
                                .name = "x",
                                .role = Role::kAdmin,
                                .namespace_name = "team"}}) {
    EXPECT_EQ(registry_->MakeToken(bad, kAdmin).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(AccessRegistryTest, ChangesAndRefusalsAreOnRecord) {
  ASSERT_TRUE(Enrol(Token({}), "n1").ok());
  registry_->audit().Record({.who = "user/eve", .verb = "Jobs.SubmitJob", .result = "X"});
  ASSERT_TRUE(registry_->Revoke(IdentityKind::kNode, "n1", kAdmin).ok());
  const absl::StatusOr<std::vector<AuditRow>> rows = registry_->Audit(0, 100);
  ASSERT_TRUE(rows.ok()) << rows.status();
  std::vector<std::string> verbs;
  for (const AuditRow& row : *rows) {
    verbs.push_back(row.who + " " + row.verb);
  }
  std::sort(verbs.begin(), verbs.end());
  EXPECT_EQ(verbs,
            (std::vector<std::string>{"init Access.Enrol",
                                      "node/n1 Access.Enrol",
                                      "user/admin Access.CreateToken",
                                      "user/admin Access.Revoke",
                                      "user/eve Jobs.SubmitJob"}));
}

TEST_F(AccessRegistryTest, StrangersDoNotFillTheLog) {
  for (int i = 0; i < 500; ++i) {
    registry_->audit().Record({.who = "anonymous", .verb = "Jobs.GetJob", .result = "X"});
  }
  registry_->audit().Record({.who = "user/admin", .verb = "Jobs.CancelJob", .result = "OK"});
  const absl::StatusOr<std::vector<AuditRow>> rows = registry_->Audit(0, 1000);
  ASSERT_TRUE(rows.ok());
  EXPECT_LE(rows->size(), static_cast<size_t>(2 * AuditLog::kMaxAnonymous + 2));
  EXPECT_TRUE(absl::StrContains(rows->back().message, "left out")) << rows->back().message;
}

TEST_F(AccessRegistryTest, TheServersCertificateIsRenewedInTime) {
  const AuthorityFiles files = registry_->files();
  const std::string before = ReadText(files.ServerPath());
  absl::StatusOr<bool> renewed = RenewServerCertificate(files, clock_.WallMs());
  ASSERT_TRUE(renewed.ok()) << renewed.status();
  EXPECT_FALSE(*renewed);
  clock_.AdvanceMs(61 * 24 * kHourMs);
  renewed = RenewServerCertificate(files, clock_.WallMs());
  ASSERT_TRUE(renewed.ok() && *renewed) << renewed.status();
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(ReadText(files.ServerPath()));
  EXPECT_NE(ReadText(files.ServerPath()), before);
  EXPECT_EQ(facts->names, (std::vector<std::string>{"localhost", "::1"}));
  EXPECT_TRUE(CheckKeyPair(ReadText(files.ServerPath()), ReadText(files.ServerKeyPath())).ok());
}

TEST_F(AccessRegistryTest, AnAuthorityIsRotatedInTwoSteps) {
  const AuthorityFiles before = registry_->files();
  const std::string state = before.folder.substr(0, before.folder.rfind('/'));
  EXPECT_TRUE(absl::IsFailedPrecondition(FinishRotation(state, clock_.WallMs(), true)));
  EXPECT_FALSE(*registry_->ReloadAuthority());
  ASSERT_TRUE(BeginRotation(state, clock_.WallMs()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(BeginRotation(state, clock_.WallMs())));
  ASSERT_TRUE(*registry_->ReloadAuthority());
  EXPECT_EQ(registry_->trust()->authority, registry_->files().trusted);

  const AuthorityFiles between = registry_->files();
  EXPECT_TRUE(between.rotating);
  EXPECT_EQ(between.cluster, before.cluster);
  EXPECT_EQ(between.fingerprint, before.fingerprint) << "newcomers meet the old one";
  EXPECT_NE(between.authority.certificate, before.authority.certificate);
  EXPECT_EQ(between.server_signer.certificate, before.authority.certificate);
  EXPECT_EQ(SplitCertificates(between.trusted).size(), 2u);
  EXPECT_EQ(SplitCertificates(ReadText(between.ServerPath())).back(),
            SplitCertificates(before.authority.certificate).front());

  const absl::Status early = FinishRotation(state, clock_.WallMs(), false);
  EXPECT_TRUE(absl::IsFailedPrecondition(early));
  EXPECT_TRUE(absl::StrContains(early.message(), "must enrol again")) << early;
  clock_.AdvanceMs(91 * 24 * kHourMs);
  ASSERT_EQ(FinishRotation(state, clock_.WallMs(), false), absl::OkStatus());
  ASSERT_TRUE(*registry_->ReloadAuthority());
  const AuthorityFiles after = registry_->files();
  EXPECT_FALSE(after.rotating);
  EXPECT_EQ(after.authority.certificate, between.authority.certificate);
  EXPECT_NE(after.fingerprint, before.fingerprint);
  EXPECT_EQ(SplitCertificates(after.trusted).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(after.OldCaKeyPath()));
  const absl::StatusOr<CertificateFacts> server = ReadCertificate(ReadText(after.ServerPath()));
  EXPECT_EQ(server->names, (std::vector<std::string>{"localhost", "::1"}));
  for (const auto& entry : std::filesystem::directory_iterator(state)) {
    EXPECT_EQ(entry.path().string().find(".part-"), std::string::npos) << entry.path();
  }
}

}  // namespace
}  // namespace ravel::coordinator
