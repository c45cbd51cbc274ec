// Who may speak to a coordinator: everything that must be refused is, with the right code and a
// record of it, and changes nothing; what was allowed ends when it is revoked.

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/eventually.h"
#include "tests/testing/mini_cluster.h"
#include "tests/testing/secure_cluster.h"
#include "tests/testing/store_process.h"

namespace ravel::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

// Exit codes of ravelctl.
constexpr int kNotAllowed = 5;
constexpr int kUnreachable = 6;
constexpr int kDoNotRestart = 93;  // of ravel-worker

class IdentitiesTest : public ::testing::Test {
 protected:
  void Start(const SecureOptions& options = {}) {
    absl::StatusOr<std::unique_ptr<SecureCluster>> started = SecureCluster::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    cluster_ = *std::move(started);
    WriteTokens(cluster_->folder() + "/tokens.bin", 20000, TinyJob().vocabulary);
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) {
      ADD_FAILURE() << cluster_->Report();
    }
  }
  void LogIn(const std::string& user,
             const std::string& role,
             const std::string& space = "default") {
    const RunResult result = cluster_->LogIn(
        user, cluster_->Token({"user", user, "--role", role, "--namespace", space}));
    ASSERT_EQ(result.exit_code, 0) << result.err;
  }
  TinyJob Job(const std::string& name) const {
    return {.name = name,
            .tokens_path = cluster_->folder() + "/tokens.bin",
            .store = cluster_->folder() + "/store",
            .workers = 1,
            .steps = 4,
            .save_every_steps = 2};
  }
  RunResult Submit(const std::string& name,
                   const std::string& user,
                   const std::string& space = "") {
    const std::string path = absl::StrCat(cluster_->folder(), "/", name, ".yaml");
    std::string text = ToYaml(Job(name));
    if (!space.empty()) {
      text = absl::StrReplaceAll(
          text,
          {{absl::StrCat("name: ", name), absl::StrCat("name: ", name, ", namespace: ", space)}});
    }
    WriteText(path, text);
    return cluster_->Ctl({"submit", "-f", path}, user);
  }
  void JoinAndStart(const std::string& node) {
    const RunResult joined = cluster_->Join(node, cluster_->Token({"node"}));
    ASSERT_EQ(joined.exit_code, 0) << joined.err;
    ASSERT_EQ(cluster_->StartWorker(node), absl::OkStatus());
  }

  std::unique_ptr<SecureCluster> cluster_;
};

// The README's five, from empty folders: init, ravel-coordinator, enrol, join, ravel-worker.
TEST_F(IdentitiesTest, FiveCommandsMakeAClusterInSeconds) {
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  const double taken =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::printf("from nothing to a node that is ready: %.2f s\n", taken);
  RecordProperty("seconds", absl::StrCat(taken));
  EXPECT_LT(taken, 30);
}

