#pragma once

// A committed step is needed by somebody or is being deleted, never both.

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "common/mutex.h"

namespace ravel::coordinator {

// Knows the steps of all jobs of this process, by uid. Thread-safe; does no I/O.
class StepClaims {
 public:
  // The newest launch of the job reads this step. False: it is being deleted.
  bool Reserve(const std::string& uid, int64_t step);
  void EndRestore(const std::string& uid);
  // A rollback asks for a step: it stays until EndWant. False: it is being deleted.
  bool Want(const std::string& uid, int64_t step);
  void Unwant(const std::string& uid, int64_t step);
  void EndWant(const std::string& uid);
  // Returns true if no claim needs the step; it then counts as being deleted until EndDeleting.
  bool MayDelete(const std::string& uid, int64_t step);
  void EndDeleting(const std::string& uid);

 private:
  struct Claims {
    int64_t reserved = -1;
    std::set<int64_t> wanted;
    std::set<int64_t> deleting;
  };
  // Forgets a job of which there is nothing to know.
  void Tidy(const std::string& uid) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::map<std::string, Claims> claims_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::coordinator
