#include "common/certificate.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/join_token.h"
#include "common/peer_chain.h"

namespace ravel {
namespace {

constexpr int64_t kNow = 1'764'000'000'000;
constexpr int64_t kHour = 3600'000;

class CertificateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<Authority> made = MakeAuthority("Ravel test", kNow, kNow + 1000 * kHour);
    ASSERT_TRUE(made.ok()) << made.status();
    authority_ = *made;
  }
  absl::StatusOr<std::string> Issue(const std::string& request, CertificateUse use) {
    return IssueCertificate(authority_,
                            request,
                            {.uri = "spiffe://c.ravel/node/n1",
                             .serial = std::string("\x41\x00\x02", 3),
                             .names = {"host.example", "10.0.0.7", "fd00::1"},
                             .use = use,
                             .not_before_ms = kNow,
                             .not_after_ms = kNow + kHour});
  }

  Authority authority_;
};

TEST_F(CertificateTest, ACertificateSaysWhatWasOrdered) {
  const std::string key = MakePrivateKey();
  const absl::StatusOr<std::string> request = MakeCertificateRequest(key);
  ASSERT_TRUE(request.ok()) << request.status();
  const absl::StatusOr<std::string> certificate = Issue(*request, CertificateUse::kServer);
  ASSERT_TRUE(certificate.ok()) << certificate.status();
  const absl::StatusOr<CertificateFacts> facts = ReadCertificate(*certificate);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->uri, "spiffe://c.ravel/node/n1");
  EXPECT_EQ(facts->serial, "410002");
  EXPECT_EQ(facts->names, (std::vector<std::string>{"host.example", "10.0.0.7", "fd00::1"}));
  EXPECT_EQ(facts->not_before_ms, kNow);
  EXPECT_EQ(facts->not_after_ms, kNow + kHour);
  EXPECT_EQ(facts->fingerprint.size(), 64u);
  EXPECT_TRUE(CheckKeyPair(*certificate, key).ok());
  EXPECT_FALSE(CheckKeyPair(*certificate, MakePrivateKey()).ok());
  EXPECT_EQ(SplitCertificates(*certificate + authority_.certificate).size(), 2u);
}

TEST_F(CertificateTest, ARequestThatItsOwnKeyDidNotSignIsRefused) {
  std::string request = *MakeCertificateRequest(MakePrivateKey());
  // Another key's signature under this key: the last base64 line belongs to the signature.
  const std::string other = *MakeCertificateRequest(MakePrivateKey());
  const size_t mine = request.rfind('\n', request.rfind("-----END") - 2);
  const size_t theirs = other.rfind('\n', other.rfind("-----END") - 2);
  request = request.substr(0, mine) + other.substr(theirs);
  EXPECT_EQ(Issue(request, CertificateUse::kClient).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CertificateTest, OnlyKeysOfTheOneKindAreAccepted) {
  // openssl req -new -newkey rsa:2048 -nodes -subj /CN=x
  constexpr char kRsa[] =
      "-----BEGIN CERTIFICATE REQUEST-----\n"
      "MIICUTCCATkCAQAwDDEKMAgGA1UEAwwBeDCCASIwDQYJKoZIhvcNAQEBBQADggEP\n"
      "ADCCAQoCggEBAJQ3GpN29vOqhp/zHpfgUC8z/iE8AALqdhkx3irqS63d4ce/vCzU\n"
      "8i0QBlXPDDPFryWqFolMRLhIeiuaBARmpefmYzfS4rkA2rBCaxzVoJhyCz824l4N\n"
      "6J4eWUO9calgR4Xl5nn8nGctVJNhjB51qgDVfZEIRptTnvohT+uXJpRjRiCEERLS\n"
      "v04ZBfDGCs2DJNOtQuVVKHF/P+Rr4btShebtthWZHgJ4HMd7aeL4iFgstHbpPzNJ\n"
      "viBsUw9TQU1kdag0WZw6lgHzWk4G27NEzPjTyys1PJrDPSlmqVqwAHBpGfX08WAu\n"
      "dI0mZTVMlG5zTk7wW/6ntj2wURt5wzPCJ6cCAwEAAaAAMA0GCSqGSIb3DQEBCwUA\n"
      "A4IBAQBJpBAu2DJZIzedG+PGw1RJC/QrVPV92u+aGGKK6gILrpIcgNApAWBRcO3Z\n"
      "OlnlVgdI7CXKu11zP4f3EUu2Z3Nu6WB+R/m9gpFl8aq/LzwC9ruPrLIq7/HkJ1Gu\n"
      "zLr5DiByI9gpG2boVHUitvIb8B6Dd6OL6Ahx48xsVo8Tv18U3m63nHyTAFa9wfkX\n"
      "+zrI//J1Xnl31I1bId1EGOz/ehoNcs5DLELZb4BOnNsaFuslxbBPuBCySvMAqc/9\n"
      "QK2REvYhnFco7rhwwSKXWLFuPy3ejQf6KIF+b8zLGaPGY5Pc+JYNmGa4j3o83B6U\n"
      "mgni4taDtrPWk4/Yo4/UpwFRarMb\n"
      "-----END CERTIFICATE REQUEST-----\n";
  const absl::StatusOr<std::string> refused = Issue(kRsa, CertificateUse::kClient);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().message().find("P-256"), std::string::npos) << refused.status();
}