TEST_F(IdentitiesTest, AJobRunsFromInitToDoneAndTheRolesHold) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  ASSERT_NO_FATAL_FAILURE(LogIn("vera", "viewer"));
  ASSERT_NO_FATAL_FAILURE(LogIn("uma", "user"));
  ASSERT_NO_FATAL_FAILURE(LogIn("otto", "operator"));

  const RunResult viewer = Submit("a", "vera");
  EXPECT_EQ(viewer.exit_code, kNotAllowed) << viewer.err;
  EXPECT_THAT(viewer.err, HasSubstr("needs the role user"));
  EXPECT_EQ(cluster_->Ctl({"get", "a"}).exit_code, 3) << "a refused submit left a job";
  const RunResult foreign = Submit("b", "uma", "other");
  EXPECT_EQ(foreign.exit_code, kNotAllowed) << foreign.err;
  EXPECT_EQ(cluster_->Ctl({"get", "other/b"}).exit_code, 3);

  ASSERT_EQ(Submit("a", "uma").exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"wait", "a", "--for=done", "--timeout", "60s"}, "vera").exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"delete", "a"}, "vera").exit_code, kNotAllowed);
  EXPECT_EQ(cluster_->Ctl({"nodes", "drain", "n1"}, "uma").exit_code, kNotAllowed);
  EXPECT_EQ(cluster_->Ctl({"nodes", "drain", "n1"}, "otto").exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"enrol", "node"}, "otto").exit_code, kNotAllowed);
  EXPECT_EQ(cluster_->Ctl({"audit"}, "otto").exit_code, kNotAllowed);

  EXPECT_EQ(cluster_->Audited("user/vera", "Jobs.SubmitJob", "PERMISSION_DENIED"), 1);
  EXPECT_EQ(cluster_->Audited("user/uma", "Jobs.SubmitJob", "PERMISSION_DENIED"), 1);
  EXPECT_EQ(cluster_->Audited("user/uma", "Jobs.SubmitJob", "OK"), 1);
  EXPECT_EQ(cluster_->Audited("user/otto", "Jobs.HoldNode", "OK"), 1);
  EXPECT_EQ(cluster_->Audited("user/otto", "Access.ListAudit", "PERMISSION_DENIED"), 1);
  EXPECT_EQ(cluster_->Audited("node/n1", "Access.Enrol", "OK"), 1);
}

TEST_F(IdentitiesTest, TokensThatAreNotGoodAdmitNobody) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string good = cluster_->Token({"node"});
  std::string wrong = good;
  wrong.back() = wrong.back() == '0' ? '1' : '0';
  const RunResult unknown = cluster_->Join("n1", wrong);
  EXPECT_EQ(unknown.exit_code, kDoNotRestart);
  EXPECT_THAT(unknown.err, HasSubstr("unknown, expired or used up"));

  std::string other_cluster = good;
  other_cluster[8] = other_cluster[8] == '0' ? '1' : '0';
  EXPECT_THAT(cluster_->Join("n1", other_cluster).err, HasSubstr("another cluster"));

  const std::string brief = cluster_->Token({"node", "--ttl", "1s"});
  const auto expires = std::chrono::steady_clock::now() + milliseconds(1100);
  Eventually(seconds(5), [&] { return std::chrono::steady_clock::now() > expires; });
  EXPECT_THAT(cluster_->Join("n1", brief).err, HasSubstr("unknown, expired or used up"));

  EXPECT_FALSE(std::filesystem::exists(cluster_->WorkDir("n1") + "/identity"));
  EXPECT_EQ(cluster_->Join("n1", good).exit_code, 0);
  EXPECT_THAT(cluster_->Join("n2", good).err, HasSubstr("unknown, expired or used up"));
  EXPECT_EQ(cluster_->Audited("anonymous", "Access.Enrol", "UNAUTHENTICATED"), 3);
  EXPECT_EQ(cluster_->Audited("", "Access.Enrol", "OK"), 2) << "the administrator's and n1's";
}

