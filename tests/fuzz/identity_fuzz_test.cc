// Texts that identify: join tokens, certificates, URIs, context files, revocations.

#include <cstdlib>
#include <filesystem>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "common/certificate.h"
#include "common/join_token.h"
#include "coordinator/access/context_file.h"
#include "coordinator/access/identity.h"
#include "tests/testing/fuzz.h"
#include "tests/testing/process.h"
#include "worker/store/fence_book.h"
#include "worker/store/store_rules.h"
#include "worker/store/trust_book.h"

namespace ravel::testing {
namespace {

constexpr int64_t kStart = 1'764'000'000'000;
constexpr int64_t kYear = int64_t{365} * 24 * 3600'000;

class FuzzIdentity : public ::testing::Test {
 protected:
  void SetUp() override {
    authority_ = *MakeAuthority("Ravel test", kStart, kStart + kYear);
    key_ = MakePrivateKey();
    request_ = *MakeCertificateRequest(key_);
    certificate_ = *Issue(request_);
  }
  absl::StatusOr<std::string> Issue(const std::string& request) const {
    return IssueCertificate(authority_,
                            request,
                            {.uri = "spiffe://c.ravel/node/n1",
                             .serial = std::string("\x41\x00\x02", 3),
                             .names = {"host.example", "10.0.0.7", "fd00::1"},
                             .use = CertificateUse::kServer,
                             .not_before_ms = kStart,
                             .not_after_ms = kStart + kYear});
  }
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }

