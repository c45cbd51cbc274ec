#include "worker/store/trust_book.h"

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file_writer.h"

namespace ravel::store_server {
namespace {

using ::testing::HasSubstr;

const RevokedEnrolment kNode{"node/n1", "4100000000000001", 77};
const RevokedEnrolment kUser{"user/ann", "4200000000000002", 78};
constexpr char kCertificateOfNode[] = "4100000000000001ffffffffffffffff";

class TrustBookTest : public ::testing::Test {
 protected:
  TrustBookTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("ravel-trust-" + std::to_string(::getpid()))) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~TrustBookTest() override { std::filesystem::remove_all(folder_); }
  std::string Path() const { return folder_ + "/trust.json"; }

  const std::string folder_;
};

TEST_F(TrustBookTest, WhatWasToldLastHoldsAlsoAfterARestart) {
  auto book = TrustBook::Open(Path());
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_TRUE((*book)->Check(kCertificateOfNode).ok()) << "nothing is known so far";
  ASSERT_EQ((*book)->Keep({kNode, kUser}), absl::OkStatus());
  struct stat facts = {};
  ASSERT_EQ(stat(Path().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
  for (int opens = 0; opens < 2; ++opens) {
    const absl::Status refused = (*book)->Check(kCertificateOfNode);
    EXPECT_TRUE(absl::IsPermissionDenied(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("node/n1 was revoked"));
    EXPECT_TRUE((*book)->Check("4300000000000003ffffffffffffffff").ok());
    EXPECT_TRUE((*book)->Check("01").ok());
    book = TrustBook::Open(Path());
    ASSERT_TRUE(book.ok()) << book.status();
  }
  ASSERT_EQ((*book)->Keep({kUser}), absl::OkStatus());
  EXPECT_TRUE((*book)->Check(kCertificateOfNode).ok());
}

TEST_F(TrustBookTest, KeysOfTokensAreKeptBesideThem) {
  auto book = TrustBook::Open(Path());
  EXPECT_TRUE((*book)->job_keys().empty());
  const std::vector<std::string> keys = {std::string(32, '\x01'), std::string(32, '\xfe')};
  ASSERT_EQ((*book)->Keep({kNode}, keys), absl::OkStatus());
  EXPECT_EQ((*book)->job_keys(), keys);
  book = TrustBook::Open(Path());
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_EQ((*book)->job_keys(), keys);
  EXPECT_TRUE(absl::IsInvalidArgument((*book)->Keep({}, {"short"})));
  EXPECT_TRUE(absl::IsInvalidArgument(
      (*book)->Keep({}, std::vector<std::string>(9, std::string(32, 'k')))));
  EXPECT_EQ((*book)->job_keys(), keys);
  ASSERT_TRUE(WriteFileAtomically(Path(), "{\"revoked\": []}", FileAccess::kOwner).ok());
  EXPECT_TRUE((*TrustBook::Open(Path()))->job_keys().empty()) << "of an earlier release";
  for (const char* bad : {"{}", "[1]", "[\"00\"]"}) {
    ASSERT_TRUE(WriteFileAtomically(Path(),
                                    std::string("{\"revoked\": [], \"jobKeys\": ") + bad + "}",
                                    FileAccess::kOwner)
                    .ok());
    EXPECT_TRUE(absl::IsDataLoss(TrustBook::Open(Path()).status())) << bad;
  }
}

TEST_F(TrustBookTest, AMalformedEntryChangesNothingAndNamesItsField) {
  const auto book = TrustBook::Open(Path());
  ASSERT_EQ((*book)->Keep({kNode}), absl::OkStatus());
  for (const RevokedEnrolment& bad : {RevokedEnrolment{"node/n2", "41", 1},
                                      RevokedEnrolment{"node/n2", "4100000000000001ff", 1},
                                      RevokedEnrolment{"node/n2", "410000000000000G", 1}}) {
    const absl::Status refused = (*book)->Keep({kUser, bad});
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("serial_prefix"));
  }
  EXPECT_THAT(std::string((*book)->Keep({{"a\x1b", "4300000000000003", 1}}).message()),
              HasSubstr("owner"));
  EXPECT_TRUE(absl::IsPermissionDenied((*book)->Check(kCertificateOfNode)));
}

TEST_F(TrustBookTest, AListThatCannotBeWrittenHoldsAllTheSame) {
  const auto book = TrustBook::Open(folder_ + "/missing/trust.json");
  ASSERT_TRUE(book.ok()) << book.status();
  EXPECT_FALSE((*book)->Keep({kNode}).ok());
  EXPECT_TRUE(absl::IsPermissionDenied((*book)->Check(kCertificateOfNode)));
}

TEST_F(TrustBookTest, ADamagedFileIsNamed) {
  for (const char* text :
       {"",
        "{",
        "[]",
        "{}",
        R"({"revoked": [1]})",
        R"({"revoked": [{"owner": "n", "serialPrefix": "1", "revokedMs": 1}]})"}) {
    ASSERT_TRUE(WriteFileAtomically(Path(), text).ok());
    const absl::Status status = TrustBook::Open(Path()).status();
    EXPECT_TRUE(absl::IsDataLoss(status)) << text << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(Path()));
  }
}

}  // namespace
}  // namespace ravel::store_server
