#pragma once

// The communicator of ranks that can read each other's memory: the one core of `local` and `shm`.

#include <memory>
#include <string>
#include <vector>

#include "kernels/stream.h"
#include "worker/comm/abort_domain.h"
#include "worker/comm/collective_ledger.h"
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
  // Ranks of one host that are some of a larger group. Messages and the ledger name them by their
  // ranks there.
  struct HostRanks {
    std::vector<int> ranks;    // of the larger group, ascending; index: rank here
    CollectiveLedger& ledger;  // of the larger group; outlives this
  };
  SharedMemoryCommunicator(std::shared_ptr<SharedSegment> segment, int rank, HostRanks host);
  // Peers that still wait for this rank are told that it left.
  ~SharedMemoryCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const char* transport() const override { return root_->segment->transport(); }
  bool shared_memory() const override { return true; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override;
  absl::Status Barrier(const CollectiveTag& tag) override;
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override;
  void Abort(std::string_view reason) override;
  IssueState issued() const override { return log_->state(); }
  PeerWait TakePeerWait() override { return block_.waits().Take(log_->group().members); }
  CollectiveLedger& ledger() override { return root_->ledger; }

 private:
  // State that a rank's communicators share.
  struct Root {
    Root(std::shared_ptr<SharedSegment> its_segment,
         int its_rank,
         std::vector<int> its_names,
         CollectiveLedger* its_ledger);
    std::byte* symmetric_of(int of_rank) const { return base + symmetric_begin + of_rank * stride; }
    std::byte* own_common() const { return base + CopyOf(rank) * common_stride; }
    int64_t CopyOf(int of_rank) const { return of_rank * sizes.common_copies / size; }
    // The names of these ranks, in the same order.
    std::vector<int> NamesOf(const std::vector<int>& ranks) const;

    std::shared_ptr<SharedSegment> segment;
    int rank;
    int size;
    std::vector<int> names;  // by rank, for messages
    CollectiveLedger own_ledger;
    CollectiveLedger& ledger;
    AbortDomain domain;
    // The arena: the common copies, then the symmetric parts in rank order.
    bool allocated = false;
    PrivateMapping private_part;
    ArenaSizes sizes;
    std::byte* base = nullptr;
    int64_t common_stride = 0;
    int64_t symmetric_begin = 0;
    int64_t stride = 0;
  };
  struct Member {
    std::string name;
    std::vector<int> ranks;  // of the root
    int rank = 0;
    std::byte* block = nullptr;
  };
  SharedMemoryCommunicator(std::shared_ptr<Root> root, Member member);

  // Publishes what this rank issues and waits for all.
  absl::Status Meet(const IssueRecord& issue, int64_t offset);
  // Marks the last issued collective as through, if it is.
  absl::Status Close(absl::Status status);
  absl::Status AgreeOnSizes(const ArenaSizes& sizes);
  absl::Status MapArena(const ArenaSizes& sizes);
  // All ranks' bytes through the bounce buffers, one barrier per round.
  absl::Status BounceGather(const IssueRecord& issue,
                            std::span<const std::byte> mine,
                            std::span<std::byte> all);
  absl::Status GatherFromArena(const IssueRecord& issue, const AllGatherOptions& options);
  // Offset in the shared arena, or -1 if [data, data + bytes) is not inside this rank's symmetric
  // or common part.
  int64_t ReadableOffset(const void* data, int64_t bytes) const;
  bool IsSharedSlice(const AllGatherOptions& options) const;
  absl::Status AllSucceeded(const IssueRecord& issue, const absl::Status& mine);
  // For each rank of this communicator the first member of its group.
  absl::StatusOr<std::vector<int>> AgreeOnGroups(const IssueRecord& issue,
                                                 const SplitOptions& options);
  absl::StatusOr<std::shared_ptr<SharedSegment>> ShareChild(const IssueRecord& issue,
                                                            int64_t block_bytes);

  const std::shared_ptr<Root> root_;
  const std::vector<int> ranks_;  // of the root, by rank here
  const int rank_;
  const int size_;
  const bool is_root_;
  const std::shared_ptr<IssueLog> log_;
  GroupBlock block_;
  kernels::CpuStream stream_;  // of the copies
};

}  // namespace ravel::comm
