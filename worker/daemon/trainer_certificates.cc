#include "worker/daemon/trainer_certificates.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/logging.h"
#include "worker/daemon/node_identity.h"

namespace ravel::daemon {
namespace {

// Between attempts; also how often the wall clock is asked, because it may jump.
constexpr int64_t kAgainMs = 60'000;
constexpr int64_t kSoonestMs = 100;
// Attempts in the last third of a certificate's time, at least.
constexpr int64_t kAttempts = 20;

std::string TextOf(const JobEpoch& of) {
  return absl::StrCat("job ", of.job_uid, ", epoch ", of.epoch);
}

}  // namespace

struct TrainerCertificates::Timer {
  explicit Timer(boost::asio::io_context& context) : timer(context) {}
  boost::asio::steady_timer timer;
};

TrainerCertificates::TrainerCertificates(boost::asio::io_context& context, Callbacks callbacks)
    : callbacks_(std::move(callbacks)), timer_(std::make_unique<Timer>(context)) {}

TrainerCertificates::~TrainerCertificates() = default;

void TrainerCertificates::Get(const JobEpoch& of, const Done& done) {
  Entry& entry = entries_[of];
  if (entry.identity.key.empty()) {
    entry.identity.key = MakePrivateKey();
  }
  if (!entry.identity.certificate.empty() && SystemClock::Get().WallMs() < entry.next_ms) {
    done(entry.identity);
    return;
  }
  Ask(of, done);
}

void TrainerCertificates::Keep(const std::set<JobEpoch>& used) {
  std::erase_if(entries_, [&used](const auto& entry) { return !used.contains(entry.first); });
}

void TrainerCertificates::Ask(const JobEpoch& of, const Done& done) {
  const absl::StatusOr<std::string> request = MakeCertificateRequest(entries_.at(of).identity.key);
  if (!request.ok()) {
    done(request.status());
    return;
  }
  callbacks_.certify(of.job_uid,
                     *request,
                     [this, of, done](const absl::StatusOr<FleetChannel::Certificate>& answer) {
                       done(Take(of, answer));
                     });
}

absl::StatusOr<TlsIdentity> TrainerCertificates::Take(
    const JobEpoch& of, const absl::StatusOr<FleetChannel::Certificate>& certificate) {
  RETURN_IF_ERROR(certificate.status());
  const auto found = entries_.find(of);
  if (found == entries_.end()) {
    return absl::CancelledError(absl::StrCat(TextOf(of), " is over here"));
  }
  Entry& entry = found->second;
  RETURN_IF_ERROR(CheckKeyPair(certificate->certificate, entry.identity.key));
  if (SplitCertificates(certificate->authority).empty()) {
    return absl::InvalidArgumentError("the authority: expected certificates");
  }
  ASSIGN_OR_RETURN(const CertificateDates dates, DatesOf(certificate->certificate));
  entry.identity.certificate = certificate->certificate;
  entry.identity.authority = certificate->authority;
  entry.next_ms = dates.renew_ms;
  entry.end_ms = dates.end_ms;
  WaitForNext();
  return entry.identity;
}

void TrainerCertificates::WaitForNext() {
  const int64_t now_ms = SystemClock::Get().WallMs();
  int64_t pause_ms = kAgainMs;
  bool some = false;
  for (const auto& [of, entry] : entries_) {
    if (!entry.identity.certificate.empty() && !entry.asking) {
      some = true;
      pause_ms = std::min(pause_ms, std::max(kSoonestMs, entry.next_ms - now_ms));
    }
  }
  if (!some) {
    timer_->timer.cancel();
    return;
  }
  timer_->timer.expires_after(std::chrono::milliseconds(pause_ms));
  timer_->timer.async_wait([this](boost::system::error_code error) {
    if (error) {
      return;
    }
    std::vector<JobEpoch> due;
    for (const auto& [of, entry] : entries_) {
      if (!entry.identity.certificate.empty() && !entry.asking &&
          SystemClock::Get().WallMs() >= entry.next_ms) {
        due.push_back(of);
      }
    }
    for (const JobEpoch& of : due) {
      Renew(of);
    }
    WaitForNext();
  });
}

void TrainerCertificates::Renew(const JobEpoch& of) {
  entries_.at(of).asking = true;
  Ask(of, [this, of](const absl::StatusOr<TlsIdentity>& identity) { OnRenewed(of, identity); });
}

void TrainerCertificates::OnRenewed(const JobEpoch& of,
                                    const absl::StatusOr<TlsIdentity>& identity) {
  const auto found = entries_.find(of);
  if (found == entries_.end()) {
    return;
  }
  Entry& entry = found->second;
  entry.asking = false;
  if (identity.ok()) {
    entry.failures = 0;
    log::Info(absl::StrCat(TextOf(of), ": the trainers' certificate was renewed"));
    callbacks_.renewed(of, *identity);
  } else {
    const int64_t now_ms = SystemClock::Get().WallMs();
    entry.next_ms = now_ms + std::clamp((entry.end_ms - now_ms) / kAttempts, kSoonestMs, kAgainMs);
    if (++entry.failures == 1) {  // an outage may last for hours
      log::Warning(absl::StrCat(TextOf(of),
                                ": the trainers' certificate could not be renewed: ",
                                std::string(identity.status().message())));
    }
  }
  WaitForNext();
}

void Fill(const TlsIdentity& identity, v1::StoreIdentity& message) {
  message.set_authority(identity.authority);
  message.set_certificate(identity.certificate);
  message.set_key(identity.key);
}

}  // namespace ravel::daemon
