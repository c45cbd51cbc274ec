#pragma once

// One rank's place in one NCCL group: what was issued there and how far it has come, what peers
// issued, and the way of host memory through the device.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/cuda_host/nccl_group.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/nccl_root.h"

namespace ravel::comm {

// A rank's announcement to the others of a group before a collective of the host and, where
// collectives are checked, before every other one: its record, and host bytes if they fit.
struct NcclSlot {
  static constexpr size_t kBytes = 256;
  IssueRecord issue;
  std::array<std::byte, kBytes - sizeof(IssueRecord)> bytes = {};
};
static_assert(sizeof(NcclSlot) == NcclSlot::kBytes);

// Poll comes from any thread, all else from the thread of the calls.
class NcclMember final : public NcclPart {
 public:
  // `root` outlives it.
  NcclMember(NcclRoot& root,
             std::shared_ptr<kernels::NcclGroup> group,
             std::shared_ptr<IssueLog> log,
             int rank);

  kernels::NcclGroup& group() override { return *group_; }
  absl::Status Poll() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  IssueLog& log() { return *log_; }
  kernels::CudaStream& host_stream() { return *host_stream_; }

  // Memory, events and the stream of host collectives, all that there will be: making some later
  // may wait for the device, and so for peers.
  absl::Status Prepare();

  // Before a tensor collective on `stream`: peers learn of it, if collectives are checked.
  absl::Status Announce(const IssueRecord& issue, kernels::CudaStream& stream);
  // After it was issued: waits until NCCL has taken it, for which peers may have to come, and
  // remembers to look for its end.
  absl::Status Launched(kernels::CudaStream& stream);
  // A collective that needs no work of a device is through, as far as those before it are. While a
  // log sees the stream's calls, nothing is marked: these marks differ from step to step.
  absl::Status Passed(kernels::CudaStream& stream);

  // A collective of hosts: all ranks' bytes, in rank order, once all ranks have issued the same.
  // Blocks.
  absl::Status HostGather(const IssueRecord& issue,
                          std::span<const std::byte> mine,
                          std::span<std::byte> all);

 private:
  // Issued work whose end an event tells.
  struct Mark {
    kernels::CudaEvent event;
    uint64_t sequence = 0;  // 0: free
  };
  static constexpr size_t kMarks = 32;
  using Marks = std::array<Mark, kMarks>;

  absl::Status Describe(const absl::Status& status) const;
  absl::StatusOr<bool> Settled();
  absl::Status WaitSettled();
  // On the stream: the slots of all ranks reach `pinned` by way of `device`.
  absl::Status GatherSlots(kernels::CudaStream& stream, std::byte* device, std::byte* pinned);
  absl::Status CheckSlots(const std::byte* pinned) const;
  absl::Status WaitHost();
  absl::Status GatherChunks(std::span<const std::byte> mine, std::span<std::byte> all);
  // Frees the marks whose work is done; what peers announced there is looked at first.
  absl::Status Retire() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompleteUpTo(uint64_t sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::byte* AnnouncedAt(const kernels::CudaMemory& memory, uint64_t sequence) const;
  int64_t slots_bytes() const { return static_cast<int64_t>(NcclSlot::kBytes) * size_; }

  NcclRoot& root_;
  const std::shared_ptr<kernels::NcclGroup> group_;
  const std::shared_ptr<IssueLog> log_;
  const int rank_;
  const int size_;
  const int64_t chunk_bytes_;  // of each rank, of host bytes that fit no slot

  // Stream, event and buffers of host collectives.
  std::unique_ptr<kernels::CudaStream> host_stream_;
  kernels::CudaEvent host_done_;
  kernels::CudaMemory host_device_, host_pinned_;
  kernels::CudaMemory chunk_device_, chunk_pinned_;
  // Buffers of announcements: kMarks places of slots_bytes().
  kernels::CudaMemory announced_device_, announced_pinned_;

  Mutex mutex_;
  Marks announcements_ ABSL_GUARDED_BY(mutex_);
  Marks marks_ ABSL_GUARDED_BY(mutex_);
  uint64_t completed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ravel::comm
