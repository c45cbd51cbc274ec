// One rank's bookkeeping in one NCCL group. Completion is observed, not waited for: an event
// ("mark") follows each collective, and Retire completes the log up to the last mark that the
// device has passed. With checking on, every collective is preceded by an all-gather of issue
// records into a ring of kMarks places; a place is reused only after its records were compared. All
// memory, events and streams are made in Prepare, because making them later may wait for the
// device, and so for a peer that is stuck. An NCCL error is first explained by what peers
// announced.

#include "worker/comm/nccl_member.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::comm {
namespace {

using kernels::CudaEvent;
using kernels::CudaMemory;
using kernels::CudaStream;

constexpr int64_t kChunkBytes = int64_t{64} << 10;
constexpr int64_t kMostChunkBytes = int64_t{16} << 20;  // of all ranks

std::byte* BytesOf(const CudaMemory& memory) {
  return static_cast<std::byte*>(memory.data());
}

}  // namespace

NcclMember::NcclMember(NcclRoot& root,
                       std::shared_ptr<kernels::NcclGroup> group,
                       std::shared_ptr<IssueLog> log,
                       int rank)
    : root_(root),
      group_(std::move(group)),
      log_(std::move(log)),
      rank_(rank),
      size_(static_cast<int>(log_->group().members.size())),
      chunk_bytes_(std::max<int64_t>(256, std::min(kChunkBytes, kMostChunkBytes / size_))) {}

absl::Status NcclMember::Prepare() {
  kernels::CudaGpu& gpu = root_.gpu();
  ASSIGN_OR_RETURN(host_stream_, gpu.MakeCopyStream(kernels::CudaGpu::Priority::kHigh));
  ASSIGN_OR_RETURN(host_done_, gpu.MakeEvent());
  ASSIGN_OR_RETURN(host_device_, gpu.AllocateDevice(slots_bytes()));
  ASSIGN_OR_RETURN(host_pinned_, gpu.AllocatePinned(slots_bytes()));
  ASSIGN_OR_RETURN(chunk_device_, gpu.AllocateDevice(chunk_bytes_ * size_));
  ASSIGN_OR_RETURN(chunk_pinned_, gpu.AllocatePinned(chunk_bytes_ * size_));
  if (root_.options().check_collectives) {
    const int64_t bytes = slots_bytes() * static_cast<int64_t>(kMarks);
    ASSIGN_OR_RETURN(announced_device_, gpu.AllocateDevice(bytes));
    ASSIGN_OR_RETURN(announced_pinned_, gpu.AllocatePinned(bytes));
  }
  MutexLock lock(mutex_);
  for (Marks* marks : {&announcements_, &marks_}) {
    for (Mark& mark : *marks) {
      ASSIGN_OR_RETURN(mark.event, gpu.MakeEvent());
    }
  }
  return absl::OkStatus();
}

absl::Status NcclMember::Describe(const absl::Status& status) const {
  if (status.ok()) {
    return status;
  }
  std::string last = "nothing issued";
  if (const std::vector<IssueLog::Entry> entries = log_->Last(1); !entries.empty()) {
    last = absl::StrCat("last issued ",
                        DescribeIssue(entries.back().record, root_.ledger().unit_names()));
  }
  return Annotate(
      status,
      absl::StrCat("group ", log_->group().name, ", rank ", rank_, " of ", size_, ", ", last));
}

// An error of NCCL may be what a peer's different collective led to: that is looked for first.
absl::StatusOr<bool> NcclMember::Settled() {
  absl::StatusOr<bool> settled = group_->Settled();
  if (!settled.ok()) {
    RETURN_IF_ERROR(Poll());
    return Describe(settled.status());
  }
  return settled;
}

absl::Status NcclMember::WaitSettled() {
  return root_.WaitFor([this] { return Settled(); });
}

// -- what peers issued

absl::Status NcclMember::GatherSlots(CudaStream& stream, std::byte* device, std::byte* pinned) {
  const int64_t own = static_cast<int64_t>(NcclSlot::kBytes) * rank_;
  stream.CopyMemory(device + own, pinned + own, static_cast<int64_t>(NcclSlot::kBytes));
  RETURN_IF_ERROR(
      group_->AllGather(stream, device + own, device, static_cast<int64_t>(NcclSlot::kBytes)));
  RETURN_IF_ERROR(WaitSettled());
  stream.CopyMemory(pinned, device, slots_bytes());
  return absl::OkStatus();
}

absl::Status NcclMember::CheckSlots(const std::byte* pinned) const {
  std::vector<IssueRecord> records(Size(size_));
  for (size_t r = 0; r < records.size(); ++r) {
    std::memcpy(&records[r], pinned + r * NcclSlot::kBytes, sizeof(IssueRecord));
  }
  const IssueRecord& mine = At(records, rank_);
  for (int peer = 0; peer < size_; ++peer) {
    const IssueRecord& other = At(records, peer);
    if (other.hash != mine.hash || other.sequence != mine.sequence) {
      return peer < rank_ ? log_->Mismatch(peer, other, rank_, mine)
                          : log_->Mismatch(rank_, mine, peer, other);
    }
  }
  return absl::OkStatus();
}

std::byte* NcclMember::AnnouncedAt(const CudaMemory& memory, uint64_t sequence) const {
  return BytesOf(memory) + static_cast<int64_t>(sequence % kMarks) * slots_bytes();
}

