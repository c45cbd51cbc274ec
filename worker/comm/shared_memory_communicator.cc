#include "worker/comm/shared_memory_communicator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::comm {
namespace {

std::span<const std::byte> BytesOf(const float* data, int64_t elements) {
  return {reinterpret_cast<const std::byte*>(data), static_cast<size_t>(elements * kElementBytes)};
}

}  // namespace

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<SharedSegment> segment,
                                                   int rank,
                                                   int size)
    : segment_(std::move(segment)),
      rank_(rank),
      size_(size),
      block_(segment_->block(), rank, size) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  block_.Fail(absl::AbortedError(absl::StrCat("rank ", rank_, " left the group")));
}

void SharedMemoryCommunicator::Abort(std::string_view reason) {
  block_.Fail(absl::AbortedError(std::string(reason)));
}

absl::Status SharedMemoryCommunicator::Meet(const IssueRecord& issue, int64_t offset) {
  block_.mine() = {.issue = issue, .offset = offset};
  return block_.Barrier();
}

absl::Status SharedMemoryCommunicator::Barrier(const CollectiveTag& tag) {
  return Meet(issues_.Issue(CollectiveKind::kBarrier, tag, 0), -1);
}

absl::Status SharedMemoryCommunicator::ReleasePieces(const CollectiveTag& tag) {
  return Meet(issues_.Issue(CollectiveKind::kRelease, tag, 0), -1);
}

absl::Status SharedMemoryCommunicator::AllGatherBytes(const CollectiveTag& tag,
                                                      std::span<const std::byte> mine,
                                                      std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * static_cast<size_t>(size_));
  CHECK_LE(static_cast<int64_t>(mine.size()), kMaxGatherBytes);
  const auto bytes = static_cast<int64_t>(mine.size());
  return BounceGather(issues_.Issue(CollectiveKind::kAllGatherBytes, tag, bytes), mine, all);
}

absl::Status SharedMemoryCommunicator::BounceGather(const IssueRecord& issue,
                                                    std::span<const std::byte> mine,
                                                    std::span<std::byte> all) {
  size_t done = 0;
  do {
    const size_t part = std::min(mine.size() - done, static_cast<size_t>(kBounceBytes));
    if (part > 0) {
      std::memcpy(block_.mine_bounce(), mine.data() + done, part);
    }
    RETURN_IF_ERROR(Meet(issue, -1));
    for (int r = 0; r < size_ && part > 0; ++r) {
      std::byte* target = all.data() + static_cast<size_t>(r) * mine.size() + done;
      if (r != rank_) {
        std::memcpy(target, block_.last_bounce(r), part);
      } else if (target != mine.data() + done) {
        std::memmove(target, mine.data() + done, part);
      }
    }
    done += part;
  } while (done < mine.size());
  return absl::OkStatus();
}

// -- arena

absl::Status SharedMemoryCommunicator::AgreeOnSizes(const ArenaSizes& sizes) {
  const IssueRecord issue = issues_.Issue(CollectiveKind::kAllocateArena, {}, 0);
  std::vector<ArenaSizes> all(static_cast<size_t>(size_));
  RETURN_IF_ERROR(BounceGather(
      issue, std::as_bytes(std::span(&sizes, 1)), std::as_writable_bytes(std::span(all))));
  const auto text = [](const ArenaSizes& s) {
    return absl::StrCat(s.private_bytes, "/", s.symmetric_bytes, "/", s.common_bytes);
  };
  for (int r = 1; r < size_; ++r) {
    if (text(all[static_cast<size_t>(r)]) != text(all[0])) {
      return absl::FailedPreconditionError(
          absl::StrCat("arena sizes (private/symmetric/common bytes) differ: rank 0 wants ",
                       text(all[0]),
                       ", rank ",
                       r,
                       " wants ",
                       text(all[static_cast<size_t>(r)])));
    }
  }
  return absl::OkStatus();
}

// A rank that failed does so on all ranks, so that none waits for it.
absl::Status SharedMemoryCommunicator::AllSucceeded(const IssueRecord& issue,
                                                    const absl::Status& mine) {
  if (!mine.ok()) {
    block_.Fail(Annotate(mine, absl::StrCat("rank ", rank_)));
    return mine;
  }
  return Meet(issue, -1);
}

absl::Status SharedMemoryCommunicator::AllocateArena(const ArenaSizes& sizes) {
  CHECK_MSG(!allocated_, "the arena is allocated once");
  CHECK(sizes.private_bytes >= 0 && sizes.symmetric_bytes >= 0 && sizes.common_bytes >= 0);
  allocated_ = true;
  if (absl::Status equal = AgreeOnSizes(sizes); !equal.ok()) {
    block_.Fail(equal);
    return equal;
  }
  const int64_t common = RoundUp(sizes.common_bytes, kPageBytes);
  symmetric_stride_ = RoundUp(sizes.symmetric_bytes, kPageBytes);
  const int64_t total = common + size_ * symmetric_stride_;
  const IssueRecord issue = issues_.Issue(CollectiveKind::kAllocateArena, {}, total);
  absl::Status made;
  if (total > 0 && rank_ == 0) {
    made = segment_->CreateArena(total);
  }
  RETURN_IF_ERROR(AllSucceeded(issue, made));
  const auto map = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(private_, PrivateMapping::Create(sizes.private_bytes));
    if (total == 0) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(common_, segment_->MapArena(total));
    symmetric_ = common_ + common;
    if (rank_ == 0) {
      RETURN_IF_ERROR(segment_->ReserveArena(0, common));
    }
    return segment_->ReserveArena(common + rank_ * symmetric_stride_, symmetric_stride_);
  };
  RETURN_IF_ERROR(AllSucceeded(issue, map()));
  sizes_ = sizes;
  return absl::OkStatus();
}

