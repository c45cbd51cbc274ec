#pragma once

// A look at a checkpoint store that users name, with an end: a mount that hangs holds its own
// thread only, and whoever asked is told which path did not answer.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/status.h"
#include "coordinator/jobs/work_pools.h"

namespace ravel::coordinator {

struct LookLimits {
  int64_t each_ms = 5000;   // for one path
  int64_t all_ms = 60'000;  // for all of them
};

// Says which path is looked at now. Thread-safe.
class LookProgress {
 public:
  LookProgress();
  ~LookProgress();
  // The job field that names the path.
  void At(const std::string& field);

 private:
  friend absl::Status BoundedLook(WorkPool& pool,
                                  const std::string& what,
                                  LookLimits limits,
                                  std::function<void(LookProgress&)> work);
  struct State;
  std::unique_ptr<State> state_;
};

// Runs `work` on the pool and waits for it. DeadlineExceeded, "FIELD: no answer within 5 s", when
// it takes too long: `work` may then go on for ever, so it owns all that it touches.
absl::Status BoundedLook(WorkPool& pool,
                         const std::string& what,
                         LookLimits limits,
                         std::function<void(LookProgress&)> work);

}  // namespace ravel::coordinator
