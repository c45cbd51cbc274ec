#pragma once

// Where commands that arrive on the watchdog's thread meet the step thread.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "worker/optim/decide_step.h"

namespace ravel::trainer {

// Thread-safe.
class CommandBox {
 public:
  // From the watchdog.
  void AllowSteps(int64_t until_step);
  void RequestSave(int64_t sequence, bool then_stop);
  void DeliverRecords(const std::string& group, std::vector<std::string> records);
  // Ends every wait, present and later, with `status`.
  void Close(absl::Status status);

  // For the step thread.
  // Waits until `step` finished steps are allowed.
  absl::Status WaitForStep(int64_t step);
  // Whether that would return at once.
  bool Allows(int64_t step);
  absl::StatusOr<std::vector<std::string>> WaitForRecords(std::string_view group);
  // Why every wait ends; OK while none does.
  absl::Status closed();
  // What this rank brings to the next step's agreement.
  optim::ControlWord control();

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t until_step_ ABSL_GUARDED_BY(mutex_) = -1;
  optim::ControlWord control_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::vector<std::string>, std::less<>> records_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::trainer
