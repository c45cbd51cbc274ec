#include "worker/daemon/launch_settings_reader.h"

#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::daemon {
namespace {

ReadSettings Read(const v1::Launch& launch, const LaunchRules& rules) {
  absl::StatusOr<LaunchSettings> settings = SettingsOf(launch, rules);
  return settings.ok() ? ReadSettings{.settings = *std::move(settings)}
                       : ReadSettings{.status = settings.status(), .reason = "EnvironmentRefused"};
}

}  // namespace

LaunchSettingsReader::LaunchSettingsReader(boost::asio::io_context& context,
                                           std::chrono::milliseconds limit,
                                           const LaunchRules& rules)
    : limit_(limit), rules_(rules), threads_(context, kMostHanging) {}

void LaunchSettingsReader::Start(const v1::Launch& launch,
                                 const std::function<void(const ReadSettings&)>& done) {
  if (!HasSecrets(launch)) {
    done(Read(launch, rules_));
    return;
  }
  const bool started = threads_.Run(
      {limit_, limit_},
      [launch, rules = rules_, done](WorkProgress& /*progress*/) {
        return [done, read = Read(launch, rules)] { done(read); };
      },
      [done](const std::string& /*part*/, std::chrono::milliseconds limit) {
        done({.status = absl::DeadlineExceededError(absl::StrCat(
                  "environment: the job's secrets did not answer within ", limit.count(), " ms")),
              .reason = "PreflightFailed"});
      });
  if (!started) {
    done({.status = absl::ResourceExhaustedError(
              "environment: earlier reads of secrets still hang in a file system"),
          .reason = "PreflightFailed"});
  }
}

}  // namespace ravel::daemon
