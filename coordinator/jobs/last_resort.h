#pragma once

#include <thread>

#include "common/mutex.h"

namespace ravel::coordinator {

// Ends the process when its orderly end takes too long: a thread may hang in a user's file for
// ever.
class LastResort {
 public:
  LastResort() = default;
  ~LastResort();
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

  // Once: from now on the process exits with `code` if this object is still there after 4.5 s. That
  // loses nothing: every answered request is on disk.
  void Arm(int code);

 private:
  Mutex mutex_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ravel::coordinator
