#pragma once

// Reads what a launch asks of this node beside devices and paths, secrets included. Secrets may lie
// on a mount that hangs: they are read on a thread, and hold up nothing.

#include <chrono>
#include <functional>
#include <string>

#include "common/status.h"
#include "worker/daemon/bounded_threads.h"
#include "worker/daemon/launch_settings_proto.h"

namespace ravel::daemon {

struct ReadSettings {
  absl::Status status = {};
  // The reason for a status that is not OK: EnvironmentRefused, or PreflightFailed when the secrets
  // did not answer in time.
  std::string reason = {};
  LaunchSettings settings = {};
};

// Used only from the thread of its io_context.
class LaunchSettingsReader {
 public:
  LaunchSettingsReader(boost::asio::io_context& context,
                       std::chrono::milliseconds limit,
                       const LaunchRules& rules);
  // `done` is called once, on the io_context's thread, after the limit at the latest: from inside
  // this call for a launch without secrets, or while kMostHanging earlier reads hang.
  void Start(const v1::Launch& launch, const std::function<void(const ReadSettings&)>& done);

  static constexpr int kMostHanging = 8;

 private:
  const std::chrono::milliseconds limit_;
  const LaunchRules rules_;
  BoundedThreads threads_;
};

}  // namespace ravel::daemon
