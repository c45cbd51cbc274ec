#pragma once

#include <string>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

namespace ravel::testing {

// A file system over a folder whose server never answers: every call waits there, as on a hung
// network mount. A FIFO would not do: files of a store are opened without waiting.
class HungMount {
 public:
  explicit HungMount(const std::string& folder)
      : folder_(folder), server_(open("/dev/fuse", O_RDWR | O_CLOEXEC)) {
    const std::string options =
        absl::StrCat("fd=", server_, ",rootmode=40000,user_id=0,group_id=0");
    mounted_ = server_ >= 0 && ::mount("hung", folder.c_str(), "fuse", 0, options.c_str()) == 0;
  }
  ~HungMount() {
    if (mounted_) {
      ::umount2(folder_.c_str(), MNT_DETACH);
    }
    if (server_ >= 0) {
      close(server_);
    }
  }
  HungMount(const HungMount&) = delete;
  HungMount& operator=(const HungMount&) = delete;
  bool mounted() const { return mounted_; }

 private:
  const std::string folder_;
  const int server_;
  bool mounted_ = false;
};

}  // namespace ravel::testing
