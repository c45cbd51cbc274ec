#include "coordinator/ctl/mapped_text.h"

#include <cerrno>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ravel::ctl {

absl::StatusOr<MappedText> MappedText::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return ErrnoStatus(errno, path);
  }
  struct stat info {};
  absl::Status status;
  const char* data = nullptr;
  if (fstat(fd, &info) != 0) {
    status = ErrnoStatus(errno, path);
  } else if (!S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path, ": expected a text file"));
  } else if (info.st_size > 0) {
    void* const mapped =
        mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) {
      status = ErrnoStatus(errno, absl::StrCat(path, ": mmap"));
    } else {
      data = static_cast<const char*>(mapped);
    }
  }
  close(fd);
  RETURN_IF_ERROR(status);
  return MappedText(path, data, static_cast<std::size_t>(info.st_size));
}

MappedText::MappedText(MappedText&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedText::~MappedText() {
  if (data_ != nullptr) {
    munmap(const_cast<char*>(data_), size_);
  }
}

}  // namespace ravel::ctl
