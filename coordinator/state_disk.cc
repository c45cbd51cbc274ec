#include "coordinator/state_disk.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/logging.h"

namespace ravel::coordinator {
namespace {

constexpr int64_t kTellEveryMs = 600'000;

}  // namespace

StateDisk::StateDisk(std::string directory, StateDiskOptions options)
    : directory_(std::move(directory)), options_(options) {}

StateDisk::Room StateDisk::Measure() const {
  struct statvfs facts = {};
  if (statvfs(directory_.c_str(), &facts) != 0) {
    return {};
  }
  const auto block = static_cast<int64_t>(facts.f_frsize);
  const int64_t whole = block * static_cast<int64_t>(facts.f_blocks);
  return {whole,
          block * static_cast<int64_t>(facts.f_bavail),
          std::min(options_.ballast_bytes, whole / 16)};
}

void StateDisk::Release() {
  const Room room = Measure();
  if (room.free >= 2 * room.ballast) {
    return;  // a database that cannot write for another reason
  }
  if (!low_.exchange(true)) {
    unlink(Path().c_str());
    log::Error(absl::StrCat(directory_,
                            ": the disk is full; running jobs go on with what was kept free, new "
                            "jobs, metrics and logs are refused until there is room"));
  }
}

absl::Status StateDisk::CheckRoom() const {
  return low_ ? absl::ResourceExhaustedError(
                    "the disk of the coordinator's state directory is full; try again when there "
                    "is room")
              : absl::OkStatus();
}

void StateDisk::Watch() {
  const auto [whole, free, ballast] = Measure();
  if (whole == 0) {
    return;
  }
  struct stat present = {};
  const bool there = stat(Path().c_str(), &present) == 0 && present.st_size >= ballast;
  if (!there && free >= 2 * ballast) {
    const int fd = open(Path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const bool made = fd >= 0 && posix_fallocate(fd, 0, ballast) == 0;
    if (fd >= 0) {
      close(fd);
    }
    if (made && low_.exchange(false)) {
      log::Info(absl::StrCat(directory_, ": there is room on the disk again"));
    } else if (!made) {
      unlink(Path().c_str());
    }
  }
  const double used = 1 - static_cast<double>(free) / static_cast<double>(whole);
  const int64_t now_ms = SystemClock::Get().MonotonicMs();
  if (used >= options_.alarm_used && (told_ms_ == 0 || now_ms - told_ms_ >= kTellEveryMs)) {
    told_ms_ = now_ms;
    log::Warning(absl::StrFormat("%s: %.0f %% of the disk are used", directory_, 100 * used));
  }
}

}  // namespace ravel::coordinator
