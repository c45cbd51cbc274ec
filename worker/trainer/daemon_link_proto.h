#pragma once

// The daemon's frames as the plain values of supervision.h.

#include <memory>
#include <string>

#include "common/status.h"
#include "worker/child_link.h"
#include "worker/trainer/supervision.h"

namespace ravel::trainer {

// Speaks for one (job, epoch, rank). Reporting is thread-safe; Receive belongs to one thread.
class DaemonLinkReporter final : public Reporter {
 public:
  explicit DaemonLinkReporter(std::unique_ptr<TrainerLink> link) : link_(std::move(link)) {}

  // Waits for the next command; a frame without one is skipped. An Assignment decides who this
  // reporter speaks for. Errors: the daemon is gone (Unavailable), or a frame that cannot be
  // understood, marked with its exit code.
  absl::StatusOr<Command> Receive();
  // Ends a blocked Receive.
  void Shutdown() { link_->Shutdown(); }

  absl::Status Publish(const std::string& group, const std::string& record) override;
  absl::Status Ready(const TrainerReady& report) override;
  absl::Status Step(const StepReport& record) override;
  absl::Status Progress(const ProgressReport& report) override;
  absl::Status Ledger(const LedgerReport& report) override;
  absl::Status SaveStarted(int64_t step, int64_t sequence, int64_t attempt) override;
  absl::Status SaveFailed(const ravel::SaveFailed& failure) override;
  absl::Status Sealed(const ckpt::Seal& seal) override;
  absl::Status Failed(const absl::Status& failure) override;
  absl::Status Done(int64_t step) override;

 private:
  const std::unique_ptr<TrainerLink> link_;
  // Written by the first Receive, before anything is published.
  std::string job_uid_;
  int64_t epoch_ = 0;
  int64_t rank_ = 0;
};

}  // namespace ravel::trainer
