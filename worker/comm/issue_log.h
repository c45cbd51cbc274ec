#pragma once

// The rolling hash of the collectives that one rank has issued, and how two ranks that disagree are
// told apart.

#include <cstdint>
#include <string>

#include "common/mutex.h"
#include "worker/comm/communicator.h"

namespace ravel::comm {

enum class CollectiveKind : uint32_t {
  kBarrier = 1,
  kAllGather = 2,
  kAllGatherInPlace = 3,
  kExchange = 4,
  kRelease = 5,
  kAllGatherBytes = 6,
  kAllocateArena = 7,
};

// One issued collective; travels in shared memory and on the wire between equal builds.
struct IssueRecord {
  uint64_t hash = 0;  // of this collective and all before it
  uint64_t sequence = 0;
  int64_t elements = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
  uint32_t op = 0;
  int32_t unit = -1;
  int32_t call = 0;
};
static_assert(sizeof(IssueRecord) == 40);

// "all_gather #12 (Gather of unit 3, call 0, 1024 elements)"
std::string DescribeIssue(const IssueRecord& record);
// FailedPrecondition that names what two ranks issued at the same place.
absl::Status IssueMismatch(int rank_a, const IssueRecord& a, int rank_b, const IssueRecord& b);

// Thread-safe.
class IssueLog {
 public:
  IssueRecord Issue(CollectiveKind kind, const CollectiveTag& tag, int64_t elements);
  Communicator::IssueState state() const;

 private:
  mutable Mutex mutex_;
  Communicator::IssueState state_ ABSL_GUARDED_BY(mutex_);
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
