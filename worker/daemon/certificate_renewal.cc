#include "worker/daemon/certificate_renewal.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

#include "common/certificate.h"
#include "common/clock.h"
#include "common/logging.h"

namespace ravel::daemon {
namespace {

using std::chrono::milliseconds;

// Between attempts; also how often the wall clock is asked, because it may jump.
constexpr milliseconds kAgain{60'000};
constexpr milliseconds kSoonest{100};
// Attempts in the last third of a certificate's time, at least.
constexpr int64_t kAttempts = 20;

}  // namespace

struct CertificateRenewal::Timer {
  explicit Timer(boost::asio::io_context& context) : timer(context) {}
  boost::asio::steady_timer timer;
};

CertificateRenewal::CertificateRenewal(boost::asio::io_context& context,
                                       std::string work_dir,
                                       NodeIdentity identity,
                                       FleetClient* fleet)
    : work_dir_(std::move(work_dir)),
      identity_(std::move(identity)),
      fleet_(fleet),
      timer_(std::make_unique<Timer>(context)) {}

CertificateRenewal::~CertificateRenewal() = default;

void CertificateRenewal::Start() {
  Wait();
}

void CertificateRenewal::Wait() {
  const absl::StatusOr<CertificateDates> dates = DatesOf(identity_.tls.certificate);
  if (!dates.ok()) {  // it was checked when it was loaded
    log::Error(absl::StrCat("the node's certificate: ", std::string(dates.status().message())));
    return;
  }
  const int64_t now_ms = SystemClock::Get().WallMs();
  const milliseconds step{
      std::clamp((dates->end_ms - dates->renew_ms) / kAttempts, kSoonest.count(), kAgain.count())};
  const bool due = now_ms >= dates->renew_ms;
  const milliseconds pause =
      due ? step : std::min(kAgain, std::max(kSoonest, milliseconds(dates->renew_ms - now_ms)));
  timer_->timer.expires_after(pause);
  timer_->timer.async_wait([this, due](boost::system::error_code error) {
    if (error) {
      return;
    }
    if (due) {
      Renew();
    } else {
      Wait();
    }
  });
}

void CertificateRenewal::Renew() {
  const absl::StatusOr<std::string> request = MakeCertificateRequest(identity_.tls.key);
  if (!request.ok()) {
    OnCertificate(request.status());
    return;
  }
  fleet_->RenewCertificate(*request,
                           [this](const absl::StatusOr<FleetChannel::Certificate>& certificate) {
                             OnCertificate(certificate);
                           });
}

void CertificateRenewal::OnCertificate(
    const absl::StatusOr<FleetChannel::Certificate>& certificate) {
  absl::Status status = certificate.status();
  if (status.ok()) {
    NodeIdentity renewed = identity_;
    renewed.tls.certificate = certificate->certificate;
    if (!certificate->authority.empty()) {
      renewed.tls.authority = certificate->authority;
    }
    status = SaveCertificate(work_dir_, renewed);
    if (status.ok()) {
      identity_ = std::move(renewed);
    }
  }
  if (status.ok()) {
    failures_ = 0;
    log::Info("the node's certificate was renewed");
    fleet_->UseIdentity(identity_.tls);
  } else if (++failures_ == 1) {  // an outage may last for hours
    log::Warning(absl::StrCat("the node's certificate could not be renewed: ",
                              std::string(status.message())));
  }
  const absl::StatusOr<CertificateDates> dates = DatesOf(identity_.tls.certificate);
  if (dates.ok() && dates->end_ms < SystemClock::Get().WallMs()) {
    log::Error(
        "the node's certificate has expired: this node must join again, by a new token, once the "
        "old name was revoked");
  }
  Wait();
}

}  // namespace ravel::daemon