  ScratchFolder scratch_;
  Authority authority_;
  std::string key_;
  std::string request_;
  std::string certificate_;
};

TEST_F(FuzzIdentity, JoinTokens) {
  const std::string token =
      FormatJoinToken({.fingerprint = std::string(64, 'a'), .secret = std::string(40, '1')});
  Fuzz({.name = "join_token", .form = FuzzForm::kText, .seeds = {token}},
       [](std::string_view input) {
         const absl::StatusOr<JoinToken> parsed = ParseJoinToken(input);
         if (!parsed.ok()) {
           return Refused();
         }
         const absl::StatusOr<JoinToken> again = ParseJoinToken(FormatJoinToken(*parsed));
         return AcceptedIf(again.ok() && again->fingerprint == parsed->fingerprint &&
                           again->secret == parsed->secret);
       });
}

TEST_F(FuzzIdentity, Certificates) {
  Fuzz({.name = "certificate", .seeds = {certificate_, authority_.certificate + certificate_}},
       [this](std::string_view input) {
         const std::string pem(input);
         const bool pair = CheckKeyPair(pem, key_).ok();
         (void)CheckAuthority({.certificate = pem, .key = authority_.key}, kStart);
         for (const std::string& one : SplitCertificates(pem)) {
           (void)ReadCertificate(one);
         }
         return ReadCertificate(pem).ok() || pair ? Accepted() : Refused();
       });
}

TEST_F(FuzzIdentity, Keys) {
  Fuzz({.name = "private_key", .seeds = {key_}, .part = 2}, [this](std::string_view input) {
    const std::string key(input);
    (void)MakeCertificateRequest(key);
    (void)CheckAuthority({.certificate = authority_.certificate, .key = key}, kStart);
    return CheckKeyPair(certificate_, key).ok() ? Accepted() : Refused();
  });
}

TEST_F(FuzzIdentity, Requests) {
  Fuzz({.name = "certificate_request", .seeds = {request_}, .part = 2},
       [this](std::string_view input) {
         return Issue(std::string(input)).ok() ? Accepted() : Refused();
       });
}

TEST_F(FuzzIdentity, Uris) {
  Fuzz({.name = "identity_uri",
        .form = FuzzForm::kText,
        .seeds = {"spiffe://c.ravel/node/n1", "spiffe://c.ravel/user/ann"}},
       [](std::string_view input) {
         (void)store_server::ClusterOf(input);
         const bool stores = store_server::CallerOf("c", input).ok();
         coordinator::IdentityKind kind = coordinator::IdentityKind::kUser;
         std::string name;
         if (!coordinator::ParseUri("c", input, &kind, &name)) {
           return stores ? Accepted() : Refused();
         }
         return AcceptedIf(coordinator::UriOf("c", kind, name) == input ||
                           coordinator::StoreUri("c") == input);
       });
  Fuzz({.name = "identity_name", .form = FuzzForm::kText, .seeds = {"n1", "a.b_c-d"}},
       [](std::string_view input) {
         (void)coordinator::ParseRole(input);
         (void)coordinator::VerbOf(input);
         (void)coordinator::IsChange(input);
         (void)coordinator::CheckMethod({.role = coordinator::Role::kAdmin}, input);
         return coordinator::CheckIdentityName("name", input).ok()
                    ? AcceptedIf(input.find('/') == std::string_view::npos && !input.empty() &&
                                     input[0] != '.',
                                 "is no name of a file")
                    : Refused();
       });
}

TEST_F(FuzzIdentity, ContextFiles) {
  ASSERT_EQ(coordinator::WriteContext(Path("context"),
                                      {.coordinator = "host.example:7070",
                                       .authority = authority_.certificate,
                                       .certificate = certificate_,
                                       .key = key_}),
            absl::OkStatus());
  Fuzz({.name = "context_file",
        .form = FuzzForm::kText,
        .seeds = {ReadText(Path("context"))},
        .part = 2},
       [this](std::string_view input) {
         WriteText(Path("context"), std::string(input));
         return coordinator::ReadContext(Path("context")).ok() ? Accepted() : Refused();
       });
}

TEST_F(FuzzIdentity, Revocations) {
  const std::string path = Path("revoked.json");
  const auto book = store_server::TrustBook::Open(path);
  ASSERT_TRUE(book.ok());
  ASSERT_EQ((*book)->Keep({{.owner = "node/n1", .serial_prefix = "0123456789abcdef"}}),
            absl::OkStatus());
  Fuzz({.name = "trust_book", .form = FuzzForm::kText, .seeds = {ReadText(path)}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         const auto read = store_server::TrustBook::Open(path);
         if (!read.ok()) {
           return Refused();
         }
         (void)(*read)->Check("0123456789abcdef01");
         return Accepted();
       });
}

TEST_F(FuzzIdentity, Fences) {
  const auto book = store_server::FenceBook::Open(Path("fences"));
  ASSERT_TRUE(book.ok());
  ASSERT_EQ((*book)->Raise("team/job", 7, 3), absl::OkStatus());
  std::string path;
  for (const auto& entry : std::filesystem::directory_iterator(Path("fences"))) {
    path = entry.path().string();
  }
  Fuzz({.name = "fence_book", .form = FuzzForm::kText, .seeds = {ReadText(path)}},
       [&](std::string_view input) {
         WriteText(path, std::string(input));
         return store_server::FenceBook::Open(Path("fences")).ok() ? Accepted() : Refused();
       });
  WriteText(path, R"({"folder": "team/job", "jobTag": 7, "minEpoch": 3})");
  const auto fences = store_server::FenceBook::Open(Path("fences"));
  ASSERT_TRUE(fences.ok());
  using store_server::Act;
  const store_server::Caller node = {.kind = store_server::CallerKind::kNode, .text = "node/n1"};
  Fuzz({.name = "store_path",
        .form = FuzzForm::kText,
        .seeds = {"team/job/step-0000000020.e3.a1.0000007b.tmp/model/x.safetensors",
                  "team/job/pins/step-0000000020"}},
       [&](std::string_view input) {
         for (const Act act : {Act::kWrite, Act::kMakeFolder, Act::kMakeFolders, Act::kWithdraw}) {
           if (store_server::CheckAct(node, act, input, **fences).ok() &&
               input.find(".tmp") == std::string_view::npos &&
               input.find(".e") == std::string_view::npos) {
             return AcceptedIf(false, "a node may change what is no save");
           }
         }
         (void)store_server::CheckPublish(node, input, input);
         return Accepted();
       });
}

}  // namespace
}  // namespace ravel::testing