absl::Status NcclMember::Announce(const IssueRecord& issue, CudaStream& stream) {
  RETURN_IF_ERROR(root_.Failure());
  if (!root_.options().check_collectives) {
    return absl::OkStatus();
  }
  // The place is free once what was announced there has been looked at.
  const absl::Status free = root_.WaitFor([&]() -> absl::StatusOr<bool> {
    RETURN_IF_ERROR(Poll());
    MutexLock lock(mutex_);
    return announcements_[issue.sequence % kMarks].sequence == 0;
  });
  RETURN_IF_ERROR(free);
  std::byte* pinned = AnnouncedAt(announced_pinned_, issue.sequence);
  const NcclSlot slot = {.issue = issue};
  std::memcpy(pinned + NcclSlot::kBytes * Size(rank_), &slot, sizeof(slot));
  absl::Status sent = GatherSlots(stream, AnnouncedAt(announced_device_, issue.sequence), pinned);
  if (sent.ok()) {
    MutexLock lock(mutex_);
    Mark& mark = announcements_[issue.sequence % kMarks];
    stream.Record(mark.event);
    mark.sequence = issue.sequence;
  }
  return sent.ok() ? sent : root_.Fail(std::move(sent));
}

// -- how far it has come

absl::Status NcclMember::Launched(CudaStream& stream) {
  RETURN_IF_ERROR(WaitSettled());
  return Passed(stream);
}

absl::Status NcclMember::Passed(CudaStream& stream) {
  if (stream.log() != nullptr) {
    return absl::OkStatus();
  }
  MutexLock lock(mutex_);
  const uint64_t sequence = log_->state().sequence;
  Mark& mark = marks_[sequence % kMarks];
  if (mark.sequence == 0) {  // else a later mark will tell
    stream.Record(mark.event);
    mark.sequence = sequence;
  }
  return absl::OkStatus();
}

void NcclMember::CompleteUpTo(uint64_t sequence) {
  for (; completed_ < sequence; ++completed_) {
    log_->Complete();
  }
}

absl::Status NcclMember::Retire() {
  for (Mark& mark : announcements_) {
    if (mark.sequence == 0) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool done, mark.event.Done());
    if (done) {
      RETURN_IF_ERROR(CheckSlots(AnnouncedAt(announced_pinned_, mark.sequence)));
      mark.sequence = 0;
    }
  }
  uint64_t through = 0;
  for (Mark& mark : marks_) {
    if (mark.sequence == 0) {
      continue;
    }
    ASSIGN_OR_RETURN(const bool done, mark.event.Done());
    if (done) {
      through = std::max(through, mark.sequence);
      mark.sequence = 0;
    }
  }
  CompleteUpTo(through);  // collectives of a group are serial
  return absl::OkStatus();
}

absl::Status NcclMember::Poll() {
  // Announcements that peers made before an error of NCCL have arrived once the error is visible.
  const absl::Status settled = group_->Settled().status();
  {
    MutexLock lock(mutex_);
    RETURN_IF_ERROR(Retire());
  }
  return Describe(settled);
}

// -- host bytes

absl::Status NcclMember::WaitHost() {
  host_stream_->Record(host_done_);
  return root_.WaitFor([this]() -> absl::StatusOr<bool> {
    RETURN_IF_ERROR(Settled().status());
    return host_done_.Done();
  });
}

absl::Status NcclMember::HostGather(const IssueRecord& issue,
                                    std::span<const std::byte> mine,
                                    std::span<std::byte> all) {
  RETURN_IF_ERROR(root_.Failure());
  NcclSlot slot = {.issue = issue};
  const bool fits = mine.size() <= slot.bytes.size();
  if (fits && !mine.empty()) {
    std::memcpy(slot.bytes.data(), mine.data(), mine.size());
  }
  std::byte* pinned = BytesOf(host_pinned_);
  std::memcpy(pinned + NcclSlot::kBytes * Size(rank_), &slot, sizeof(slot));
  absl::Status done = GatherSlots(*host_stream_, BytesOf(host_device_), pinned);
  if (done.ok()) {
    done = WaitHost();
  }
  if (done.ok()) {
    done = CheckSlots(pinned);
  }
  if (done.ok() && fits) {
    for (size_t r = 0; r < Size(size_) && !mine.empty(); ++r) {
      std::memcpy(all.data() + r * mine.size(),
                  pinned + r * NcclSlot::kBytes + offsetof(NcclSlot, bytes),
                  mine.size());
    }
  } else if (done.ok()) {
    done = GatherChunks(mine, all);
  }
  if (!done.ok()) {
    return root_.Fail(std::move(done));
  }
  MutexLock lock(mutex_);
  RETURN_IF_ERROR(Retire());
  CompleteUpTo(issue.sequence);
  return absl::OkStatus();
}

absl::Status NcclMember::GatherChunks(std::span<const std::byte> mine, std::span<std::byte> all) {
  std::byte* device = BytesOf(chunk_device_);
  std::byte* pinned = BytesOf(chunk_pinned_);
  for (size_t done = 0; done < mine.size();) {
    const size_t part = std::min(mine.size() - done, Size(chunk_bytes_));
    const auto bytes = static_cast<int64_t>(part);
    std::byte* own = device + rank_ * bytes;
    std::memcpy(pinned, mine.data() + done, part);
    host_stream_->CopyMemory(own, pinned, bytes);
    RETURN_IF_ERROR(group_->AllGather(*host_stream_, own, device, bytes));
    RETURN_IF_ERROR(WaitSettled());
    host_stream_->CopyMemory(pinned, device, bytes * size_);
    RETURN_IF_ERROR(WaitHost());
    for (size_t r = 0; r < Size(size_); ++r) {
      std::memcpy(all.data() + r * mine.size() + done, pinned + r * part, part);
    }
    done += part;
  }
  return absl::OkStatus();
}

}  // namespace ravel::comm
