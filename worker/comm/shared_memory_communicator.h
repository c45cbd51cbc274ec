#pragma once

// The communicator of ranks that can read each other's memory: the one core of `local` and `shm`.

#include <memory>

#include "worker/comm/communicator.h"
#include "worker/comm/group_block.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/shared_segment.h"

namespace ravel::comm {

// Waits have no time-out: they end because all arrive, or by Abort, or when a rank destroys its
// communicator.
class SharedMemoryCommunicator final : public Communicator {
 public:
  // shared_ptr because the ranks of a local group hold the same segment, and any of them may go
  // last.
  SharedMemoryCommunicator(std::shared_ptr<SharedSegment> segment, int rank, int size);
  // Peers that still wait for this rank are told that it left.
  ~SharedMemoryCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* transport() const override { return segment_->transport(); }
  bool shared_memory() const override { return true; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::Status Barrier(const CollectiveTag& tag) override;
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override;
  void Abort(std::string_view reason) override;
  IssueState issued() const override { return issues_.state(); }

 private:
  // Publishes what this rank issues and waits for all.
  absl::Status Meet(const IssueRecord& issue, int64_t offset);
  absl::Status AgreeOnSizes(const ArenaSizes& sizes);
  // All ranks' bytes through the bounce buffers, one barrier per round.
  absl::Status BounceGather(const IssueRecord& issue,
                            std::span<const std::byte> mine,
                            std::span<std::byte> all);
  absl::Status GatherFromArena(const IssueRecord& issue, const AllGatherOptions& options);
  // Offset in the shared arena, or -1 if [data, data + bytes) is not inside this rank's part or the
  // common part.
  int64_t ReadableOffset(const void* data, int64_t bytes) const;
  bool IsOwnSlice(const AllGatherOptions& options) const;
  absl::Status AllSucceeded(const IssueRecord& issue, const absl::Status& mine);

  std::shared_ptr<SharedSegment> segment_;
  int rank_;
  int size_;
  GroupBlock block_;
  IssueLog issues_;
  PrivateMapping private_;
  ArenaSizes sizes_;
  bool allocated_ = false;
  int64_t symmetric_stride_ = 0;
  std::byte* common_ = nullptr;  // the common part, then the symmetric parts in rank order
  std::byte* symmetric_ = nullptr;
};

}  // namespace ravel::comm
