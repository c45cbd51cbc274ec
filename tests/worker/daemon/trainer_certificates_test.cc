// Keys and certificates of trainers that are another user, against an authority of the test's own.

#include "worker/daemon/trainer_certificates.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/crypto.h"

namespace ravel::daemon {
namespace {

class TrainerCertificatesTest : public ::testing::Test {
 protected:
  // Answers at once, unless answers are held.
  void Certify(const std::string& job_uid,
               const std::string& request,
               const FleetChannel::CertificateCallback& done) {
    ++asked_;
    const int64_t now_ms = SystemClock::Get().WallMs();
    const absl::StatusOr<std::string> certificate =
        IssueCertificate(authority_,
                         request,
                         {.uri = "spiffe://c1.ravel/trainer/n1/" + job_uid,
                          .serial = "\x42" + RandomBytes(15),
                          .not_before_ms = now_ms - life_ms_,
                          .not_after_ms = now_ms + life_ms_});
    ASSERT_TRUE(certificate.ok()) << certificate.status();
    const absl::StatusOr<FleetChannel::Certificate> answer =
        down_ ? absl::StatusOr<FleetChannel::Certificate>(absl::UnavailableError("down"))
              : FleetChannel::Certificate{.certificate = *certificate,
                                          .authority = authority_.certificate};
    if (hold_) {
      held_.push_back([done, answer] { done(answer); });
    } else {
      done(answer);
    }
  }
  absl::StatusOr<TlsIdentity> Get(const JobEpoch& of) {
    absl::StatusOr<TlsIdentity> got = absl::UnknownError("not answered");
    certificates_.Get(of, [&got](const absl::StatusOr<TlsIdentity>& identity) { got = identity; });
    return got;
  }
  // Lets the loop run until so many were asked for.
  bool RunUntilAsked(int count) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (asked_ < count && std::chrono::steady_clock::now() < end) {
      context_.restart();
      context_.run_one_for(std::chrono::milliseconds(500));
    }
    return asked_ >= count;
  }

  boost::asio::io_context context_;
  const Authority authority_ = *MakeAuthority(
      "test", SystemClock::Get().WallMs() - 3600'000, SystemClock::Get().WallMs() + 3600'000);
  int64_t life_ms_ = 600'000;
  bool down_ = false;
  bool hold_ = false;
  int asked_ = 0;
  std::vector<std::function<void()>> held_;
  std::vector<TlsIdentity> renewed_;
  TrainerCertificates certificates_{context_,
                                    {.certify =
                                         [this](const std::string& job_uid,
                                                const std::string& request,
                                                const FleetChannel::CertificateCallback& done) {
                                           Certify(job_uid, request, done);
                                         },
                                     .renewed =
                                         [this](const JobEpoch& of, const TlsIdentity& identity) {
                                           EXPECT_EQ(of.job_uid, "job");
                                           renewed_.push_back(identity);
                                         }}};
};

TEST_F(TrainerCertificatesTest, EachEpochHasAKeyOfItsOwnUntilItIsForgotten) {
  life_ms_ = 3600'000;
  const absl::StatusOr<TlsIdentity> first = Get({"job", 1});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(CheckKeyPair(first->certificate, first->key), absl::OkStatus());
  EXPECT_EQ(ReadCertificate(first->certificate)->uri, "spiffe://c1.ravel/trainer/n1/job");
  EXPECT_EQ(first->authority, authority_.certificate);
  ASSERT_EQ(Get({"job", 1})->certificate, first->certificate) << "another rank of the same launch";
  EXPECT_EQ(asked_, 1);
  const absl::StatusOr<TlsIdentity> second = Get({"job", 2});
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->key, first->key);
  certificates_.Keep({{"job", 2}});
  EXPECT_EQ(Get({"job", 2})->key, second->key);
  EXPECT_NE(Get({"job", 1})->key, first->key);
}

TEST_F(TrainerCertificatesTest, AnAnswerForWhatIsOverIsNone) {
  hold_ = true;
  absl::StatusOr<TlsIdentity> got = absl::UnknownError("not answered");
  certificates_.Get({"job", 1},
                    [&](const absl::StatusOr<TlsIdentity>& identity) { got = identity; });
  certificates_.Keep({});
  ASSERT_EQ(held_.size(), 1u);
  held_[0]();
  EXPECT_TRUE(absl::IsCancelled(got.status())) << got.status();
}

TEST_F(TrainerCertificatesTest, ACertificateOfAnotherKeyIsRefused) {
  hold_ = true;
  absl::StatusOr<TlsIdentity> got = absl::UnknownError("not answered");
  certificates_.Get({"job", 1}, [](const absl::StatusOr<TlsIdentity>&) {});
  certificates_.Keep({});  // the next one has another key
  certificates_.Get({"job", 1},
                    [&](const absl::StatusOr<TlsIdentity>& identity) { got = identity; });
  ASSERT_EQ(held_.size(), 2u);
  held_[0]();
  EXPECT_FALSE(got.ok());
  held_[1]();
  EXPECT_TRUE(got.ok()) << got.status();
}

TEST_F(TrainerCertificatesTest, ItIsRenewedInTimeByTheSameKeyAlsoAfterFailures) {
  life_ms_ = 1500;  // two thirds of it, counted from before it was made, end in half a second
  const absl::StatusOr<TlsIdentity> first = Get({"job", 1});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(RunUntilAsked(2));
  ASSERT_EQ(renewed_.size(), 1u);
  EXPECT_EQ(renewed_[0].key, first->key);
  EXPECT_NE(renewed_[0].certificate, first->certificate);
  EXPECT_EQ(CheckKeyPair(renewed_[0].certificate, first->key), absl::OkStatus());
  down_ = true;
  ASSERT_TRUE(RunUntilAsked(4)) << "it asks again";
  EXPECT_EQ(renewed_.size(), 1u);
  down_ = false;
  const int before = asked_;
  ASSERT_TRUE(RunUntilAsked(before + 1));
  EXPECT_EQ(renewed_.size(), 2u);
  // Nothing is asked for when nobody uses it.
  certificates_.Keep({});
  context_.restart();
  context_.run_for(std::chrono::seconds(20));
  EXPECT_TRUE(context_.stopped()) << "the loop has no more to do, long before";
  EXPECT_EQ(asked_, before + 1);
}

}  // namespace
}  // namespace ravel::daemon
