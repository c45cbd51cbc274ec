#pragma once

// The notice that this host is about to go away: a file that a provider's agent or a hook of the
// site writes, because metadata services of clouds differ and this program speaks to none of them.

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>

namespace ravel::daemon {

// The text of the notice: its first line, at most 256 bytes, control characters escaped, or "its
// host goes away" where that is empty or cannot be read. Nothing: there is no such file.
std::optional<std::string> ReadNotice(const std::string& path);

// Blocks until there is no notice, or SIGTERM or SIGINT came, which must be blocked in this thread;
// the signal, or 0.
int AwaitNoNotice(const std::string& path, std::chrono::milliseconds look_every);

// Looks at the file now and then, in the loop; a look is one open of a file of this host. Used only
// from the loop's thread.
class NoticeWatch {
 public:
  NoticeWatch(boost::asio::io_context& loop,
              std::string path,
              std::chrono::milliseconds look_every,
              std::function<void(const std::string& reason)> on_notice);
  // Calls `on_notice` once, when there is a notice.
  void Start();
  void Stop() { timer_.cancel(); }

 private:
  const std::string path_;
  const std::chrono::milliseconds look_every_;
  const std::function<void(const std::string& reason)> on_notice_;
  boost::asio::steady_timer timer_;
};

}  // namespace ravel::daemon
