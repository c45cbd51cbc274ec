#pragma once

// The output of one trainer: numbered lines that go into a bounded local file, and on to the
// coordinator in batches.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace boost::asio {
class io_context;
}

namespace ravel::daemon {

struct LogLines {
  int64_t first_seq = 0;
  std::vector<std::string> lines;  // valid UTF-8, without line ends
};

// Appends lines to `path`; beyond 64 MiB the file becomes path.1, and so on up to path.3. A file
// that cannot be written is reported once and then ignored: logs never stop a trainer.
// Thread-compatible.
class BoundedLogFile {
 public:
  explicit BoundedLogFile(std::string path, int64_t max_bytes = int64_t{64} << 20);
  ~BoundedLogFile();
  BoundedLogFile(const BoundedLogFile&) = delete;
  BoundedLogFile& operator=(const BoundedLogFile&) = delete;
  void Append(const std::string& line);

 private:
  void Open();
  void Rotate();

  const std::string path_;
  const int64_t max_bytes_;
  int fd_ = -1;
  int64_t bytes_ = 0;
  bool reported_ = false;
};

// Used only from the thread of its io_context. Lines are numbered from 1 in the order in which they
// were read, stdout and stderr together; a line longer than 16 KiB is cut.
class LogRelay {
 public:
  struct Callbacks {
    std::function<void(LogLines)> batch;
    std::function<void()> closed;  // both ends of file were reached; after the last batch
  };
  // Takes over both descriptors.
  LogRelay(
      boost::asio::io_context& context, int out, int err, std::string path, Callbacks callbacks);
  ~LogRelay();

  // The last lines of stderr, at most 4 KiB.
  std::string Tail() const;
  // Sends what has been read, without waiting for the rest of a batch or of a line.
  void Flush();

 private:
  class Pump;
  // Shared with the handlers in flight.
  std::shared_ptr<Pump> pump_;
};

}  // namespace ravel::daemon
