// Two communicators side by side: one of all ranks over TCP, and one in shared memory of the ranks
// of each host, which find each other over the first. They fail together: whoever sees a failure
// ends both, and the calls of peers with it.

#include "worker/comm/mixed_communicator.h"

#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <unistd.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/shape.h"
#include "common/signed_size.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/shared_memory_communicator.h"
#include "worker/comm/shared_segment.h"
#include "worker/comm/split_groups.h"

namespace ravel::comm {
namespace {

// Room for a key, and for the record by which the ranks of a host open their memory.
constexpr size_t kTextBytes = 512;
constexpr int64_t kPartAlignment = 4096;
using Text = std::array<char, kTextBytes>;

// State of one rank.
struct MixedRoot {
  std::unique_ptr<Communicator> all;
  std::unique_ptr<Communicator> host;  // goes before `all`, whose ledger it uses
  std::vector<int> host_of;            // for each rank the first one of its host
  StickyFailure failure;
  bool allocated = false;
  bool shares_arena = false;
  std::array<int64_t, 3> parts = {};  // where the kinds of memory begin, if it does

  void Abort(std::string_view reason) {
    all->Abort(reason);
    host->Abort(reason);
  }
  absl::Status Keep(absl::Status status) {
    if (status.ok()) {
      return status;
    }
    status = failure.Set(std::move(status));
    Abort(std::string(status.message()));
    return status;
  }
};

// The whole group, or one that was split off.
class MixedCommunicator final : public Communicator {
 public:
  // `part`: nullptr for the whole group.
  MixedCommunicator(std::shared_ptr<MixedRoot> root, std::unique_ptr<Communicator> part)
      : root_(std::move(root)),
        part_(std::move(part)),
        group_(part_ == nullptr ? *root_->all : *part_) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  const char* transport() const override { return part_ == nullptr ? "mixed" : group_.transport(); }
  bool shared_memory() const override { return group_.shared_memory(); }

  absl::Status AllocateArena(const ArenaSizes& sizes) override {
    CHECK_MSG(part_ == nullptr && !root_->allocated, "the arena is allocated once, of all ranks");
    RETURN_IF_ERROR(root_->failure.Get());
    return root_->Keep(Allocate(sizes));
  }
  std::byte* arena(plan::MemoryKind kind) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override;
  absl::Status Barrier(const CollectiveTag& tag) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return root_->Keep(group_.Barrier(tag));
  }
  absl::Status AllGather(const AllGatherOptions& options) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return root_->Keep(group_.AllGather(options));
  }
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override {
    RETURN_IF_ERROR(root_->failure.Get());
    auto views = group_.ExchangePieces(options);
    RETURN_IF_ERROR(root_->Keep(views.status()));
    return views;
  }
  absl::Status ReleasePieces(const CollectiveTag& tag) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return root_->Keep(group_.ReleasePieces(tag));
  }
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return root_->Keep(group_.AllGatherBytes(tag, mine, all));
  }
  void Abort(std::string_view reason) override { root_->Abort(reason); }
  IssueState issued() const override { return group_.issued(); }
  PeerWait TakePeerWait() override { return group_.TakePeerWait(); }
  CollectiveLedger& ledger() override { return root_->all->ledger(); }

 private:
  absl::Status Allocate(const ArenaSizes& sizes);
  // The groups of all ranks: whether each lies on one host whose ranks share memory.
  absl::StatusOr<bool> LiesOnHosts(const SplitOptions& options);

  const std::shared_ptr<MixedRoot> root_;
  const std::unique_ptr<Communicator> part_;
  Communicator& group_;
};

// -- arena

absl::Status MixedCommunicator::Allocate(const ArenaSizes& sizes) {
  root_->allocated = true;
  if (!root_->shares_arena) {
    return root_->all->AllocateArena(sizes);
  }
  const std::array<int64_t, 3> mine = {
      sizes.private_bytes, sizes.symmetric_bytes, sizes.common_bytes};
  std::vector<std::array<int64_t, 3>> wanted(Size(size()));
  RETURN_IF_ERROR(root_->all->AllGatherBytes(
      {}, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(wanted))));
  const auto text = [](const std::array<int64_t, 3>& parts) { return absl::StrJoin(parts, "/"); };
  for (int rank = 1; rank < size(); ++rank) {
    if (At(wanted, rank) != wanted[0]) {
      return absl::FailedPreconditionError(
          absl::StrCat("arena sizes (private/symmetric/common bytes) differ: rank 0 wants ",
                       text(wanted[0]),
                       ", rank ",
                       rank,
                       " wants ",
                       text(At(wanted, rank))));
    }
  }
  int64_t bytes = 0;
  for (size_t part = 0; part < mine.size(); ++part) {
    root_->parts[part] = bytes;
    bytes += RoundUp(mine[part], kPartAlignment);
  }
  return root_->host->AllocateArena(
      {.private_bytes = 0, .symmetric_bytes = bytes, .common_bytes = 0});
}

std::byte* MixedCommunicator::arena(plan::MemoryKind kind) {
  if (!root_->shares_arena) {
    return root_->all->arena(kind);
  }
  std::byte* const base = root_->host->arena(plan::MemoryKind::kSymmetric);
  if (base == nullptr) {
    return nullptr;
  }
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return base + root_->parts[0];
    case plan::MemoryKind::kSymmetric:
      return base + root_->parts[1];
    case plan::MemoryKind::kCommon:
      return base + root_->parts[2];
    case plan::MemoryKind::kOffload:
      break;
  }
  return nullptr;
}

// -- splits

