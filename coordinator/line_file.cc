#include "coordinator/line_file.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ravel::coordinator {
namespace {

class ReadOnly {
 public:
  explicit ReadOnly(const std::string& path)
      : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)), error_(fd_ < 0 ? errno : 0) {}
  ~ReadOnly() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  ReadOnly(const ReadOnly&) = delete;
  ReadOnly& operator=(const ReadOnly&) = delete;
  int error() const { return error_; }
  // Appends up to `size` bytes from `offset`.
  absl::Status Read(int64_t offset, int64_t size, std::string& text) const {
    const size_t before = text.size();
    text.resize(before + static_cast<size_t>(size));
    size_t got = 0;
    while (got < static_cast<size_t>(size)) {
      const ssize_t count = pread(fd_,
                                  text.data() + before + got,
                                  static_cast<size_t>(size) - got,
                                  offset + static_cast<int64_t>(got));
      if (count < 0 && errno == EINTR) {
        continue;
      }
      if (count < 0) {
        return ErrnoStatus(errno, "read");
      }
      if (count == 0) {
        break;
      }
      got += static_cast<size_t>(count);
    }
    text.resize(before + got);
    return absl::OkStatus();
  }

 private:
  int fd_;
  int error_;
};

}  // namespace

absl::StatusOr<int64_t> ReadLines(
    const std::string& path,
    int64_t offset,
    int64_t end,
    int64_t max_bytes,
    const std::function<bool(std::string_view line, int64_t behind)>& use) {
  const ReadOnly file(path);
  if (file.error() == ENOENT) {
    return offset;
  }
  if (file.error() != 0) {
    return ErrnoStatus(file.error(), path);
  }
  const int64_t last = std::min(end, offset + std::max<int64_t>(max_bytes, 1));
  const int64_t block = std::clamp<int64_t>(max_bytes, 4096, kLineBlockBytes);
  std::string text;  // begins at `offset`
  while (offset < last) {
    const size_t before = text.size();
    const int64_t at = offset + static_cast<int64_t>(before);
    RETURN_IF_ERROR(Annotate(file.Read(at, std::min(block, end - at), text), path));
    if (text.size() == before) {
      return offset;  // no newline before the end
    }
    size_t begin = 0;
    for (size_t newline = text.find('\n', before); newline != std::string::npos;
         newline = text.find('\n', begin)) {
      const std::string_view line = std::string_view(text).substr(begin, newline - begin);
      begin = newline + 1;
      if (!use(line, offset + static_cast<int64_t>(begin))) {
        return offset + static_cast<int64_t>(begin);
      }
    }
    offset += static_cast<int64_t>(begin);
    text.erase(0, begin);
  }
  return offset;
}

int64_t FileSize(const std::string& path) {
  struct stat facts = {};
  return stat(path.c_str(), &facts) == 0 ? facts.st_size : 0;
}

absl::StatusOr<int64_t> OffsetOfLastLines(const std::string& path, int64_t end, int64_t count) {
  const ReadOnly file(path);
  if (file.error() != 0) {
    return ErrnoStatus(file.error(), path);
  }
  int64_t newlines = 0;
  int64_t begin = end;
  int64_t most = 4096;
  while (begin > 0) {
    const int64_t size = std::min(begin, most);
    most = std::min(2 * most, kLineBlockBytes);
    std::string block;
    RETURN_IF_ERROR(Annotate(file.Read(begin - size, size, block), path));
    for (size_t i = block.size(); i > 0; --i) {
      if (block[i - 1] == '\n' && ++newlines > count) {
        return begin - size + static_cast<int64_t>(i);
      }
    }
    begin -= size;
  }
  return 0;
}

}  // namespace ravel::coordinator
