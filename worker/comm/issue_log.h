#pragma once

// The collectives that one rank has issued on one communicator: a rolling hash, the last entries,
// and the message for two ranks that disagree.

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "worker/comm/communicator.h"

namespace ravel::comm {

// In the message of every mismatch.
inline constexpr char kMismatchText[] = "collectives differ between ranks";

enum class CollectiveKind : uint8_t {
  kBarrier = 1,
  kAllGather = 2,
  kAllGatherInPlace = 3,
  kExchange = 4,
  kRelease = 5,
  kAllGatherBytes = 6,
  kAllocateArena = 7,
  kSplit = 8,
};

// One issued collective; travels in shared memory and on the wire between equal builds.
struct IssueRecord {
  uint64_t hash = 0;  // of this collective and all before it
  uint64_t sequence = 0;
  int64_t elements = 0;
  int64_t generation = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  uint8_t op = 0;
  uint8_t phase = 0;
  uint8_t element_bytes = 4;
  int32_t unit = -1;
  int32_t group = -1;
  int16_t call = 0;
  int16_t contributors = 0;  // kExchange
};
static_assert(sizeof(IssueRecord) == 48);

const char* CollectiveKindName(CollectiveKind kind);
// "all_gather #12 (Gather of layers.3, call 0, phase first, generation 7, 1024 elements of 4
// bytes)"; "unit 3" where `unit_names` has no name for it.
std::string DescribeIssue(const IssueRecord& record, const std::vector<std::string>& unit_names);

// Thread-safe, but for Issue, Next, Keep and Complete, which are called in turns: a communicator
// runs one collective at a time.
class IssueLog {
 public:
  static constexpr size_t kRingEntries = 4096;
  // Sequences at which the hash is kept for comparison with other ranks.
  static constexpr uint64_t kMarkEvery = 256;

  struct Group {
    std::string name;          // "world", or that of the split
    std::vector<int> members;  // ranks of the whole group
  };
  // State that all logs of a rank share.
  struct Context {
    std::atomic<uint64_t> order = 0;
    mutable Mutex mutex;
    std::vector<std::string> unit_names ABSL_GUARDED_BY(mutex);
  };
  IssueLog(Group group, std::shared_ptr<Context> context);

  struct Amount {
    int64_t elements = 0;
    int64_t element_bytes = 1;
    int contributors = 0;
  };
  // The next collective, with its hash; in the log.
  IssueRecord Issue(CollectiveKind kind, const CollectiveTag& tag, const Amount& amount);
  // The same in two parts, for who has something to do before the log is written: whoever waits for
  // others writes it first. Keep does nothing for a record that is kept.
  IssueRecord Next(CollectiveKind kind, const CollectiveTag& tag, const Amount& amount);
  void Keep(const IssueRecord& record);
  // The last issued collective is through.
  void Complete();

  Communicator::IssueState state() const;
  const Group& group() const { return group_; }

  struct Entry {
    IssueRecord record;
    uint64_t order = 0;     // among all that this rank issued, on any communicator
    int64_t issued_ms = 0;  // of some monotonic clock
    int64_t age_ms = 0;     // in what Last returns
  };
  struct Snapshot {
    uint64_t sequence = 0;
    uint64_t hash = 0;
    uint64_t completed = 0;  // sequence of the last that is through
    int64_t waiting_ms = 0;  // since the last was issued, if it is not through
    uint64_t mark_sequence = 0;
    uint64_t mark_hash = 0;
  };
  Snapshot snapshot() const;
  // The last `most` entries, oldest first.
  std::vector<Entry> Last(size_t most) const;

  // FailedPrecondition that names what two members, by their index, issued at the same place.
  absl::Status Mismatch(int member_a,
                        const IssueRecord& a,
                        int member_b,
                        const IssueRecord& b) const;

 private:
  const Group group_;
  const std::shared_ptr<Context> context_;
  std::atomic<uint64_t> completed_ = 0;
  // Used by Next and Keep alone.
  Communicator::IssueState next_;
  uint64_t kept_ = 0;  // sequence
  mutable Mutex mutex_;
  Communicator::IssueState state_ ABSL_GUARDED_BY(mutex_);
  uint64_t mark_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t mark_hash_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Entry> ring_ ABSL_GUARDED_BY(mutex_);
};

// The first failure of a communicator, kept for every later call. Thread-safe.
class StickyFailure {
 public:
  // Keeps `status` if it is the first failure; returns the one that is kept.
  absl::Status Set(absl::Status status);
  absl::Status Get() const;

 private:
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ravel::comm
