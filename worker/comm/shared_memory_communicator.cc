// Collectives between ranks that map the same memory. An exchange copies nothing: the barrier
// publishes offsets in the arena, and every rank reads its peers' staging in place until
// ReleasePieces. An all-gather copies each shard once, from where its owner has it, and is only a
// barrier if the shards already lie side by side in memory that all ranks share. A shard outside
// the arena goes through bounce buffers, one barrier per round. Setting up memory ends with an
// agreement that all ranks succeeded (AllSucceeded), so that none waits for one that has given up.

#include "worker/comm/shared_memory_communicator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/tree_reduce.h"
#include "worker/comm/split_groups.h"

namespace ravel::comm {
namespace {

// Room for the record by which the ranks of a split open their memory.
constexpr size_t kRecordBytes = 256;

std::span<const std::byte> BytesOf(const void* data, int64_t bytes) {
  return {static_cast<const std::byte*>(data), Size(bytes)};
}

}  // namespace

SharedMemoryCommunicator::Root::Root(std::shared_ptr<SharedSegment> its_segment,
                                     int its_rank,
                                     std::vector<int> its_names,
                                     CollectiveLedger* its_ledger)
    : segment(std::move(its_segment)),
      rank(its_rank),
      size(static_cast<int>(its_names.size())),
      names(std::move(its_names)),
      ledger(its_ledger == nullptr ? own_ledger : *its_ledger),
      domain(*reinterpret_cast<GroupHeader*>(segment->block()), segment) {}

std::vector<int> SharedMemoryCommunicator::Root::NamesOf(const std::vector<int>& ranks) const {
  std::vector<int> named;
  for (const int of_rank : ranks) {
    named.push_back(At(names, of_rank));
  }
  return named;
}

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<SharedSegment> segment,
                                                   int rank,
                                                   int size)
    : SharedMemoryCommunicator(
          std::make_shared<Root>(segment, rank, WholeGroup(size).members, nullptr),
          Member{.name = WholeGroup(size).name,
                 .ranks = WholeGroup(size).members,
                 .rank = rank,
                 .block = segment->block()}) {}

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<SharedSegment> segment,
                                                   int rank,
                                                   HostRanks host)
    : SharedMemoryCommunicator(
          std::make_shared<Root>(segment, rank, host.ranks, &host.ledger),
          Member{.name = "host",
                 .ranks = WholeGroup(static_cast<int>(host.ranks.size())).members,
                 .rank = rank,
                 .block = segment->block()}) {}

SharedMemoryCommunicator::SharedMemoryCommunicator(std::shared_ptr<Root> root, Member member)
    : root_(std::move(root)),
      ranks_(std::move(member.ranks)),
      rank_(member.rank),
      size_(static_cast<int>(ranks_.size())),
      is_root_(member.block == root_->segment->block()),
      log_(root_->ledger.Open({.name = std::move(member.name), .members = root_->NamesOf(ranks_)})),
      block_({.memory = member.block,
              .rank = rank_,
              .size = size_,
              .host_ranks = root_->size,
              .root = reinterpret_cast<const GroupHeader*>(root_->segment->block()),
              .on_mismatch =
                  [log = log_.get(), root = root_.get()](
                      int a, const IssueRecord& issue_a, int b, const IssueRecord& issue_b) {
                    root->domain.Fail(log->Mismatch(a, issue_a, b, issue_b));
                  }}) {}

SharedMemoryCommunicator::~SharedMemoryCommunicator() {
  // Fails this group alone: others may still have work that does not need this rank.
  FailGroup(block_.header(),
            absl::AbortedError(absl::StrCat("rank ", At(root_->names, root_->rank), " left")));
}

void SharedMemoryCommunicator::Abort(std::string_view reason) {
  root_->domain.Fail(absl::AbortedError(std::string(reason)));
}

absl::Status SharedMemoryCommunicator::Meet(const IssueRecord& issue, int64_t offset) {
  block_.Publish(issue, offset);
  RETURN_IF_ERROR(block_.Arrive());
  log_->Keep(issue);  // before a rank may wait, and while what it published is on its way
  return block_.Depart();
}

absl::Status SharedMemoryCommunicator::Close(absl::Status status) {
  if (status.ok()) {
    log_->Complete();
  }
  return status;
}