TEST_F(IdentitiesTest, APortOfAnotherServerIsNamed) {
  ASSERT_NO_FATAL_FAILURE(Start({.page_tokens = "0123456789abcdef\n"}));
  const std::string identity = cluster_->folder() + "/store-identity";
  ASSERT_EQ(cluster_
                ->Run({BinaryPath("ravel-coordinator"),
                       "certify-store",
                       "--state-dir",
                       cluster_->folder() + "/state",
                       "--name",
                       "127.0.0.1",
                       "--out",
                       identity})
                .exit_code,
            0);
  StoreProcess store(
      {.folder = cluster_->folder() + "/server",
       .flags = {
           "--identity", identity, "--operators", "admin", "--coordinator", cluster_->address()}});
  ASSERT_EQ(store.Start(), absl::OkStatus());
  StoreProcess plain({.folder = cluster_->folder() + "/plain", .flags = {"--dev-loopback"}});
  ASSERT_EQ(plain.Start(), absl::OkStatus());
  const auto address_of = [](const StoreProcess& process) {
    return absl::StrReplaceAll(process.Url(""), {{"ravel://", ""}, {"/", ""}});
  };
  const std::string pages = "127.0.0.1:" + cluster_->http_port();
  const std::string token = cluster_->Token({"node"});
  const auto join = [&](const std::string& address) {
    const RunResult refused = cluster_->Run({BinaryPath("ravel-worker"),
                                             "join",
                                             "--coordinator",
                                             address,
                                             "--work-dir",
                                             cluster_->WorkDir("n1"),
                                             token});
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_THAT(refused.err, HasSubstr(absl::StrCat("coordinator ", address, ": expected a ")));
    return refused.err;
  };
  const auto list = [&](const std::string& address) {
    const RunResult refused = cluster_->Run(
        {BinaryPath("ravelctl"), "--context", "admin", "--coordinator", address, "list"});
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_THAT(refused.err, HasSubstr("expected a ravel-coordinator there, but "));
    return refused.err;
  };
  EXPECT_THAT(join(address_of(store)), HasSubstr("but a ravel-store listens"));
  EXPECT_THAT(list(address_of(store)), HasSubstr("but a ravel-store listens"));
  EXPECT_THAT(join(address_of(plain)), HasSubstr("but it speaks HTTP/2 without TLS"));
  EXPECT_THAT(list(address_of(plain)), HasSubstr("but it speaks HTTP/2 without TLS"));
  EXPECT_THAT(join(pages), HasSubstr("TLS without HTTP/2"));
  EXPECT_THAT(list(pages), HasSubstr("TLS without HTTP/2"));
  const RunResult login = cluster_->Run({BinaryPath("ravelctl"),
                                         "login",
                                         "--coordinator",
                                         address_of(store),
                                         "--context",
                                         "new",
                                         cluster_->Token({"user", "uma", "--role", "user"})});
  EXPECT_NE(login.exit_code, 0);
  EXPECT_THAT(login.err, HasSubstr("but a ravel-store listens"));
  EXPECT_EQ(cluster_->Join("n1", token).exit_code, 0) << "the token is not spent";
}

TEST_F(IdentitiesTest, ANodeSpeaksForItselfAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const std::string token = cluster_->Token({"node", "--uses", "2"});
  ASSERT_EQ(cluster_->Join("n1", token).exit_code, 0);
  ASSERT_EQ(cluster_->Join("n2", token).exit_code, 0);
  ASSERT_EQ(cluster_->StartWorker("n2"), absl::OkStatus());
  ASSERT_TRUE(cluster_->WaitForReady(1));
  // n1's daemon says that it is n2.
  const std::string facts = cluster_->WorkDir("n1") + "/identity/node.json";
  WriteText(facts, absl::StrReplaceAll(ReadText(facts), {{"\"n1\"", "\"n2\""}}));
  std::filesystem::permissions(facts, std::filesystem::perms(0600));
  ASSERT_EQ(cluster_->StartWorker("n1"), absl::OkStatus());
  EXPECT_EQ(cluster_->Worker("n1").Wait(seconds(30)), kDoNotRestart);
  EXPECT_THAT(cluster_->Log("n1"), HasSubstr("may not speak for the node n2"));
  EXPECT_EQ(cluster_->Audited("node/n1", "Fleet.Connect", "PERMISSION_DENIED"), 1);
  EXPECT_TRUE(cluster_->Worker("n2").Running());
  EXPECT_TRUE(cluster_->WaitForReady(1));

  // Its certificate is no user's either.
  const std::string identity = cluster_->WorkDir("n1") + "/identity/";
  const auto quoted = [&](const std::string& file) {
    return absl::StrCat(
        "\"", absl::StrReplaceAll(ReadText(identity + file), {{"\n", "\\n"}}), "\"");
  };
  const std::string context = cluster_->folder() + "/config/contexts/node.json";
  WriteText(context,
            absl::StrCat("{\"coordinator\": \"",
                         cluster_->address(),
                         "\", \"authority\": ",
                         quoted("authority.pem"),
                         ", \"certificate\": ",
                         quoted("certificate.pem"),
                         ", \"key\": ",
                         quoted("key.pem"),
                         "}"));
  std::filesystem::permissions(context, std::filesystem::perms(0600));
  const RunResult as_user = cluster_->Ctl({"list"}, "node");
  EXPECT_EQ(as_user.exit_code, kNotAllowed) << as_user.err;
  EXPECT_THAT(as_user.err, HasSubstr("node/n1 is a node"));
}