std::byte* SharedMemoryCommunicator::arena(plan::MemoryKind kind) {
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return private_.data();
    case plan::MemoryKind::kSymmetric:
      return sizes_.symmetric_bytes == 0 ? nullptr : symmetric_ + rank_ * symmetric_stride_;
    case plan::MemoryKind::kCommon:
      return sizes_.common_bytes == 0 ? nullptr : common_;
  }
  return nullptr;
}

int64_t SharedMemoryCommunicator::ReadableOffset(const void* data, int64_t bytes) const {
  const auto inside = [&](const std::byte* begin, int64_t length) {
    const auto* address = static_cast<const std::byte*>(data);
    return length > 0 && address >= begin && address + bytes <= begin + length;
  };
  if (data == nullptr || common_ == nullptr) {
    return -1;
  }
  if (inside(common_, sizes_.common_bytes) ||
      inside(symmetric_ + rank_ * symmetric_stride_, sizes_.symmetric_bytes)) {
    return static_cast<const std::byte*>(data) - common_;
  }
  return -1;
}

// -- tensors

bool SharedMemoryCommunicator::IsOwnSlice(const AllGatherOptions& options) const {
  const auto* gathered = reinterpret_cast<const std::byte*>(options.gathered);
  const int64_t bytes = options.shard_elements * size_ * kElementBytes;
  return common_ != nullptr && gathered >= common_ &&
         gathered + bytes <= common_ + sizes_.common_bytes &&
         options.shard == options.gathered + rank_ * options.shard_elements;
}

absl::Status SharedMemoryCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  const int64_t elements = options.shard_elements;
  if (IsOwnSlice(options)) {
    return Meet(issues_.Issue(CollectiveKind::kAllGatherInPlace, options.tag, elements), -1);
  }
  const IssueRecord issue = issues_.Issue(CollectiveKind::kAllGather, options.tag, elements);
  return GatherFromArena(issue, options);
}

absl::Status SharedMemoryCommunicator::GatherFromArena(const IssueRecord& issue,
                                                       const AllGatherOptions& options) {
  const int64_t elements = options.shard_elements;
  const int64_t offset = ReadableOffset(options.shard, elements * kElementBytes);
  RETURN_IF_ERROR(Meet(issue, offset));
  bool readable = true;
  for (int r = 0; r < size_; ++r) {
    readable = readable && block_.last(r).offset >= 0;
  }
  if (!readable) {  // the same verdict on every rank: all have read the same slots
    const int64_t all_bytes = elements * size_ * kElementBytes;
    return BounceGather(
        issue,
        BytesOf(options.shard, elements),
        {reinterpret_cast<std::byte*>(options.gathered), static_cast<size_t>(all_bytes)});
  }
  for (int r = 0; r < size_ && elements > 0; ++r) {
    float* target = options.gathered + r * elements;
    const std::byte* source = common_ + block_.last(r).offset;
    if (reinterpret_cast<const std::byte*>(target) != source) {
      std::memcpy(target, source, static_cast<size_t>(elements * kElementBytes));
    }
  }
  return Meet(issue, -1);  // shards may be written again
}

absl::StatusOr<PieceViews> SharedMemoryCommunicator::ExchangePieces(
    const ExchangeOptions& options) {
  const int64_t elements = options.shard_elements;
  CHECK(elements >= 0 && options.contributors >= 0 && options.contributors <= size_);
  int64_t offset = -1;
  if (rank_ < options.contributors) {
    offset = ReadableOffset(options.staging, elements * size_ * kElementBytes);
    CHECK_MSG(offset >= 0 || elements == 0, "staging must lie in the symmetric arena");
  }
  const IssueRecord issue = issues_.Issue(CollectiveKind::kExchange, options.tag, elements);
  RETURN_IF_ERROR(Meet(issue, offset));
  PieceViews views;
  for (int r = 0; r < options.contributors; ++r) {
    const int64_t staged = block_.last(r).offset;
    const std::byte* piece = nullptr;
    if (elements > 0) {
      CHECK_MSG(staged >= 0, "a contributor has staged nothing: contributors differ between ranks");
      piece = common_ + staged + rank_ * elements * kElementBytes;
    }
    views.pieces.push_back(reinterpret_cast<const float*>(piece));
  }
  return views;
}

}  // namespace ravel::comm
