#pragma once

// The control block that the ranks of a shared-memory group have in common: barrier, abort, what
// each rank issued, and bounce buffers for data that peers cannot read in place. Plain memory with
// atomics, so it works between threads and between processes.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "common/status.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/peer_waits.h"

namespace ravel::comm {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int kMaxSharedRanks = 256;
// Two halves per rank, used in turns.
inline constexpr int64_t kBounceBytes = int64_t{256} << 10;
inline constexpr size_t kAbortTextBytes = 1024;

// A rank's published record and its arrival at a barrier, in one cache line, so that one transfer
// tells a peer everything. The line beside it stays empty: processors fetch lines in pairs, and one
// rank's write would take the other's line along.
struct alignas(128) GroupSlot {
  IssueRecord issue;
  int64_t offset = -1;                 // in the arena, of the memory that peers may read; -1 = none
  std::atomic<uint64_t> arrivals = 0;  // number of the barrier at which the rank has arrived
};
static_assert(offsetof(GroupSlot, arrivals) < 64 && sizeof(GroupSlot) == 128 &&
              std::atomic<uint64_t>::is_always_lock_free);

// At the start of the segment; then GroupSlot[2][size], then bounce buffers [2][size]. Zero bytes
// are the initial state, but for the nonce, which the maker writes.
struct FailureRecord {
  // 0 none, 1 being written, 2 readable.
  std::atomic<uint32_t> state;
  uint32_t code = 0;
  char text[kAbortTextBytes] = {};
};
struct alignas(128) GroupHeader {
  uint64_t nonce_low = 0;
  uint64_t nonce_high = 0;
  FailureRecord own;
  // Used in the group from which others were split: the reason why all of them have failed, or are
  // about to.
  FailureRecord domain;
  alignas(64) std::atomic<uint32_t> sleepers;
  // Changes when sleepers should look again; bit 0 is set by abort. Ranks sleep on it.
  alignas(64) std::atomic<uint32_t> wake_ups;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Bytes of the block of a group; a multiple of the page size.
int64_t GroupBlockBytes(int size);

// Why a group and all that was split from it fail; the first call counts. A rank that has seen any
// of them fail because of this finds it written.
void RecordDomainFailure(GroupHeader& root, const absl::Status& status);

// Releases all ranks of a group. The first call's status is the one that its ranks report.
void FailGroup(GroupHeader& header, const absl::Status& status);
// The status of FailGroup, or OK.
absl::Status GroupFailure(const GroupHeader& header);

// One rank's view of the block, used from one thread at a time.
class GroupBlock {
 public:
  struct Options {
    std::byte* memory = nullptr;  // GroupBlockBytes(size) bytes, zero at first; outlives this view
    int rank = 0;
    int size = 1;
    // Ranks that may be busy on this host at the same time: beyond its cores, waits hardly spin.
    int host_ranks = 1;
    // Header of the group from which this one was split, or its own; outlives this view.
    const GroupHeader* root = nullptr;
    // Called if ranks a and b issued different collectives: records the mismatch and releases all
    // ranks.
    std::function<void(int a, const IssueRecord&, int b, const IssueRecord&)> on_mismatch;
  };
  explicit GroupBlock(Options options);

  GroupHeader& header() { return *header_; }
  // Sets the record that this rank publishes with the next barrier.
  void Publish(const IssueRecord& issue, int64_t offset);
  // Returns the offset that a rank published with the last barrier; readable until this rank
  // arrives at the next one.
  int64_t last_offset(int rank) { return SlotOf(barriers_, rank)->offset; }
  // The bounce buffer that goes with the next or the last barrier; the same lifetimes.
  std::byte* mine_bounce() { return BounceOf(barriers_ + 1, rank_); }
  const std::byte* last_bounce(int rank) { return BounceOf(barriers_, rank); }

  // All ranks have arrived with equal issue hashes, and what they wrote before is visible.
  // Otherwise the failure of the group. Spins briefly, then sleeps:
  // there may be more ranks than cores.
  absl::Status Barrier();
  // The same in two parts: what is done between them costs no time while others are waited for.
  // Depart follows each Arrive that succeeded.
  absl::Status Arrive();
  absl::Status Depart();
  // Time that barriers waited, by the rank that came last.
  PeerWaits& waits() { return waits_; }

 private:
  // Two slots per rank, used in turns: a rank may be one barrier ahead of one that still reads.
  GroupSlot* SlotOf(uint64_t barrier, int rank);
  std::byte* BounceOf(uint64_t barrier, int rank);
  // False sets `first_missing`, whose search begins where the last call has found it.
  bool AllArrived(uint64_t barrier, int* first_missing);
  absl::Status Failure() const;
  bool IssuesAgree();
  // False when the group failed before all arrived.
  bool WaitForAll(uint64_t barrier);
  // With who came last in `missing`, if any was waited for.
  bool SpinAndSleep(uint64_t barrier, int* missing);
  bool SleepUntilAll(uint64_t barrier, int* missing);

  const Options options_;
  GroupHeader* const header_;
  const int rank_;
  const int size_;
  int spins_;
  uint64_t barriers_ = 0;  // passed
  IssueRecord mine_;       // as last published
  PeerWaits waits_;
};

}  // namespace ravel::comm