TEST_F(IdentitiesTest, RevocationEndsStreamsAndTrainers) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  ASSERT_NO_FATAL_FAILURE(LogIn("vera", "viewer"));
  // A job that waits for more devices than there are: its watch would last for ever.
  WriteText(cluster_->folder() + "/w.yaml", [&] {
    TinyJob job = Job("w");
    job.workers = 2;
    return ToYaml(job);
  }());
  ASSERT_EQ(cluster_->Ctl({"submit", "-f", cluster_->folder() + "/w.yaml"}).exit_code, 0);
  absl::StatusOr<std::unique_ptr<ChildProcess>> watch =
      ChildProcess::Start({.arguments = {BinaryPath("ravelctl"),
                                         "--context",
                                         cluster_->folder() + "/config/contexts/vera.json",
                                         "events",
                                         "w",
                                         "--follow"},
                           .output_path = cluster_->folder() + "/watch.out",
                           .error_path = cluster_->folder() + "/watch.err"});
  ASSERT_TRUE(watch.ok()) << watch.status();
  ASSERT_TRUE(Eventually(seconds(30),
                         [&] { return !ReadText(cluster_->folder() + "/watch.out").empty(); }));
  ASSERT_EQ(cluster_->Ctl({"revoke", "user", "vera"}).exit_code, 0);
  EXPECT_EQ((*watch)->Wait(seconds(30)), kNotAllowed) << "a revoked user still watches";
  const RunResult again = cluster_->Ctl({"list"}, "vera");
  EXPECT_EQ(again.exit_code, kNotAllowed) << again.err;
  EXPECT_THAT(again.err, HasSubstr("user/vera was revoked"));

  ASSERT_EQ(cluster_->Ctl({"revoke", "node", "n1"}).exit_code, 0);
  EXPECT_EQ(cluster_->Worker("n1").Wait(seconds(30)), kDoNotRestart);
  EXPECT_THAT(cluster_->Log("n1"), HasSubstr("certificate was revoked"));
  ASSERT_EQ(cluster_->StartWorker("n1"), absl::OkStatus());
  EXPECT_EQ(cluster_->Worker("n1").Wait(seconds(30)), kDoNotRestart);
  // Refusals are written by a thread of their own: a coordinator that is killed may take some
  // along, one that is asked for its records has written them all.
  EXPECT_EQ(cluster_->Audited("user/vera", "Jobs.ListJobs", "UNAUTHENTICATED"), 1);
  EXPECT_EQ(cluster_->Audited("node/n1", "Fleet.Connect", "UNAUTHENTICATED"), 1);
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  EXPECT_EQ(cluster_->Ctl({"list"}, "vera").exit_code, kNotAllowed) << "forgotten by a restart";
  EXPECT_EQ(cluster_->Audited("user/vera", "Jobs.ListJobs", "UNAUTHENTICATED"), 2);
  EXPECT_EQ(cluster_->Audited("node/n1", "Fleet.Connect", "UNAUTHENTICATED"), 1);
  EXPECT_EQ(cluster_->Audited("user/admin", "Access.Revoke", "OK"), 2);
}