absl::StatusOr<bool> MixedCommunicator::LiesOnHosts(const SplitOptions& options) {
  const std::vector<int32_t> mine = SplitRow(options, size());
  std::vector<int32_t> rows(mine.size() * Size(size()));
  RETURN_IF_ERROR(root_->all->AllGatherBytes(
      {}, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(rows))));
  ASSIGN_OR_RETURN(const std::vector<int> leaders, SplitLeaders(rows, size()));
  for (int rank = 0; rank < size(); ++rank) {
    if (At(root_->host_of, rank) != At(root_->host_of, At(leaders, rank))) {
      return false;
    }
  }
  return true;
}

absl::StatusOr<std::unique_ptr<Communicator>> MixedCommunicator::Split(
    const SplitOptions& options) {
  CHECK_MSG(part_ == nullptr, "the whole group is split, not its parts");
  RETURN_IF_ERROR(root_->failure.Get());
  const absl::StatusOr<bool> on_hosts = LiesOnHosts(options);
  RETURN_IF_ERROR(root_->Keep(on_hosts.status()));
  absl::StatusOr<std::unique_ptr<Communicator>> part;
  if (*on_hosts && (!root_->allocated || root_->shares_arena)) {
    root_->shares_arena = true;
    const int first = At(root_->host_of, rank());
    SplitOptions here = {.name = options.name, .members = {}};
    for (const int member : options.members) {
      const auto before = root_->host_of.begin() + member;
      here.members.push_back(static_cast<int>(std::count(root_->host_of.begin(), before, first)));
    }
    part = root_->host->Split(here);
  } else {
    part = root_->all->Split(options);
  }
  RETURN_IF_ERROR(root_->Keep(part.status()));
  log::Info(absl::StrCat("group ", options.name, " over ", (*part)->transport()));
  return std::make_unique<MixedCommunicator>(root_, *std::move(part));
}

// -- set-up

Text TextOf(const std::string& text) {
  CHECK_LT(text.size(), kTextBytes);
  Text padded = {};
  std::copy(text.begin(), text.end(), padded.begin());
  return padded;
}

absl::StatusOr<std::vector<Text>> GatherTexts(Communicator& all, const std::string& mine) {
  const Text padded = TextOf(mine);
  std::vector<Text> texts(Size(all.size()));
  RETURN_IF_ERROR(all.AllGatherBytes(
      {}, std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(texts))));
  return texts;
}

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The memory of a host's ranks: the first of them makes it, the others open it. Nothing where one
// of all ranks could not; then none has it.
absl::StatusOr<std::shared_ptr<MemfdSegment>> ShareSegment(Communicator& all,
                                                           const std::vector<int>& here) {
  const int first = here.front();
  const int ranks = static_cast<int>(here.size());
  std::shared_ptr<MemfdSegment> segment;
  absl::Status made;
  std::string record;
  if (all.rank() == first) {
    auto created = MemfdSegment::Create(ranks);
    made = created.status();
    if (made.ok()) {
      segment = *std::move(created);
      record = segment->record();
    }
  }
  ASSIGN_OR_RETURN(const std::vector<Text> records, GatherTexts(all, record));
  if (made.ok() && all.rank() != first) {
    auto opened = MemfdSegment::Open(std::string(At(records, first).data()), ranks);
    made = opened.status();
    if (made.ok()) {
      segment = *std::move(opened);
    }
  }
  const auto mine = static_cast<std::byte>(made.ok() ? 1 : 0);
  std::vector<std::byte> each(Size(all.size()));
  RETURN_IF_ERROR(all.AllGatherBytes({}, std::span(&mine, 1), each));
  for (int rank = 0; rank < all.size(); ++rank) {
    if (At(each, rank) == std::byte{0}) {
      log::Warning(absl::StrCat("no shared memory within hosts: rank ",
                                rank,
                                " cannot map that of another",
                                made.ok() ? "" : absl::StrCat(": ", made.message())));
      return std::shared_ptr<MemfdSegment>();
    }
  }
  return segment;
}

}  // namespace

std::string HostKey(const std::string& host_address) {
  std::array<char, PATH_MAX> link = {};
  const ssize_t length = readlink("/proc/self/ns/pid", link.data(), link.size() - 1);
  return absl::StrCat(FirstLine("/proc/sys/kernel/random/boot_id"),
                      " ",
                      length > 0 ? link.data() : "pid:unknown",
                      " ",
                      getppid(),
                      " ",
                      host_address.substr(0, 255));
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateMixedCommunicator(const MixedOptions& options) {
  auto root = std::make_shared<MixedRoot>();
  ASSIGN_OR_RETURN(root->all, CreateGlooCommunicator(options.gloo));
  Communicator& all = *root->all;
  ASSIGN_OR_RETURN(
      const std::vector<Text> keys,
      GatherTexts(
          all, options.host_key.empty() ? HostKey(options.gloo.host_address) : options.host_key));
  std::vector<int> here;
  for (int rank = 0; rank < all.size(); ++rank) {
    const auto first = std::find(keys.begin(), keys.end(), At(keys, rank));
    root->host_of.push_back(static_cast<int>(first - keys.begin()));
    if (At(keys, rank) == At(keys, all.rank())) {
      here.push_back(rank);
    }
  }
  ASSIGN_OR_RETURN(std::shared_ptr<MemfdSegment> segment, ShareSegment(all, here));
  if (segment == nullptr) {
    return std::move(root->all);
  }
  const int rank = PositionIn(here, all.rank());
  root->host = std::make_unique<SharedMemoryCommunicator>(
      std::move(segment),
      rank,
      SharedMemoryCommunicator::HostRanks{.ranks = std::move(here), .ledger = all.ledger()});
  return std::make_unique<MixedCommunicator>(std::move(root), nullptr);
}

}  // namespace ravel::comm
