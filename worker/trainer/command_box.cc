#include "worker/trainer/command_box.h"

#include <algorithm>
#include <utility>

namespace ravel::trainer {
namespace {

// Saves are short against the time between them: more than a few are never open at once.
constexpr size_t kMostRefused = 64;

}  // namespace

void CommandBox::AllowSteps(int64_t until_step) {
  MutexLock lock(mutex_);
  until_step_ = std::max(until_step_, until_step);
  changed_.NotifyAll();
}

void CommandBox::RequestSave(int64_t sequence, bool then_stop) {
  MutexLock lock(mutex_);
  control_.save_sequence = std::max(control_.save_sequence, sequence);
  if (then_stop) {
    control_.stop = 1;
  }
}

void CommandBox::AnswerSave(int64_t step, bool committed) {
  MutexLock lock(mutex_);
  answered_step_ = std::max(answered_step_, step);
  if (!committed) {
    refused_.insert(step);
  }
  if (refused_.size() > kMostRefused) {
    refused_.erase(refused_.begin());
  }
}

void CommandBox::SetSaving(bool saving) {
  MutexLock lock(mutex_);
  control_.saving = saving ? 1 : 0;
}

bool CommandBox::IsRefused(int64_t step) {
  MutexLock lock(mutex_);
  return refused_.contains(step);
}

int64_t CommandBox::answered_step() {
  MutexLock lock(mutex_);
  return answered_step_;
}

void CommandBox::DeliverRecords(const std::string& group, std::vector<std::string> records) {
  MutexLock lock(mutex_);
  records_[group] = std::move(records);
  changed_.NotifyAll();
}

void CommandBox::Close(absl::Status status) {
  MutexLock lock(mutex_);
  if (closed_.ok()) {
    closed_ = std::move(status);
  }
  changed_.NotifyAll();
}

absl::Status CommandBox::WaitForStep(int64_t step) {
  MutexLock lock(mutex_);
  while (until_step_ < step && closed_.ok()) {
    changed_.Wait(mutex_);
  }
  return closed_;
}

bool CommandBox::Allows(int64_t step) {
  MutexLock lock(mutex_);
  return until_step_ >= step;
}

absl::StatusOr<std::vector<std::string>> CommandBox::WaitForRecords(std::string_view group) {
  MutexLock lock(mutex_);
  while (closed_.ok()) {
    const auto found = records_.find(group);
    if (found != records_.end()) {
      std::vector<std::string> records = std::move(found->second);  // single use
      records_.erase(found);
      return records;
    }
    changed_.Wait(mutex_);
  }
  return closed_;
}

absl::Status CommandBox::closed() {
  MutexLock lock(mutex_);
  return closed_;
}

optim::ControlWord CommandBox::control() {
  MutexLock lock(mutex_);
  return control_;
}

}  // namespace ravel::trainer