TEST_F(IdentitiesTest, OnlyTlsThatIsNewEnoughIsSpoken) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const RunResult plain =
      cluster_->Run({BinaryPath("ravelctl"), "--coordinator", cluster_->address(), "list"});
  EXPECT_EQ(plain.exit_code, kUnreachable) << plain.err;
  const auto tls = [&](const std::string& version) {
    return cluster_->Run({"/bin/sh",
                          "-c",
                          absl::StrCat("openssl s_client -cipher 'DEFAULT@SECLEVEL=0' -alpn h2 ",
                                       version,
                                       " -CAfile ",
                                       cluster_->folder(),
                                       "/state/tls/ca.pem -verify_return_error -connect ",
                                       cluster_->address(),
                                       " </dev/null 2>&1")});
  };
  const RunResult good = tls("-tls1_2");
  EXPECT_EQ(good.exit_code, 0) << good.out;
  const RunResult old = tls("-tls1_1");
  EXPECT_NE(old.exit_code, 0);
  EXPECT_THAT(old.out, HasSubstr("Cipher is (NONE)"));
  EXPECT_THAT(good.out, HasSubstr("Cipher is ECDHE"));
  // The coordinator of another cluster is not this user's.
  absl::StatusOr<std::unique_ptr<SecureCluster>> other = SecureCluster::Start({});
  ASSERT_TRUE(other.ok()) << other.status();
  const RunResult stranger = cluster_->Run(
      {BinaryPath("ravelctl"), "--context", "admin", "--coordinator", (*other)->address(), "list"});
  EXPECT_EQ(stranger.exit_code, kUnreachable) << stranger.err;
}

