#pragma once

// Passes commands from the watchdog's thread to the step thread.

#include <cstdint>
#include <map>
#include <set>
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
  // The save of `step` is committed, or will not be.
  void AnswerSave(int64_t step, bool committed);
  void DeliverRecords(const std::string& group, std::vector<std::string> records);
  // Ends every wait, present and later, with `status`.
  void Close(absl::Status status);

  // From the writer's thread and the step thread: what other ranks learn of this one's writer.
  void SetSaving(bool saving);
  // Returns true if the coordinator has ended the save of `step`.
  bool IsRefused(int64_t step);
  // Newest step whose save was answered; -1: none.
  int64_t answered_step();

  // For the step thread.
  // Waits until `step` finished steps are allowed.
  absl::Status WaitForStep(int64_t step);
  // Returns true if WaitForStep would return at once.
  bool Allows(int64_t step);
  absl::StatusOr<std::vector<std::string>> WaitForRecords(std::string_view group);
  // Why every wait ends; OK while none does.
  absl::Status closed();
  // Returns this rank's part in the next step's agreement.
  optim::ControlWord control();

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t until_step_ ABSL_GUARDED_BY(mutex_) = -1;
  optim::ControlWord control_ ABSL_GUARDED_BY(mutex_);
  int64_t answered_step_ ABSL_GUARDED_BY(mutex_) = -1;
  std::set<int64_t> refused_ ABSL_GUARDED_BY(mutex_);  // the newest
  std::map<std::string, std::vector<std::string>, std::less<>> records_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::trainer