TEST_F(CertificateTest, WhateverIsNoPemIsRefused) {
  const std::string request = *MakeCertificateRequest(MakePrivateKey());
  for (const std::string& bad : {std::string(),
                                 std::string("-----BEGIN CERTIFICATE REQUEST-----"),
                                 request.substr(0, request.size() / 2),
                                 std::string(1 << 20, 'x'),
                                 authority_.certificate}) {
    EXPECT_FALSE(Issue(bad, CertificateUse::kClient).ok());
    EXPECT_FALSE(CheckKeyPair(authority_.certificate, bad).ok());
  }
  EXPECT_FALSE(ReadCertificate(request).ok());
}

TEST(JoinTokenTest, OnlyWholeTokensAreRead) {
  const JoinToken token{.fingerprint = std::string(64, 'a'), .secret = std::string(40, '7')};
  const std::string text = FormatJoinToken(token);
  const absl::StatusOr<JoinToken> read = ParseJoinToken(text);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->fingerprint, token.fingerprint);
  EXPECT_EQ(read->secret, token.secret);
  for (size_t cut = 0; cut < text.size(); ++cut) {
    EXPECT_FALSE(ParseJoinToken(text.substr(0, cut)).ok()) << cut;
  }
  EXPECT_FALSE(ParseJoinToken(text + "0").ok());
  std::string upper = text;
  upper[10] = 'A';
  const absl::Status refused = ParseJoinToken(upper).status();
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(refused.message().find(token.secret), std::string::npos) << "a secret in an error";
}

TEST(JoinTokenTest, MayComeFromTheInput) {
  std::istringstream input("  ravel1.a.b\nmore");
  EXPECT_EQ(TokenOf("ravel1.c.d", input), "ravel1.c.d");
  EXPECT_EQ(TokenOf("-", input), "ravel1.a.b");
  std::istringstream endless(std::string(5000, 'x'));
  EXPECT_LE(TokenOf("-", endless).size(), 256u);
  std::istringstream nothing;
  EXPECT_EQ(TokenOf("-", nothing), "");
}

// A server on loopback that answers the first message of its one client with `answer`, then closes.
class PlainServer {
 public:
  explicit PlainServer(std::string answer)
      : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener_, generic, size), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    EXPECT_EQ(getsockname(listener_, generic, &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, answer = std::move(answer)] {
      const int client = accept(listener_, nullptr, nullptr);
      char hello[4096];
      EXPECT_GT(recv(client, hello, sizeof hello, 0), 0);
      EXPECT_EQ(send(client, answer.data(), answer.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(answer.size()));
      shutdown(client, SHUT_WR);
      while (recv(client, hello, sizeof hello, 0) > 0) {
      }
      close(client);
    });
  }
  ~PlainServer() {
    thread_.join();
    close(listener_);
  }
  PlainServer(const PlainServer&) = delete;
  PlainServer& operator=(const PlainServer&) = delete;
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  int listener_;
  int port_ = 0;
  std::thread thread_;
};

TEST(PeerChainTest, AServerThatIsNoCoordinatorIsNamed) {
  const auto told = [](const std::string& answer) {
    const PlainServer server(answer);
    const absl::StatusOr<std::string> authority =
        FetchAuthority(server.address(), std::string(64, 'a'), std::chrono::seconds(20));
    EXPECT_EQ(authority.status().code(), absl::StatusCode::kUnavailable) << authority.status();
    return std::string(authority.status().message());
  };
  EXPECT_EQ(told("HTTP/1.1 400 Bad Request\r\n\r\n"),
            "expected a ravel-coordinator there, but it speaks HTTP without TLS");
  EXPECT_EQ(told(std::string("\0\0\x12\x04\0\0\0\0\0", 9) + std::string(18, 'x')),
            "expected a ravel-coordinator there, but it speaks HTTP/2 without TLS, as servers with "
            "--dev-loopback do");
  EXPECT_EQ(told("220 mail.example ESMTP\r\n"),
            "expected a ravel-coordinator there, but it does not speak TLS");
  EXPECT_EQ(told(""),
            "expected a ravel-coordinator there, but it closes the connection at the first message "
            "of TLS");
  EXPECT_EQ(told(std::string("\x15\x03\x03\0\x02\x02\x28", 7)),
            "the server does not speak TLS, or refuses it");
}

TEST(PeerChainTest, AServerIsSeenByItsFirstAnswer) {
  const PlainServer plain(std::string("\0\0\0\x04\0\0\0\0\0", 9));
  EXPECT_EQ(LookAtServer(plain.address(), std::chrono::seconds(20)).speech, Speech::kPlainGrpc);
  const PlainServer pages("HTTP/1.1 400 Bad Request\r\n\r\n");
  EXPECT_EQ(LookAtServer(pages.address(), std::chrono::seconds(20)).speech, Speech::kForeign);
  EXPECT_EQ(LookAtServer("127.0.0.1:1", std::chrono::seconds(20)).speech, Speech::kUnknown);
}

TEST(PeerChainTest, NobodyThereIsUnavailable) {
  const absl::StatusOr<std::string> nobody =
      FetchAuthority("127.0.0.1:1", std::string(64, 'a'), std::chrono::milliseconds(2000));
  EXPECT_EQ(nobody.status().code(), absl::StatusCode::kUnavailable) << nobody.status();
}

}  // namespace
}  // namespace ravel
