// The barrier of shared-memory groups. Each rank publishes its arrival and its issue record in one
// cache line of its own; waiting means reading the others' lines. A waiter spins briefly (longer if
// every rank has a core), then sleeps on a futex; the arriving rank wakes only if someone sleeps,
// and sequentially consistent order between "arrived" and "sleepers" makes a lost wake-up
// impossible. Two sets of slots are used in turns, so a fast rank cannot overwrite what a slow one
// still reads. Abort sets a bit and wakes all, even if the failing rank dies while writing the
// reason.

#include "worker/comm/group_block.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/check.h"

namespace ravel::comm {
namespace {

constexpr uint32_t kAbortBit = 1;
constexpr uint32_t kWakeStep = 2;
// Some 20 us of waiting when every rank has a core, almost none when ranks must share.
constexpr int kSpinsWithOwnCore = 20000;
constexpr int kSpinsWithSharedCore = 50;
// Time that a released rank waits for the text of the failure, which another may still be writing.
constexpr int64_t kNsForText = 200'000'000;

int64_t SlotBytes(int size) {
  return int64_t{2} * size * static_cast<int64_t>(sizeof(GroupSlot));
}

uint32_t* FutexWord(std::atomic<uint32_t>& word) {
  return reinterpret_cast<uint32_t*>(&word);
}

void FutexWait(std::atomic<uint32_t>& word, uint32_t expected) {
  syscall(SYS_futex, FutexWord(word), FUTEX_WAIT, expected, nullptr, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, FutexWord(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The first one to write wins.
void Write(FailureRecord& record, const absl::Status& status) {
  uint32_t none = 0;
  if (!record.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    return;
  }
  const std::string text(status.message());
  const size_t length = std::min(text.size(), kAbortTextBytes - 1);
  record.code = static_cast<uint32_t>(status.code());
  std::memcpy(record.text, text.data(), length);
  record.text[length] = '\0';
  record.state.store(2, std::memory_order_release);
}

// Another rank may still be writing, and may have lost its core or its life while at it.
absl::Status Read(const FailureRecord& record) {
  const int64_t deadline_ns = SteadyNs() + kNsForText;
  while (record.state.load(std::memory_order_acquire) == 1 && SteadyNs() < deadline_ns) {
    std::this_thread::yield();
  }
  if (record.state.load(std::memory_order_acquire) != 2) {
    return absl::AbortedError("the group was aborted");
  }
  return absl::Status(static_cast<absl::StatusCode>(record.code),
                      std::string(record.text, strnlen(record.text, kAbortTextBytes)));
}

}  // namespace

int64_t GroupBlockBytes(int size) {
  const int64_t head = static_cast<int64_t>(sizeof(GroupHeader)) + SlotBytes(size);
  return RoundUp(head, kPageBytes) + 2 * size * kBounceBytes;
}

GroupBlock::GroupBlock(Options options)
    : options_(std::move(options)),
      header_(reinterpret_cast<GroupHeader*>(options_.memory)),
      rank_(options_.rank),
      size_(options_.size),
      waits_(options_.size) {
  CHECK(options_.root != nullptr);
  CHECK(size_ >= 1 && size_ <= kMaxSharedRanks && rank_ >= 0 && rank_ < size_);
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  spins_ = static_cast<unsigned>(options_.host_ranks) <= cores ? kSpinsWithOwnCore
                                                               : kSpinsWithSharedCore;
}

GroupSlot* GroupBlock::SlotOf(uint64_t barrier, int rank) {
  auto* slots = reinterpret_cast<GroupSlot*>(options_.memory + sizeof(GroupHeader));
  return slots + static_cast<int64_t>(barrier & 1) * size_ + rank;
}

std::byte* GroupBlock::BounceOf(uint64_t barrier, int rank) {
  const int64_t head = static_cast<int64_t>(sizeof(GroupHeader)) + SlotBytes(size_);
  const int64_t index = static_cast<int64_t>(barrier & 1) * size_ + rank;
  return options_.memory + RoundUp(head, kPageBytes) + index * kBounceBytes;
}

void GroupBlock::Publish(const IssueRecord& issue, int64_t offset) {
  GroupSlot* slot = SlotOf(barriers_ + 1, rank_);
  slot->issue = issue;
  slot->offset = offset;
  mine_ = issue;
}

absl::Status GroupBlock::Failure() const {
  // The failure of all groups says more than that a rank has left this one because of it.
  const bool all = options_.root->domain.state.load(std::memory_order_acquire) != 0;
  return all ? Read(options_.root->domain) : GroupFailure(*header_);
}

absl::Status GroupBlock::Barrier() {
  RETURN_IF_ERROR(Arrive());
  return Depart();
}

absl::Status GroupBlock::Arrive() {
  RETURN_IF_ERROR(Failure());
  const uint64_t barrier = barriers_ + 1;
  // Sequentially consistent, as the sleepers' count is: either the sleeper sees this arrival or
  // this rank sees the sleeper.
  SlotOf(barrier, rank_)->arrivals.exchange(barrier, std::memory_order_seq_cst);
  if (header_->sleepers.load(std::memory_order_seq_cst) != 0) {
    header_->wake_ups.fetch_add(kWakeStep, std::memory_order_seq_cst);
    FutexWakeAll(header_->wake_ups);
  }
  return absl::OkStatus();
}

absl::Status GroupBlock::Depart() {
  const uint64_t barrier = barriers_ + 1;
  if (!WaitForAll(barrier)) {
    return Failure();
  }
  barriers_ = barrier;
  // The own slot of the next barrier went to who read it; it comes back while this rank does other
  // things.
  __builtin_prefetch(SlotOf(barrier + 1, rank_), /*rw=*/1);
  if (!IssuesAgree()) {  // the same verdict on every rank: all have read the same slots
    return Failure();
  }
  return absl::OkStatus();
}

bool GroupBlock::AllArrived(uint64_t barrier, int* first_missing) {
  for (int rank = *first_missing; rank < size_; ++rank) {
    if (rank != rank_ &&
        SlotOf(barrier, rank)->arrivals.load(std::memory_order_seq_cst) != barrier) {
      *first_missing = rank;
      return false;
    }
  }
  return true;
}

bool GroupBlock::WaitForAll(uint64_t barrier) {
  // Ranks that arrive together are worth no look at the clock.
  constexpr int kUntimedSpins = 32;
  int missing = 0;
  for (int i = 0; i < kUntimedSpins; ++i) {
    if (AllArrived(barrier, &missing)) {
      return true;
    }
  }
  const int64_t begin_ns = SteadyNs();
  const bool arrived = SpinAndSleep(barrier, &missing);
  waits_.Add(missing, begin_ns);
  return arrived;
}

bool GroupBlock::SpinAndSleep(uint64_t barrier, int* missing) {
  for (int i = 0; i < spins_; ++i) {
    if (AllArrived(barrier, missing)) {
      return true;
    }
    if ((header_->wake_ups.load(std::memory_order_acquire) & kAbortBit) != 0) {
      return AllArrived(barrier, missing);
    }
  }
  header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool arrived = SleepUntilAll(barrier, missing);
  header_->sleepers.fetch_sub(1, std::memory_order_relaxed);
  return arrived;
}

bool GroupBlock::SleepUntilAll(uint64_t barrier, int* missing) {
  for (;;) {
    const uint32_t seen = header_->wake_ups.load(std::memory_order_seq_cst);
    if (AllArrived(barrier, missing)) {
      return true;
    }
    if ((seen & kAbortBit) != 0) {
      return false;
    }
    FutexWait(header_->wake_ups, seen);
  }
}

bool GroupBlock::IssuesAgree() {
  // Not of the own slot, which has gone to who read it.
  const auto of = [this](int rank) -> const IssueRecord& {
    return rank == rank_ ? mine_ : SlotOf(barriers_, rank)->issue;
  };
  const IssueRecord& first = of(0);
  for (int r = 1; r < size_; ++r) {
    const IssueRecord& other = of(r);
    if (other.hash != first.hash || other.sequence != first.sequence) {
      options_.on_mismatch(0, first, r, other);
      return false;
    }
  }
  return true;
}

void FailGroup(GroupHeader& header, const absl::Status& status) {
  Write(header.own, status);
  // Even if the rank that writes the reason was killed on the way, everybody is released.
  header.wake_ups.fetch_or(kAbortBit, std::memory_order_seq_cst);
  FutexWakeAll(header.wake_ups);
}

void RecordDomainFailure(GroupHeader& root, const absl::Status& status) {
  Write(root.domain, status);
}

absl::Status GroupFailure(const GroupHeader& header) {
  if ((header.wake_ups.load(std::memory_order_acquire) & kAbortBit) == 0) {
    return absl::OkStatus();
  }
  return Read(header.own);
}

}  // namespace ravel::comm
