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

namespace ravel::comm {

inline constexpr int64_t kPageBytes = 4096;
inline constexpr int kMaxSharedRanks = 256;
// Two halves per rank, used in turns.
inline constexpr int64_t kBounceBytes = int64_t{256} << 10;
inline constexpr size_t kAbortTextBytes = 1024;

// What a rank publishes before it arrives at a barrier.
struct GroupSlot {
  IssueRecord issue;
  int64_t offset = -1;  // in the arena, of the memory that peers may read; -1 = none
  int64_t reserved = 0;
};
static_assert(sizeof(GroupSlot) == 64);

// At the start of the segment; then GroupSlot[2][size], then bounce buffers [2][size]. Zero bytes
// are the initial state, but for the nonce, which the maker writes.
struct GroupHeader {
  uint64_t nonce_low = 0;
  uint64_t nonce_high = 0;
  // 0 none, 1 being written, 2 readable.
  std::atomic<uint32_t> abort_state;
  uint32_t abort_code = 0;
  char abort_text[kAbortTextBytes] = {};
  alignas(64) std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> sleepers;
  // The generation in the upper 31 bits; bit 0 is set by abort. Ranks sleep on it.
  alignas(64) std::atomic<uint32_t> generation;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Bytes of the block of a group; a multiple of the page size.
int64_t GroupBlockBytes(int size);

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
    // What ranks a and b issued differs: says so, and releases everybody.
    std::function<void(int a, const IssueRecord&, int b, const IssueRecord&)> on_mismatch;
  };
  explicit GroupBlock(Options options);

  GroupHeader& header() { return *header_; }
  // This rank's slot for the next barrier.
  GroupSlot& mine() { return *SlotOf(parity_, rank_); }
  // A rank's slot of the last barrier; readable until this rank arrives at the next one.
  const GroupSlot& last(int rank) { return *SlotOf(parity_ ^ 1, rank); }
  // The bounce buffer that goes with the next or the last barrier; the same lifetimes.
  std::byte* mine_bounce() { return BounceOf(parity_, rank_); }
  const std::byte* last_bounce(int rank) { return BounceOf(parity_ ^ 1, rank); }

  // All ranks have arrived with equal issue hashes, and what they wrote before is visible.
  // Otherwise the failure of the group. Spins briefly, then sleeps:
  // there may be more ranks than cores.
  absl::Status Barrier();

 private:
  GroupSlot* SlotOf(uint32_t parity, int rank);
  std::byte* BounceOf(uint32_t parity, int rank);
  bool IssuesAgree();
  bool WaitForRelease(uint32_t generation);

  const Options options_;
  GroupHeader* const header_;
  const int rank_;
  const int size_;
  int spins_;
  uint32_t parity_ = 0;
};

}  // namespace ravel::comm