TEST_F(IdentitiesTest, PagesBeyondThisHostNeedTlsAndAToken) {
  ASSERT_NO_FATAL_FAILURE(Start({.page_tokens = "0123456789abcdef\n"}));
  const auto get = [&](const std::string& page, const std::string& header) {
    // Sends the request over openssl's own connection, which checks the coordinator's name.
    const RunResult got = cluster_->Run(
        {"/bin/sh",
         "-c",
         absl::StrCat("printf 'GET ",
                      page,
                      " HTTP/1.1\\r\\nHost: x\\r\\n",
                      header,
                      "\\r\\n' | openssl s_client -quiet -verify_return_error -verify_ip 127.0.0.1 "
                      "-CAfile ",
                      cluster_->folder(),
                      "/state/tls/ca.pem -connect 127.0.0.1:",
                      cluster_->http_port(),
                      " 2>/dev/null")});
    return got.out;
  };
  EXPECT_THAT(get("/readyz", ""), HasSubstr("200 OK"));
  EXPECT_THAT(get("/metrics", ""), HasSubstr("401 Unauthorized"));
  EXPECT_THAT(get("/metrics", "Authorization: Bearer 0123456789abcdef\\r\\n"),
              HasSubstr("ravel_build_info"));
  const RunResult refused = cluster_->Run({BinaryPath("ravel-coordinator"),
                                           "--state-dir",
                                           cluster_->folder() + "/state",
                                           "--http-listen",
                                           "0.0.0.0:0"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.err, HasSubstr("--http-token-file"));
}

TEST_F(IdentitiesTest, CertificatesAreRenewedUnderARunningJob) {
  // Renewed at two thirds of that: 4 s remain to do it.
  ASSERT_NO_FATAL_FAILURE(Start({.certificate_time = "12s"}));
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  TinyJob job = Job("a");
  job.steps = 100'000;
  job.save_every_steps = 100'000;
  WriteText(cluster_->folder() + "/a.yaml", ToYaml(job));
  ASSERT_EQ(cluster_->Ctl({"submit", "-f", cluster_->folder() + "/a.yaml"}).exit_code, 0);
  ASSERT_EQ(cluster_->Ctl({"wait", "a", "--for=step=1", "--timeout", "60s"}).exit_code, 0);
  // The first certificate has ended when the second renewal is there.
  ASSERT_TRUE(Eventually(seconds(120),
                         [&] { return cluster_->Audited("node/n1", "Access.Renew", "OK") >= 2; }));
  const RunResult seen = cluster_->Ctl({"get", "a", "-o", "json"});
  const absl::StatusOr<json::Value> view = json::Parse(seen.out);
  ASSERT_TRUE(view.ok()) << seen.out;
  EXPECT_EQ(view->Find("state")->AsString(), "RUNNING");
  EXPECT_THAT(seen.out, ::testing::Not(HasSubstr("\"restarts\": \"1\"")));
  const RunResult events = cluster_->Ctl({"events", "a"});
  EXPECT_THAT(events.out, ::testing::Not(HasSubstr("NodeLost")));
  EXPECT_THAT(events.out, ::testing::Not(HasSubstr("epoch 2")));
  EXPECT_EQ(cluster_->Ctl({"cancel", "a"}).exit_code, 0);
}

TEST_F(IdentitiesTest, TheAuthorityIsRotatedUnderARunningJob) {
  ASSERT_NO_FATAL_FAILURE(Start({.certificate_time = "12s"}));
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  TinyJob job = Job("a");
  job.steps = 100'000;
  job.save_every_steps = 100'000;
  WriteText(cluster_->folder() + "/a.yaml", ToYaml(job));
  ASSERT_EQ(cluster_->Ctl({"submit", "-f", cluster_->folder() + "/a.yaml"}).exit_code, 0);
  ASSERT_EQ(cluster_->Ctl({"wait", "a", "--for=step=1", "--timeout", "60s"}).exit_code, 0);
  ASSERT_NO_FATAL_FAILURE(LogIn("late", "viewer"));

  const auto authority = [&](std::vector<std::string> verb) {
    verb.insert(verb.begin(), {BinaryPath("ravel-coordinator"), "authority"});
    verb.insert(verb.end(), {"--state-dir", cluster_->folder() + "/state"});
    return cluster_->Run(verb);
  };
  const RunResult begun = authority({"rotate"});
  ASSERT_EQ(begun.exit_code, 0) << begun.err;
  EXPECT_THAT(begun.out, HasSubstr("under way"));
  EXPECT_EQ(authority({"rotate"}).exit_code, 1);
  const RunResult early = authority({"finish"});
  EXPECT_EQ(early.exit_code, 1);
  EXPECT_THAT(early.err, HasSubstr("must enrol again"));
  const auto in_force = [&](int times) {
    const std::string log = cluster_->Log("coordinator");
    const std::vector<std::string> parts = absl::StrSplit(log, "another authority is in force");
    return static_cast<int>(parts.size()) > times;
  };
  ASSERT_TRUE(Eventually(seconds(60), [&] { return in_force(1); }));
  // Users who have only heard of the old one, who renew, and who come new.
  EXPECT_EQ(cluster_->Ctl({"list"}, "late").exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"whoami", "--renew"}).exit_code, 0);
  ASSERT_NO_FATAL_FAILURE(LogIn("newcomer", "viewer"));
  const int renewals = cluster_->Audited("node/n1", "Access.Renew", "OK");
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    return cluster_->Audited("node/n1", "Access.Renew", "OK") >= renewals + 2;
  }));

  ASSERT_EQ(authority({"finish", "--force"}).exit_code, 0);
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    return cluster_->Ctl({"list"}, "late").exit_code == kUnreachable;
  })) << "the old authority's certificates are no good";
  EXPECT_EQ(cluster_->Ctl({"list"}).exit_code, 0);
  EXPECT_EQ(cluster_->Ctl({"list"}, "newcomer").exit_code, 0);
  ASSERT_TRUE(Eventually(seconds(60), [&] { return in_force(2); }));
  ASSERT_NO_FATAL_FAILURE(LogIn("latest", "viewer"));
  const int before = cluster_->Audited("node/n1", "Access.Renew", "OK");
  ASSERT_TRUE(Eventually(seconds(60), [&] {
    return cluster_->Audited("node/n1", "Access.Renew", "OK") >= before + 1;
  }));
  ASSERT_EQ(cluster_->RestartCoordinator(), absl::OkStatus());
  ASSERT_TRUE(cluster_->WaitForReady(1));
  const RunResult events = cluster_->Ctl({"events", "a"});
  EXPECT_THAT(events.out, ::testing::Not(HasSubstr("NodeLost")));
  EXPECT_THAT(events.out, ::testing::Not(HasSubstr("epoch 2")));
  EXPECT_EQ(cluster_->Ctl({"cancel", "a"}).exit_code, 0);
}

