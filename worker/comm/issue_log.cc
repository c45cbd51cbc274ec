#include "worker/comm/issue_log.h"

#include <string_view>
#include <utility>

#include <absl/strings/str_cat.h>

namespace ravel::comm {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  // The finalizer of splitmix64 over a running sum: every input bit reaches every output bit.
  uint64_t x = hash + 0x9e3779b97f4a7c15u + value;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::string_view KindName(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kBarrier:
      return "barrier";
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kAllGatherInPlace:
      return "all_gather in place";
    case CollectiveKind::kExchange:
      return "exchange_pieces";
    case CollectiveKind::kRelease:
      return "release_pieces";
    case CollectiveKind::kAllGatherBytes:
      return "all_gather_bytes";
    case CollectiveKind::kAllocateArena:
      return "allocate_arena";
  }
  return "unknown collective";
}

}  // namespace

std::string DescribeIssue(const IssueRecord& record) {
  const auto op = static_cast<plan::OpCode>(record.op);
  return absl::StrCat(std::string(KindName(record.kind)),
                      " #",
                      record.sequence,
                      " (",
                      plan::OpName(op),
                      " of unit ",
                      record.unit,
                      ", call ",
                      record.call,
                      ", ",
                      record.elements,
                      record.kind == CollectiveKind::kAllGatherBytes ? " bytes)" : " elements)");
}

absl::Status IssueMismatch(int rank_a, const IssueRecord& a, int rank_b, const IssueRecord& b) {
  return absl::FailedPreconditionError(absl::StrCat("collectives differ between ranks: rank ",
                                                    rank_a,
                                                    " issued ",
                                                    DescribeIssue(a),
                                                    ", rank ",
                                                    rank_b,
                                                    " issued ",
                                                    DescribeIssue(b)));
}

IssueRecord IssueLog::Issue(CollectiveKind kind, const CollectiveTag& tag, int64_t elements) {
  IssueRecord record{.elements = elements,
                     .kind = kind,
                     .op = static_cast<uint32_t>(tag.op),
                     .unit = tag.unit,
                     .call = tag.call};
  MutexLock lock(mutex_);
  uint64_t hash = Mix(state_.hash, static_cast<uint64_t>(kind) << 32 | record.op);
  hash = Mix(hash,
             static_cast<uint64_t>(static_cast<uint32_t>(tag.unit)) << 32 |
                 static_cast<uint32_t>(tag.call));
  hash = Mix(hash, static_cast<uint64_t>(elements));
  state_.hash = hash;
  ++state_.sequence;
  record.hash = hash;
  record.sequence = state_.sequence;
  return record;
}

Communicator::IssueState IssueLog::state() const {
  MutexLock lock(mutex_);
  return state_;
}

absl::Status StickyFailure::Set(absl::Status status) {
  MutexLock lock(mutex_);
  if (status_.ok()) {
    status_ = std::move(status);
  }
  return status_;
}

absl::Status StickyFailure::Get() const {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace ravel::comm