absl::Status SharedMemoryCommunicator::Barrier(const CollectiveTag& tag) {
  return Close(Meet(log_->Next(CollectiveKind::kBarrier, tag, {}), -1));
}

absl::Status SharedMemoryCommunicator::ReleasePieces(const CollectiveTag& tag) {
  return Close(Meet(log_->Next(CollectiveKind::kRelease, tag, {}), -1));
}

absl::Status SharedMemoryCommunicator::AllGatherBytes(const CollectiveTag& tag,
                                                      std::span<const std::byte> mine,
                                                      std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * Size(size_));
  CHECK_LE(static_cast<int64_t>(mine.size()), kMaxGatherBytes);
  const auto bytes = static_cast<int64_t>(mine.size());
  const IssueRecord issue =
      log_->Next(CollectiveKind::kAllGatherBytes, tag, {.elements = bytes, .element_bytes = 1});
  return Close(BounceGather(issue, mine, all));
}

absl::Status SharedMemoryCommunicator::BounceGather(const IssueRecord& issue,
                                                    std::span<const std::byte> mine,
                                                    std::span<std::byte> all) {
  size_t done = 0;
  do {
    const size_t part = std::min(mine.size() - done, Size(kBounceBytes));
    if (part > 0) {
      std::memcpy(block_.mine_bounce(), mine.data() + done, part);
    }
    RETURN_IF_ERROR(Meet(issue, -1));
    for (int r = 0; r < size_ && part > 0; ++r) {
      std::byte* target = all.data() + Size(r) * mine.size() + done;
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
  const IssueRecord issue = log_->Next(CollectiveKind::kAllocateArena, {}, {});
  std::vector<ArenaSizes> all(Size(size_));
  RETURN_IF_ERROR(BounceGather(
      issue, std::as_bytes(std::span(&sizes, 1)), std::as_writable_bytes(std::span(all))));
  const auto text = [](const ArenaSizes& s) {
    return absl::StrCat(
        s.private_bytes, "/", s.symmetric_bytes, "/", s.common_bytes, "*", s.common_copies);
  };
  for (int r = 1; r < size_; ++r) {
    if (text(At(all, r)) != text(all[0])) {
      return absl::FailedPreconditionError(
          absl::StrCat("arena sizes (private/symmetric/common bytes) differ: rank ",
                       root_->names[0],
                       " wants ",
                       text(all[0]),
                       ", rank ",
                       At(root_->names, r),
                       " wants ",
                       text(At(all, r))));
    }
  }
  return Close(absl::OkStatus());
}

// A rank that failed does so on all ranks, so that none waits for it.
absl::Status SharedMemoryCommunicator::AllSucceeded(const IssueRecord& issue,
                                                    const absl::Status& mine) {
  if (!mine.ok()) {
    root_->domain.Fail(Annotate(mine, absl::StrCat("rank ", At(root_->names, rank_))));
    return mine;
  }
  return Meet(issue, -1);
}

absl::Status SharedMemoryCommunicator::MapArena(const ArenaSizes& sizes) {
  ASSIGN_OR_RETURN(root_->private_part, PrivateMapping::Create(sizes.private_bytes));
  const int64_t total = root_->symmetric_begin + size_ * root_->stride;
  if (total == 0) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(root_->base, root_->segment->MapArena(total));
  if (rank_ == 0 || root_->CopyOf(rank_) != root_->CopyOf(rank_ - 1)) {
    RETURN_IF_ERROR(root_->segment->ReserveArena(root_->CopyOf(rank_) * root_->common_stride,
                                                 root_->common_stride));
  }
  return root_->segment->ReserveArena(root_->symmetric_begin + rank_ * root_->stride,
                                      root_->stride);
}

absl::Status SharedMemoryCommunicator::AllocateArena(const ArenaSizes& sizes) {
  CHECK_MSG(is_root_ && !root_->allocated, "the arena is allocated once, before any split of it");
  CHECK(sizes.private_bytes >= 0 && sizes.symmetric_bytes >= 0 && sizes.common_bytes >= 0);
  CHECK_MSG(sizes.common_copies >= 1 && size_ % sizes.common_copies == 0,
            "every copy of the common memory has the same number of ranks");
  root_->allocated = true;
  if (absl::Status equal = AgreeOnSizes(sizes); !equal.ok()) {
    root_->domain.Fail(equal);
    return equal;
  }
  root_->sizes = sizes;
  root_->common_stride = RoundUp(sizes.common_bytes, kPageBytes);
  root_->symmetric_begin = root_->common_stride * sizes.common_copies;
  root_->stride = RoundUp(sizes.symmetric_bytes, kPageBytes);
  const int64_t total = root_->symmetric_begin + size_ * root_->stride;
  const IssueRecord issue = log_->Next(CollectiveKind::kAllocateArena, {}, {.elements = total});
  absl::Status made;
  if (total > 0 && rank_ == 0) {
    made = root_->segment->CreateArena(total);
  }
  RETURN_IF_ERROR(AllSucceeded(issue, made));
  return Close(AllSucceeded(issue, MapArena(sizes)));
}

std::byte* SharedMemoryCommunicator::arena(plan::MemoryKind kind) {
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return root_->private_part.data();
    case plan::MemoryKind::kSymmetric:
      return root_->base == nullptr || root_->sizes.symmetric_bytes == 0
                 ? nullptr
                 : root_->symmetric_of(root_->rank);
    case plan::MemoryKind::kCommon:
      return root_->base == nullptr || root_->sizes.common_bytes == 0 ? nullptr
                                                                      : root_->own_common();
    case plan::MemoryKind::kOffload:
      break;
  }
  return nullptr;
}

int64_t SharedMemoryCommunicator::ReadableOffset(const void* data, int64_t bytes) const {
  const auto inside = [&](const std::byte* begin, int64_t length) {
    const auto* address = static_cast<const std::byte*>(data);
    return length > 0 && address >= begin && address + bytes <= begin + length;
  };
  if (data == nullptr || root_->base == nullptr) {
    return -1;
  }
  if (inside(root_->own_common(), root_->sizes.common_bytes) ||
      inside(root_->symmetric_of(root_->rank), root_->sizes.symmetric_bytes)) {
    return static_cast<const std::byte*>(data) - root_->base;
  }
  return -1;
}

// -- splits

absl::StatusOr<std::vector<int>> SharedMemoryCommunicator::AgreeOnGroups(
    const IssueRecord& issue, const SplitOptions& options) {
  const std::vector<int32_t> mine = SplitRow(options, size_);
  std::vector<int32_t> all(mine.size() * Size(size_));
  RETURN_IF_ERROR(
      BounceGather(issue, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  auto leaders = SplitLeaders(all, size_);
  if (!leaders.ok()) {
    root_->domain.Fail(leaders.status());
  }
  return leaders;
}

absl::StatusOr<std::shared_ptr<SharedSegment>> SharedMemoryCommunicator::ShareChild(
    const IssueRecord& issue, int64_t block_bytes) {
  std::shared_ptr<SharedSegment> child;
  char mine[kRecordBytes] = {};
  absl::Status made;
  if (rank_ == 0) {
    auto created = root_->segment->CreateChild(block_bytes);
    made = created.status();
    if (made.ok()) {
      child = created->segment;
      CHECK_LT(created->record.size(), kRecordBytes);
      created->record.copy(mine, created->record.size());
    }
  }
  RETURN_IF_ERROR(AllSucceeded(issue, made));
  std::vector<char> all(kRecordBytes * Size(size_));
  RETURN_IF_ERROR(
      BounceGather(issue, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  absl::Status opened;
  if (rank_ != 0) {
    auto segment = root_->segment->OpenChild(std::string(all.data()), block_bytes);
    opened = segment.status();
    if (opened.ok()) {
      child = *std::move(segment);
    }
  }
  RETURN_IF_ERROR(AllSucceeded(issue, opened));
  return child;
}

absl::StatusOr<std::unique_ptr<Communicator>> SharedMemoryCommunicator::Split(
    const SplitOptions& options) {
  CHECK_MSG(is_root_, "the whole group is split, not its parts");
  const IssueRecord issue = log_->Next(CollectiveKind::kSplit, {}, SplitAmount(options));
  ASSIGN_OR_RETURN(const std::vector<int> leaders, AgreeOnGroups(issue, options));
  // The blocks of all groups, in the order of their first members.
  Member member = {.name = options.name, .ranks = options.members};
  int64_t own_offset = 0;
  int64_t block_bytes = 0;
  std::vector<int64_t> offsets;
  for (int r = 0; r < size_; ++r) {
    if (At(leaders, r) != r) {
      continue;
    }
    if (r == options.members.front()) {
      own_offset = block_bytes;
    }
    offsets.push_back(block_bytes);
    block_bytes += GroupBlockBytes(static_cast<int>(std::count(leaders.begin(), leaders.end(), r)));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<SharedSegment> segment, ShareChild(issue, block_bytes));
  std::vector<GroupHeader*> headers;
  for (const int64_t offset : offsets) {
    headers.push_back(reinterpret_cast<GroupHeader*>(segment->block() + offset));
  }
  root_->domain.Add(headers, segment);
  member.rank = PositionIn(options.members, rank_);
  member.block = segment->block() + own_offset;
  RETURN_IF_ERROR(Close(Meet(issue, -1)));  // from here on a failure of one reaches all
  return std::unique_ptr<Communicator>(new SharedMemoryCommunicator(root_, std::move(member)));
}

// -- tensors

// The same verdict on every rank: their positions in equal layouts are equal.
bool SharedMemoryCommunicator::IsSharedSlice(const AllGatherOptions& options) const {
  const int64_t shard_bytes = options.shard_elements * options.element_bytes;
  const auto* gathered = reinterpret_cast<const std::byte*>(options.gathered);
  if (root_->base == nullptr || root_->CopyOf(ranks_.front()) != root_->CopyOf(ranks_.back())) {
    return false;
  }
  return gathered >= root_->own_common() &&
         gathered + shard_bytes * size_ <= root_->own_common() + root_->sizes.common_bytes &&
         reinterpret_cast<const std::byte*>(options.shard) == gathered + rank_ * shard_bytes;
}

absl::Status SharedMemoryCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  const IssueLog::Amount amount = {.elements = options.shard_elements,
                                   .element_bytes = options.element_bytes};
  if (IsSharedSlice(options)) {
    return Close(Meet(log_->Next(CollectiveKind::kAllGatherInPlace, options.tag, amount), -1));
  }
  const IssueRecord issue = log_->Next(CollectiveKind::kAllGather, options.tag, amount);
  return Close(GatherFromArena(issue, options));
}

absl::Status SharedMemoryCommunicator::GatherFromArena(const IssueRecord& issue,
                                                       const AllGatherOptions& options) {
  const int64_t bytes = options.shard_elements * options.element_bytes;
  auto* gathered = reinterpret_cast<std::byte*>(options.gathered);
  RETURN_IF_ERROR(Meet(issue, ReadableOffset(options.shard, bytes)));
  bool readable = true;
  for (int r = 0; r < size_; ++r) {
    readable = readable && block_.last_offset(r) >= 0;
  }
  if (!readable) {  // the same verdict on every rank: all have read the same slots
    return BounceGather(issue, BytesOf(options.shard, bytes), {gathered, Size(bytes * size_)});
  }
  for (int i = 0; i < size_ && bytes > 0; ++i) {
    const int r = (rank_ + i) % size_;  // so that ranks do not all read the same shard
    std::byte* target = gathered + r * bytes;
    const std::byte* source = root_->base + block_.last_offset(r);
    if (target != source) {
      kernels::CopyBytes(stream_, {.to = target, .from = source, .bytes = bytes});
    }
  }
  return Meet(issue, -1);  // shards may be written again
}

absl::StatusOr<PieceViews> SharedMemoryCommunicator::ExchangePieces(
    const ExchangeOptions& options) {
  const int64_t bytes = options.shard_elements * options.element_bytes;
  CHECK(bytes >= 0 && options.contributors >= 0 && options.contributors <= size_);
  int64_t offset = -1;
  if (rank_ < options.contributors) {
    offset = ReadableOffset(options.staging, bytes * size_);
    CHECK_MSG(offset >= 0 || bytes == 0, "staging must lie in the symmetric arena");
  }
  const IssueRecord issue = log_->Next(CollectiveKind::kExchange,
                                       options.tag,
                                       {.elements = options.shard_elements,
                                        .element_bytes = options.element_bytes,
                                        .contributors = options.contributors});
  RETURN_IF_ERROR(Close(Meet(issue, offset)));
  PieceViews views;
  for (int r = 0; r < options.contributors; ++r) {
    const std::byte* piece = nullptr;
    if (bytes > 0) {
      piece = root_->base + block_.last_offset(r) + rank_ * bytes;
    }
    views.pieces.push_back(reinterpret_cast<const float*>(piece));
  }
  return views;
}

}  // namespace ravel::comm
