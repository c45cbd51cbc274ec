#include "worker/daemon/notice_file.h"

#include <array>
#include <csignal>
#include <ctime>
#include <utility>

#include <boost/system/error_code.hpp>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "common/plain_text.h"

namespace ravel::daemon {
namespace {

constexpr size_t kMaxReasonBytes = 256;
constexpr char kNoReason[] = "its host goes away";

}  // namespace

std::optional<std::string> ReadNotice(const std::string& path) {
  // A pipe without a writer must not stop the daemon.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const bool absent = errno == ENOENT || errno == ENOTDIR;
    return absent ? std::nullopt : std::optional<std::string>(kNoReason);
  }
  std::array<char, kMaxReasonBytes + 1> bytes{};
  const ssize_t got = read(fd, bytes.data(), bytes.size());
  close(fd);
  std::string line(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0);
  line = line.substr(0, line.find_first_of("\r\n"));
  line = CutText(EscapeControlText(line), kMaxReasonBytes);
  return line.empty() ? kNoReason : line;
}

int AwaitNoNotice(const std::string& path, std::chrono::milliseconds look_every) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(look_every);
  const timespec wait{.tv_sec = seconds.count(),
                      .tv_nsec = std::chrono::nanoseconds(look_every - seconds).count()};
  while (ReadNotice(path)) {
    const int signal_number = sigtimedwait(&ends, nullptr, &wait);
    if (signal_number > 0) {
      return signal_number;
    }
  }
  return 0;
}

NoticeWatch::NoticeWatch(boost::asio::io_context& loop,
                         std::string path,
                         std::chrono::milliseconds look_every,
                         std::function<void(const std::string& reason)> on_notice)
    : path_(std::move(path)),
      look_every_(look_every),
      on_notice_(std::move(on_notice)),
      timer_(loop) {}

void NoticeWatch::Start() {
  if (const std::optional<std::string> reason = ReadNotice(path_)) {
    on_notice_(*reason);
    return;
  }
  timer_.expires_after(look_every_);
  timer_.async_wait([this](boost::system::error_code error) {
    if (!error) {
      Start();
    }
  });
}

}  // namespace ravel::daemon
