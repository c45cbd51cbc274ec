// Reads a trainer's stdout and stderr, cuts them into lines, and writes each line to a rotating
// file and to batches for the coordinator. Memory is bounded everywhere: lines are cut at 16 KiB,
// batches hold 200 lines or 100 ms, and the tail of stderr, which explains a crash, is 4 KiB. The
// pump is shared with its handlers, so that the relay may be destroyed from within a callback.

#include "worker/daemon/log_relay.h"

#include <array>
#include <chrono>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <boost/asio/buffer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "common/logging.h"
#include "common/utf8.h"

namespace ravel::daemon {
namespace {

namespace asio = boost::asio;

constexpr size_t kMaxLineBytes = 16 << 10;
constexpr size_t kMaxTailBytes = 4 << 10;
constexpr size_t kMaxBatchLines = 200;
constexpr int kOldFiles = 3;
constexpr std::chrono::milliseconds kBatchDelay{100};

}  // namespace

BoundedLogFile::BoundedLogFile(std::string path, int64_t max_bytes)
    : path_(std::move(path)), max_bytes_(max_bytes) {
  std::error_code ignored;  // Open reports what matters
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
  Open();
}

BoundedLogFile::~BoundedLogFile() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

void BoundedLogFile::Open() {
  fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640);
  bytes_ = fd_ < 0 ? 0 : static_cast<int64_t>(lseek(fd_, 0, SEEK_END));
  if (fd_ < 0 && !reported_) {
    reported_ = true;
    log::Warning(absl::StrCat("trainer output is not kept: ",
                              std::string(ErrnoStatus(errno, path_).message())));
  }
}

void BoundedLogFile::Rotate() {
  close(fd_);
  std::error_code ignored;
  for (int i = kOldFiles; i > 0; --i) {
    const std::string from = i == 1 ? path_ : absl::StrCat(path_, ".", i - 1);
    std::filesystem::rename(from, absl::StrCat(path_, ".", i), ignored);
  }
  Open();
}

void BoundedLogFile::Append(const std::string& line) {
  if (fd_ < 0) {
    return;
  }
  if (bytes_ + static_cast<int64_t>(line.size()) + 1 > max_bytes_ && bytes_ > 0) {
    Rotate();
  }
  const std::string text = line + "\n";
  const ssize_t written = fd_ < 0 ? 0 : write(fd_, text.data(), text.size());
  if (written < 0 && !reported_) {
    reported_ = true;
    log::Warning(absl::StrCat("trainer output is not kept: ",
                              std::string(ErrnoStatus(errno, path_).message())));
  }
  bytes_ += written > 0 ? static_cast<int64_t>(written) : 0;
}

class LogRelay::Pump : public std::enable_shared_from_this<Pump> {
 public:
  Pump(asio::io_context& context, int out, int err, std::string path, Callbacks callbacks)
      : streams_{Stream(context, out), Stream(context, err)},
        timer_(context),
        file_(std::move(path)),
        callbacks_(std::move(callbacks)) {}

  void Start() {
    for (size_t i = 0; i < streams_.size(); ++i) {
      ReadNext(i);
    }
  }

  void Close() {
    callbacks_ = {};
    timer_.cancel();
    for (Stream& stream : streams_) {
      boost::system::error_code ignored;
      stream.pipe.close(ignored);
    }
  }

  void FlushAll() {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (!streams_[i].partial.empty()) {
        AddLine(i, std::exchange(streams_[i].partial, {}));
      }
    }
    FlushBatch();
  }

  std::string Tail() const {
    std::string text;
    for (const std::string& line : tail_) {
      absl::StrAppend(&text, line, "\n");
    }
    return text;
  }

 private:
  struct Stream {
    Stream(asio::io_context& context, int fd) : pipe(context, fd) {}
    asio::posix::stream_descriptor pipe;
    std::array<char, 16 << 10> buffer = {};
    std::string partial;
    bool open = true;
  };
  static constexpr size_t kErr = 1;

  void ReadNext(size_t index) {
    streams_[index].pipe.async_read_some(
        asio::buffer(streams_[index].buffer),
        [self = shared_from_this(), index](boost::system::error_code error, size_t count) {
          if (error) {
            self->StreamEnded(index);
            return;
          }
          self->Consume(index, std::string_view(self->streams_[index].buffer.data(), count));
          self->ReadNext(index);
        });
  }

  void StreamEnded(size_t index) {
    streams_[index].open = false;
    if (streams_[0].open || streams_[1].open) {
      return;
    }
    FlushAll();
    if (const auto closed = std::exchange(callbacks_.closed, {})) {
      closed();
    }
  }

  void Consume(size_t index, std::string_view bytes) {
    std::string& partial = streams_[index].partial;
    while (!bytes.empty()) {
      const size_t end = bytes.find('\n');
      partial.append(bytes.substr(0, end));
      if (end == std::string_view::npos) {
        break;
      }
      AddLine(index, std::exchange(partial, {}));
      bytes.remove_prefix(end + 1);
    }
    while (partial.size() >= kMaxLineBytes) {
      AddLine(index, partial.substr(0, kMaxLineBytes));
      partial.erase(0, kMaxLineBytes);
    }
  }

  void AddLine(size_t index, std::string line) {
    if (!line.empty() && line.back() == '\r') {
      line.pop_back();
    }
    line = ReplaceInvalidUtf8(line);
    file_.Append(line);
    if (index == kErr) {
      tail_bytes_ += line.size() + 1;
      tail_.push_back(line);
      while (tail_bytes_ > kMaxTailBytes && tail_.size() > 1) {
        tail_bytes_ -= tail_.front().size() + 1;
        tail_.pop_front();
      }
    }
    if (batch_.lines.empty()) {
      batch_.first_seq = next_seq_;
      StartTimer();
    }
    ++next_seq_;
    batch_.lines.push_back(std::move(line));
    if (batch_.lines.size() >= kMaxBatchLines) {
      FlushBatch();
    }
  }

  void StartTimer() {
    timer_.expires_after(kBatchDelay);
    timer_.async_wait([self = shared_from_this()](boost::system::error_code error) {
      if (!error) {
        self->FlushBatch();
      }
    });
  }

  void FlushBatch() {
    if (batch_.lines.empty()) {
      return;
    }
    timer_.cancel();
    LogLines lines = std::exchange(batch_, {});
    if (const auto deliver = callbacks_.batch) {
      deliver(std::move(lines));
    }
  }

  std::array<Stream, 2> streams_;
  asio::steady_timer timer_;
  BoundedLogFile file_;
  Callbacks callbacks_;
  LogLines batch_;
  int64_t next_seq_ = 1;
  std::deque<std::string> tail_;
  size_t tail_bytes_ = 0;
};

LogRelay::LogRelay(
    asio::io_context& context, int out, int err, std::string path, Callbacks callbacks)
    : pump_(std::make_shared<Pump>(context, out, err, std::move(path), std::move(callbacks))) {
  pump_->Start();
}

LogRelay::~LogRelay() {
  pump_->Close();
}

std::string LogRelay::Tail() const {
  return pump_->Tail();
}

void LogRelay::Flush() {
  pump_->FlushAll();
}

}  // namespace ravel::daemon
