#pragma once

// State that the NCCL communicators of one rank share: they fail together, whichever notices first.

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/cuda_host/nccl_group.h"
#include "worker/comm/collective_ledger.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/nccl_communicator.h"

namespace ravel::comm {

// One communicator as the root sees it. Thread-safe.
class NcclPart {
 public:
  virtual ~NcclPart() = default;
  virtual kernels::NcclGroup& group() = 0;
  // Looks at work that was issued; an error names what it found. Does not block.
  virtual absl::Status Poll() = 0;
};

// Thread-safe.
class NcclRoot {
 public:
  explicit NcclRoot(NcclOptions options) : options_(std::move(options)) {}

  const NcclOptions& options() const { return options_; }
  kernels::CudaGpu& gpu() { return *options_.gpu; }
  CollectiveLedger& ledger() { return ledger_; }

  // A part that joins after a failure is aborted at once. Parts are aborted together.
  void Join(std::shared_ptr<NcclPart> part);
  void Leave(const NcclPart* part);

  // The first failure, which is the one that all calls report.
  absl::Status Failure() const { return failure_.Get(); }
  // Records `status` if it is the first failure, ends all waits and aborts all groups.
  absl::Status Fail(absl::Status status);
  // Aborts all groups; returns when their work has left the device, whoever has begun it.
  void AbortAll();
  // Looks at the work of all parts. Aborts nothing and does not block.
  absl::Status Poll();

  // Waits until `done` says true. A failure of this rank ends the wait, and an error of `done` is
  // one.
  using Done = std::function<absl::StatusOr<bool>()>;
  absl::Status WaitFor(const Done& done);
  // The same within the time of set-ups, or until the owner gives up. `what` is waited for.
  absl::Status WaitForSetup(const std::string& what, const Done& done);

 private:
  absl::Status Wait(const Done& done, const std::function<absl::Status()>& give_up);

  const NcclOptions options_;
  CollectiveLedger ledger_;
  StickyFailure failure_;
  Mutex abort_mutex_;  // before mutex_ and those of groups
  Mutex mutex_;
  CondVar failed_;
  std::vector<std::shared_ptr<NcclPart>> parts_ ABSL_GUARDED_BY(mutex_);
};

// Returns a hint on a memory file system that is small, as in containers: " (/dev/shm has 67108864
// bytes, and NCCL may need more: mount memory there)"; empty where it is large enough.
std::string SmallSharedMemory(const std::string& folder);

}  // namespace ravel::comm
