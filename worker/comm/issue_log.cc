// The log behind mismatch detection. Every issued collective extends a rolling 64-bit hash over all
// its arguments, so two ranks that issued the same have equal hashes, and one comparison per
// collective suffices. The ring keeps the last entries with coarse timestamps, for reports about
// what each rank was doing. The parts of a record are mixed independently of each other, which
// shortens the chain of dependent multiplications.

#include "worker/comm/issue_log.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/fault_point.h"
#include "common/signed_size.h"

namespace ravel::comm {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  // The finalizer of splitmix64 over a running sum: every input bit reaches every output bit.
  uint64_t x = hash + 0x9e3779b97f4a7c15u + value;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t Pair(uint32_t high, uint32_t low) {
  return static_cast<uint64_t>(high) << 32 | low;
}

// The parts do not wait for each other, nor for the hash of what was before.
uint64_t HashOf(const IssueRecord& record) {
  const uint64_t kind = Mix(1,
                            Pair(static_cast<uint32_t>(record.kind) << 16 | record.op,
                                 static_cast<uint32_t>(record.phase) << 16 | record.element_bytes));
  const uint64_t unit =
      Mix(2, Pair(static_cast<uint32_t>(record.unit), static_cast<uint32_t>(record.group)));
  const uint64_t call =
      Mix(3, Pair(static_cast<uint32_t>(record.call), static_cast<uint32_t>(record.contributors)));
  const uint64_t elements = Mix(4, static_cast<uint64_t>(record.elements));
  const uint64_t generation = Mix(5, static_cast<uint64_t>(record.generation));
  return Mix(record.hash, (kind ^ unit) + (call ^ elements) + generation);
}

// Coarse: a few milliseconds, and hardly any cost.
int64_t NowMs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

}  // namespace

const char* CollectiveKindName(CollectiveKind kind) {
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
    case CollectiveKind::kSplit:
      return "split";
  }
  return "unknown collective";
}

std::string DescribeIssue(const IssueRecord& record, const std::vector<std::string>& unit_names) {
  std::string unit = "step";
  if (record.unit >= 0) {
    const size_t index = Size(record.unit);
    unit = index < unit_names.size() ? unit_names[index] : absl::StrCat("unit ", record.unit);
  }
  std::string amount = absl::StrCat(record.elements, " bytes");
  if (record.element_bytes != 1) {
    amount = absl::StrCat(record.elements, " elements of ", record.element_bytes, " bytes");
  }
  const bool scales = record.op == static_cast<uint8_t>(plan::OpLabel::kAmaxReduce);
  const std::string generation =
      scales ? absl::StrCat("scales ", absl::Hex(record.generation, absl::kZeroPad16))
             : absl::StrCat("generation ", record.generation);
  return absl::StrCat(CollectiveKindName(record.kind),
                      " #",
                      record.sequence,
                      " (",
                      plan::OpName(static_cast<plan::OpLabel>(record.op)),
                      " of ",
                      unit,
                      ", call ",
                      record.call,
                      ", phase ",
                      plan::PhaseName(static_cast<plan::Phase>(record.phase)),
                      ", ",
                      generation,
                      ", ",
                      amount,
                      ")");
}

IssueLog::IssueLog(Group group, std::shared_ptr<Context> context)
    : group_(std::move(group)), context_(std::move(context)), ring_(kRingEntries) {}

IssueRecord IssueLog::Issue(CollectiveKind kind, const CollectiveTag& tag, const Amount& amount) {
  const IssueRecord record = Next(kind, tag, amount);
  Keep(record);
  return record;
}

IssueRecord IssueLog::Next(CollectiveKind kind, const CollectiveTag& tag, const Amount& amount) {
  FaultPoint("comm.issue")
      .IgnoreError();  // to stall, stop or kill: a collective that is not issued
  IssueRecord record{.hash = next_.hash,
                     .sequence = next_.sequence + 1,
                     .elements = amount.elements,
                     .generation = tag.generation,
                     .kind = kind,
                     .op = static_cast<uint8_t>(tag.op),
                     .phase = static_cast<uint8_t>(tag.phase),
                     .element_bytes = static_cast<uint8_t>(amount.element_bytes),
                     .unit = tag.unit,
                     .group = tag.group,
                     .call = static_cast<int16_t>(tag.call),
                     .contributors = static_cast<int16_t>(amount.contributors)};
  record.hash = HashOf(record);
  next_ = {.sequence = record.sequence, .hash = record.hash};
  return record;
}

void IssueLog::Keep(const IssueRecord& record) {
  if (record.sequence <= kept_) {
    return;
  }
  kept_ = record.sequence;
  const uint64_t order = context_->order.fetch_add(1, std::memory_order_relaxed) + 1;
  MutexLock lock(mutex_);
  state_ = {.sequence = record.sequence, .hash = record.hash};
  if (record.sequence % kMarkEvery == 0) {
    mark_sequence_ = record.sequence;
    mark_hash_ = record.hash;
  }
  ring_[record.sequence % kRingEntries] = {
      .record = record, .order = order, .issued_ms = NowMs(), .age_ms = 0};
}

void IssueLog::Complete() {
  // No other thread writes it.
  completed_.store(completed_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

Communicator::IssueState IssueLog::state() const {
  MutexLock lock(mutex_);
  return state_;
}

IssueLog::Snapshot IssueLog::snapshot() const {
  MutexLock lock(mutex_);
  Snapshot snapshot{.sequence = state_.sequence,
                    .hash = state_.hash,
                    .completed = completed_.load(std::memory_order_acquire),
                    .waiting_ms = 0,
                    .mark_sequence = mark_sequence_,
                    .mark_hash = mark_hash_};
  if (snapshot.completed < snapshot.sequence) {
    snapshot.waiting_ms = NowMs() - ring_[snapshot.sequence % kRingEntries].issued_ms;
  }
  return snapshot;
}

std::vector<IssueLog::Entry> IssueLog::Last(size_t most) const {
  MutexLock lock(mutex_);
  const uint64_t count =
      std::min({static_cast<uint64_t>(most), state_.sequence, static_cast<uint64_t>(kRingEntries)});
  std::vector<Entry> entries;
  const int64_t now_ms = NowMs();
  for (uint64_t s = state_.sequence - count + 1; s <= state_.sequence; ++s) {
    entries.push_back(ring_[s % kRingEntries]);
    entries.back().age_ms = now_ms - entries.back().issued_ms;
  }
  return entries;
}

absl::Status IssueLog::Mismatch(int member_a,
                                const IssueRecord& a,
                                int member_b,
                                const IssueRecord& b) const {
  std::vector<std::string> names;
  {
    MutexLock lock(context_->mutex);
    names = context_->unit_names;
  }
  return absl::FailedPreconditionError(absl::StrCat(kMismatchText,
                                                    " in group ",
                                                    group_.name,
                                                    ": rank ",
                                                    At(group_.members, member_a),
                                                    " issued ",
                                                    DescribeIssue(a, names),
                                                    ", rank ",
                                                    At(group_.members, member_b),
                                                    " issued ",
                                                    DescribeIssue(b, names)));
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
