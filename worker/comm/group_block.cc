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
constexpr uint32_t kGenerationStep = 2;
// Some 20 us of waiting when every rank has a core, almost none when ranks must share.
constexpr int kSpinsWithOwnCore = 20000;
constexpr int kSpinsWithSharedCore = 50;
// How long a released rank waits for the text of the failure, which another may still be writing.
constexpr int kSpinsForText = 1000000;

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

}  // namespace

int64_t GroupBlockBytes(int size) {
  const int64_t head = static_cast<int64_t>(sizeof(GroupHeader)) + SlotBytes(size);
  return RoundUp(head, kPageBytes) + 2 * size * kBounceBytes;
}

GroupBlock::GroupBlock(Options options)
    : options_(std::move(options)),
      header_(reinterpret_cast<GroupHeader*>(options_.memory)),
      rank_(options_.rank),
      size_(options_.size) {
  CHECK(size_ >= 1 && size_ <= kMaxSharedRanks && rank_ >= 0 && rank_ < size_);
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  spins_ = static_cast<unsigned>(options_.host_ranks) <= cores ? kSpinsWithOwnCore
                                                               : kSpinsWithSharedCore;
}

GroupSlot* GroupBlock::SlotOf(uint32_t parity, int rank) {
  auto* slots = reinterpret_cast<GroupSlot*>(options_.memory + sizeof(GroupHeader));
  return slots + static_cast<int64_t>(parity) * size_ + rank;
}

std::byte* GroupBlock::BounceOf(uint32_t parity, int rank) {
  const int64_t head = static_cast<int64_t>(sizeof(GroupHeader)) + SlotBytes(size_);
  const int64_t index = static_cast<int64_t>(parity) * size_ + rank;
  return options_.memory + RoundUp(head, kPageBytes) + index * kBounceBytes;
}

absl::Status GroupBlock::Barrier() {
  const uint32_t before = header_->generation.load(std::memory_order_acquire);
  if ((before & kAbortBit) != 0) {
    return GroupFailure(*header_);
  }
  // Reading the arrivals before this one makes their slots visible to the last to arrive.
  const uint32_t earlier = header_->arrived.fetch_add(1, std::memory_order_acq_rel);
  if (earlier + 1 == static_cast<uint32_t>(size_)) {
    if (!IssuesAgree()) {
      return GroupFailure(*header_);
    }
    header_->arrived.store(0, std::memory_order_relaxed);
    header_->generation.fetch_add(kGenerationStep, std::memory_order_seq_cst);
    if (header_->sleepers.load(std::memory_order_seq_cst) != 0) {
      FutexWakeAll(header_->generation);
    }
  } else if (!WaitForRelease(before)) {
    return GroupFailure(*header_);
  }
  parity_ ^= 1;
  return absl::OkStatus();
}

// True when the generation moved on; false when the group was aborted first.
bool GroupBlock::WaitForRelease(uint32_t generation) {
  const auto released = [generation](uint32_t now) {
    return (now & ~kAbortBit) != (generation & ~kAbortBit);
  };
  uint32_t now = generation;
  for (int i = 0; i < spins_; ++i) {
    now = header_->generation.load(std::memory_order_acquire);
    if (now != generation) {
      return released(now);
    }
  }
  header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  while ((now = header_->generation.load(std::memory_order_seq_cst)) == generation) {
    FutexWait(header_->generation, generation);
  }
  header_->sleepers.fetch_sub(1, std::memory_order_relaxed);
  return released(now);
}

bool GroupBlock::IssuesAgree() {
  const IssueRecord& first = SlotOf(parity_, 0)->issue;
  for (int r = 1; r < size_; ++r) {
    const IssueRecord& other = SlotOf(parity_, r)->issue;
    if (other.hash != first.hash || other.sequence != first.sequence) {
      options_.on_mismatch(0, first, r, other);
      return false;
    }
  }
  return true;
}

void FailGroup(GroupHeader& header, const absl::Status& status) {
  uint32_t none = 0;
  if (header.abort_state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    const std::string text(status.message());
    const size_t length = std::min(text.size(), kAbortTextBytes - 1);
    header.abort_code = static_cast<uint32_t>(status.code());
    std::memcpy(header.abort_text, text.data(), length);
    header.abort_text[length] = '\0';
    header.abort_state.store(2, std::memory_order_release);
  }
  // Even if the rank that writes the reason was killed on the way, everybody is released.
  header.generation.fetch_or(kAbortBit, std::memory_order_seq_cst);
  FutexWakeAll(header.generation);
}

absl::Status GroupFailure(const GroupHeader& header) {
  if ((header.generation.load(std::memory_order_acquire) & kAbortBit) == 0) {
    return absl::OkStatus();
  }
  for (int i = 0; i < kSpinsForText; ++i) {
    if (header.abort_state.load(std::memory_order_acquire) == 2) {
      break;
    }
  }
  if (header.abort_state.load(std::memory_order_acquire) != 2) {
    return absl::AbortedError("the group was aborted");
  }
  const char* text = header.abort_text;
  return absl::Status(static_cast<absl::StatusCode>(header.abort_code),
                      std::string(text, strnlen(text, kAbortTextBytes)));
}

}  // namespace ravel::comm
