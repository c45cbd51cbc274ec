// Pages over TLS with tokens, read by a client that is not ours (Python's).

#include "common/http/page_access.h"

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/file_writer.h"
#include "tests/testing/http_client.h"
#include "tests/testing/process.h"

namespace ravel::http {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kDayMs = int64_t{24} * 3600 * 1000;
constexpr char kToken[] = "0123456789abcdef";
// Prints status and body of a page. Arguments: authority, port, path, token or nothing, version.
constexpr char kGet[] = R"(
import http.client, ssl, sys
context = ssl.create_default_context(cafile=sys.argv[1])
if sys.argv[5] == "1.1":
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1_1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
connection = http.client.HTTPSConnection("localhost", int(sys.argv[2]), timeout=20, context=context)
headers = {"Authorization": sys.argv[4]} if sys.argv[4] else {}
connection.request("GET", sys.argv[3], headers=headers)
answer = connection.getresponse()
print(answer.status, answer.getheader("WWW-Authenticate"), answer.read().decode(), end="")
)";

class PageAccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Write("authority.pem", authority_.certificate);
    Write("tokens", absl::StrCat(kToken, "\n"));
    WriteCertificate();
  }
  std::string At(const std::string& name) const { return folder_.path() + "/" + name; }
  void Write(const std::string& name, const std::string& text) const {
    ASSERT_EQ(WriteFileAtomically(At(name), text, FileAccess::kOwner), absl::OkStatus());
  }
  void WriteCertificate() const {
    const std::string key = MakePrivateKey();
    const int64_t now_ms = SystemClock::Get().WallMs();
    Write("certificate.pem",
          *IssueCertificate(authority_,
                            *MakeCertificateRequest(key),
                            {.uri = "spiffe://c1.ravel/coordinator",
                             .serial = "\x01" + std::string(15, 'x'),
                             .names = {"localhost"},
                             .use = CertificateUse::kServer,
                             .not_before_ms = now_ms - kDayMs,
                             .not_after_ms = now_ms + kDayMs}));
    Write("key.pem", key);
  }
  PageFlags Flags(const std::string& listen = "127.0.0.1:0") const {
    return {.listen = listen,
            .token_file = At("tokens"),
            .certificate_file = At("certificate.pem"),
            .key_file = At("key.pem")};
  }
  absl::Status Start() {
    ServerOptions options;
    options.listen = "127.0.0.1:0";
    for (const char* page : {"/livez", "/readyz", "/metrics"}) {
      options.pages[page] = [page](const Respond& respond) { respond({200, page}); };
    }
    ASSIGN_OR_RETURN(options.security, SecurityOf(Flags()));
    ASSIGN_OR_RETURN(server_, Server::Start(options));
    return absl::OkStatus();
  }
  std::string Get(const std::string& page,
                  const std::string& authorization = "",
                  const std::string& version = "") const {
    testing::ProcessOptions options;
    options.arguments = {"/usr/bin/env",
                         "python3",
                         "-c",
                         kGet,
                         At("authority.pem"),
                         absl::StrCat(server_->port()),
                         page,
                         authorization,
                         version};
    const testing::RunResult result =
        testing::RunProgram(options, folder_.path(), std::chrono::seconds(60));
    return result.exit_code == 0 ? result.out : result.err;
  }

  const testing::ScratchFolder folder_;
  const Authority authority_ = *MakeAuthority(
      "c1", SystemClock::Get().WallMs() - kDayMs, SystemClock::Get().WallMs() + kDayMs);
  std::unique_ptr<Server> server_;
};

TEST_F(PageAccessTest, ProbesAreOpenAndTheRestNeedsAToken) {
  ASSERT_EQ(Start(), absl::OkStatus());
  EXPECT_EQ(Get("/livez"), "200 None /livez");
  EXPECT_EQ(Get("/readyz"), "200 None /readyz");
  EXPECT_THAT(Get("/metrics"), HasSubstr("401 Bearer expected Authorization"));
  EXPECT_THAT(Get("/metrics", "Bearer 0123456789abcdeX"), HasSubstr("401 Bearer the token"));
  EXPECT_THAT(Get("/metrics", kToken), HasSubstr("401 Bearer expected Authorization"));
  EXPECT_EQ(Get("/metrics", absl::StrCat("Bearer ", kToken)), "200 None /metrics");
}

TEST_F(PageAccessTest, NothingIsSaidInClearOrByAnOldTls) {
  ASSERT_EQ(Start(), absl::OkStatus());
  EXPECT_EQ(testing::GetPage(server_->port(), "/livez").status, 0);
  EXPECT_THAT(Get("/livez", "", "1.1"), HasSubstr("SSL"));
  EXPECT_EQ(Get("/livez"), "200 None /livez") << "others are served";
}

TEST_F(PageAccessTest, CertificatesAndTokensMayBeReplacedAtAnyTime) {
  ASSERT_EQ(Start(), absl::OkStatus());
  EXPECT_EQ(Get("/metrics", absl::StrCat("Bearer ", kToken)), "200 None /metrics");
  Write("tokens", "another token of it\nand one more of them\n");
  EXPECT_THAT(Get("/metrics", absl::StrCat("Bearer ", kToken)), HasSubstr("401"));
  EXPECT_EQ(Get("/metrics", "Bearer another token of it"), "200 None /metrics");
  EXPECT_EQ(Get("/metrics", "Bearer and one more of them"), "200 None /metrics");
  std::filesystem::remove(At("tokens"));
  EXPECT_THAT(Get("/metrics", "Bearer another token of it"), HasSubstr("503"));
  EXPECT_EQ(Get("/livez"), "200 None /livez");
  Write("key.pem", "half of it");  // for a moment, while both are replaced
  EXPECT_EQ(Get("/livez"), "200 None /livez");
  WriteCertificate();
  EXPECT_EQ(Get("/livez"), "200 None /livez");
}

TEST_F(PageAccessTest, WhatIsWrongIsNamedAtTheStart) {
  EXPECT_FALSE(SecurityOf({.listen = "localhost:0", .token_file = {}})->has_value());
  const auto why = [](const PageFlags& flags) {
    const absl::Status status = SecurityOf(flags).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(why({.listen = "0.0.0.0:1", .token_file = {}}), HasSubstr("--http-token-file"));
  EXPECT_THAT(why({.listen = "nonsense", .token_file = {}}), HasSubstr("--http-listen nonsense"));
  EXPECT_THAT(why({.listen = "[::]:1", .token_file = At("tokens")}),
              HasSubstr("--http-certificate"));
  EXPECT_TRUE(SecurityOf(Flags("[::]:1"))->has_value());
  Write("tokens", "short\n");
  EXPECT_THAT(why(Flags()), HasSubstr("16 bytes"));
  Write("tokens", "\n");
  EXPECT_THAT(why(Flags()), HasSubstr("expected a token"));
  Write("tokens", kToken);
  Write("key.pem", MakePrivateKey());
  EXPECT_THAT(std::string(Start().message()), HasSubstr("key.pem"));
  Write("certificate.pem", "no certificate");
  EXPECT_THAT(std::string(Start().message()), HasSubstr("certificate.pem"));
}

}  // namespace
}  // namespace ravel::http