// The files that cert-manager makes for deploy/kubernetes/overlays/cert-manager: an authority
// (tls.crt, tls.key), and the identity of a store which it signed.
constexpr char kElsewhere[] = R"(set -e
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key tls.key
openssl req -x509 -new -key tls.key -days 30 -subj '/CN=Ravel cluster elsewhere' -out tls.crt \
  -addext keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign
mkdir -m 700 store
cd store
key key.pem
openssl req -new -key key.pem -subj / -out request
printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature' \
  'extendedKeyUsage=serverAuth,clientAuth' \
  'subjectAltName=critical,IP:127.0.0.1,URI:spiffe://elsewhere.ravel/store' >extensions
openssl x509 -req -in request -CA ../tls.crt -CAkey ../tls.key -CAcreateserial -days 10 \
  -extfile extensions -out certificate.pem
cp ../tls.crt authority.pem
cp certificate.pem tls.crt
cp key.pem tls.key
chmod 600 ./*)";

TEST_F(IdentitiesTest, AnAuthorityFromElsewhereSignsStores) {
  const ScratchFolder elsewhere;
  const RunResult made = RunProgram(
      {.arguments = {"/bin/bash", "-c", kElsewhere}, .working_directory = elsewhere.path()},
      elsewhere.path(),
      seconds(30));
  ASSERT_EQ(made.exit_code, 0) << made.err;
  ASSERT_NO_FATAL_FAILURE(
      Start({.init_flags = {"--authority", elsewhere.path(), "--cluster", "elsewhere"}}));
  StoreProcess store(
      {.folder = cluster_->folder() + "/server",
       .flags = {"--identity", elsewhere.path() + "/store", "--coordinator", cluster_->address()}});
  ASSERT_EQ(store.Start(), absl::OkStatus()) << store.Log();
  ASSERT_NO_FATAL_FAILURE(JoinAndStart("n1"));
  ASSERT_TRUE(cluster_->WaitForReady(1));
  TinyJob job = Job("a");
  job.store = store.Url("team");
  WriteText(cluster_->folder() + "/a.yaml", ToYaml(job));
  ASSERT_EQ(cluster_->Ctl({"submit", "-f", cluster_->folder() + "/a.yaml"}).exit_code, 0);
  const RunResult done = cluster_->Ctl({"wait", "a", "--for=done", "--timeout", "60s"});
  EXPECT_EQ(done.exit_code, 0) << done.err << cluster_->Ctl({"events", "a"}).out << store.Log();

  const auto init = [&](const std::string& folder, const std::string& name) {
    return cluster_->Run({BinaryPath("ravel-coordinator"),
                          "init",
                          "--state-dir",
                          cluster_->folder() + "/another",
                          "--name",
                          "localhost",
                          "--authority",
                          folder,
                          "--cluster",
                          name});
  };
  const RunResult leaf = init(elsewhere.path() + "/store", "c");
  EXPECT_EQ(leaf.exit_code, 2);
  EXPECT_THAT(leaf.err, HasSubstr("an authority that signs itself"));
  const RunResult none = init(elsewhere.path() + "/nowhere", "c");
  EXPECT_NE(none.exit_code, 0);
  EXPECT_THAT(none.err, HasSubstr("--authority"));
  EXPECT_THAT(init(elsewhere.path(), "C.d").err, HasSubstr("--cluster: expected"));
  EXPECT_FALSE(std::filesystem::exists(cluster_->folder() + "/another"));
}

}  // namespace
}  // namespace ravel::testing
