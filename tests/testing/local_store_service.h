#pragma once

// A ravel-store in this process, plaintext on loopback.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ravel::testing {

class LocalStore {
 public:
  // `folders` are made; each is a disk. Port 0: a free one.
  explicit LocalStore(std::vector<std::string> folders, int64_t quota_bytes = 0, int port = 0);
  ~LocalStore();
  LocalStore(const LocalStore&) = delete;
  LocalStore& operator=(const LocalStore&) = delete;

  int port() const;
  // ravel://127.0.0.1:PORT/PATH
  std::string Url(std::string_view path) const;
  // The value of a counter of its page: "resumed_uploads", "bad_blocks", "refused".
  int64_t Count(std::string_view name) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace ravel::testing
