#pragma once

// Copies of steps (`ravelctl checkpoints copy`) that are under way in a folder, and what killed
// ones have left. A copy writes into an attempt (IsCopy) and has a mark beside it,
// pins/step-N.copy-HEX.xTIME, with the attempt's name and the process that copies. The mark is good
// until TIME and is renewed long before. It is there before the attempt is.

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <absl/base/thread_annotations.h>

#include "common/ckpt/step_layout.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/status.h"
#include "common/store/object_store.h"

namespace ravel::coordinator {

// The attempt of a copy is this much higher than the save attempt that it copies.
inline constexpr int64_t kCopyAttempt = 2'000'000;
// False for what a removal has renamed.
constexpr bool IsCopy(const ckpt::AttemptKey& key) {
  return key.attempt >= kCopyAttempt && key.attempt < kCopyAttempt + ckpt::kRemovedAttempt;
}

// A mark that is not renewed counts for this long where nobody can see whether its process lives.
// Clocks of hosts may differ by less.
inline constexpr int64_t kCopyMarkSeconds = 600;

// Marks a copy as under way for the life of this object, with a thread that renews the mark.
// Thread-compatible.
class CopyMark {
 public:
  static absl::StatusOr<std::unique_ptr<CopyMark>> Make(store::ObjectStore* store,
                                                        const ckpt::AttemptKey& attempt,
                                                        const Clock& clock = SystemClock::Get());
  ~CopyMark();
  CopyMark(const CopyMark&) = delete;
  CopyMark& operator=(const CopyMark&) = delete;

 private:
  CopyMark(store::ObjectStore* store, const ckpt::AttemptKey& attempt, const Clock& clock);
  // Writes a mark that is good for kCopyMarkSeconds, then removes the one before.
  absl::Status Renew();
  void RenewUntilEnded();

  store::ObjectStore* const store_;
  const ckpt::AttemptKey attempt_;
  const Clock* const clock_;
  const std::string holder_;
  std::string path_;  // of the mark; used by the thread while there is one
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Removes the attempts of copies that have ended, whatever step and job they are of: those whose
// mark has run out or is of a process of this host that is gone, and those without a mark, as
// interrupted copies leave them, a day after their last change. `own` stays. Returns the names.
absl::StatusOr<std::vector<std::string>> RemoveDeadCopies(store::ObjectStore& store,
                                                          int64_t now_ms,
                                                          const std::string& own = {});

}  // namespace ravel::coordinator
