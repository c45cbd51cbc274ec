#pragma once

#include <string>
#include <string_view>

#include "common/status.h"

namespace ravel::ctl {

// A text file mapped read-only.
class MappedText {
 public:
  static absl::StatusOr<MappedText> Open(const std::string& path);
  MappedText(MappedText&& other) noexcept;
  MappedText& operator=(MappedText&&) = delete;
  ~MappedText();
  const std::string& path() const { return path_; }
  std::string_view text() const { return {data_, size_}; }

 private:
  MappedText(std::string path, const char* data, std::size_t size)
      : path_(std::move(path)), data_(data), size_(size) {}
  std::string path_;
  const char* data_;
  std::size_t size_;
};

}  // namespace ravel::ctl
