// Collectives over NCCL. Tensor collectives go onto the caller's stream; host collectives
// (barriers, small byte gathers, set-up) go through a stream and pinned memory of their own
// (NcclMember). NCCL does not notice different collectives on different ranks and then hangs, so
// the issue log is exchanged with host collectives, and before every tensor collective if
// check_collectives is set. After a failure all groups of the rank are aborted together, and a
// group that does not close within 2 s is aborted, both before memory is freed: freeing may wait
// for the blocked work. Bytes per rank of n, for a shard of s bytes: an exchange sends and receives
// (n - 1) s.

#include "worker/comm/nccl_communicator.h"

#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/escaping.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cuda_host/nccl_group.h"
#include "worker/comm/nccl_member.h"
#include "worker/comm/nccl_root.h"
#include "worker/comm/split_groups.h"

namespace ravel::comm {
namespace {

using kernels::CudaMemory;
using kernels::CudaStream;
using kernels::NcclGroup;

constexpr char kRecordPrefix[] = "nccl1:";
// Time that a communicator which is done with waits for its last work before it lets go of its
// peers by force.
constexpr std::chrono::seconds kClosing{2};

CudaStream& StreamOfDevice(kernels::Stream* stream) {
  auto* on_device = dynamic_cast<CudaStream*>(stream);
  CHECK_MSG(on_device != nullptr, "a collective of a device needs a stream of it");
  return *on_device;
}

// The arena of a rank, which its splits use, too.
struct NcclArena {
  bool allocated = false;
  CudaMemory private_part, symmetric, common;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclRoot> root,
                   std::shared_ptr<NcclArena> arena,
                   std::shared_ptr<NcclMember> member,
                   bool is_root)
      : root_(std::move(root)),
        arena_(std::move(arena)),
        member_(std::move(member)),
        is_root_(is_root) {}
  ~NcclCommunicator() override;

  int rank() const override { return member_->rank(); }
  int size() const override { return member_->size(); }
  const char* transport() const override { return "nccl"; }
  kernels::Backend backend() const override { return kernels::Backend::kCuda; }
  bool shared_memory() const override { return false; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override;
  absl::Status Barrier(const CollectiveTag& tag) override {
    return member_->HostGather(log().Issue(CollectiveKind::kBarrier, tag, {}), {}, {});
  }
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override;
  void Abort(std::string_view reason) override {
    root_->Fail(absl::AbortedError(std::string(reason))).IgnoreError();  // kept for later calls
  }
  absl::Status Failure() const override { return root_->Poll(); }
  absl::Status Captures() const override;
  absl::Status MarkPassed(kernels::Stream& stream) override {
    return member_->Passed(StreamOfDevice(&stream));
  }
  IssueState issued() const override { return member_->log().state(); }
  CollectiveLedger& ledger() override { return root_->ledger(); }

 private:
  IssueLog& log() { return member_->log(); }
  absl::StatusOr<CudaMemory> AllocateZeros(int64_t bytes, CudaStream& stream);
  absl::Status MapArena(const ArenaSizes& sizes);
  absl::StatusOr<std::vector<int>> AgreeOnGroups(const IssueRecord& issue,
                                                 const SplitOptions& options);
  // A failure to issue is one of the whole rank.
  absl::Status Finish(absl::Status issued, CudaStream& stream);

  const std::shared_ptr<NcclRoot> root_;
  const std::shared_ptr<NcclArena> arena_;
  const std::shared_ptr<NcclMember> member_;
  const bool is_root_;
  CudaStream* exchange_stream_ = nullptr;  // of the last exchange
};

NcclCommunicator::~NcclCommunicator() {
  if (root_->Failure().ok() && member_->group().BeginClose().ok()) {
    const auto deadline = std::chrono::steady_clock::now() + kClosing;
    root_
        ->WaitFor([&]() -> absl::StatusOr<bool> {
          const absl::StatusOr<bool> settled = member_->group().Settled();
          return !settled.ok() || *settled || std::chrono::steady_clock::now() > deadline;
        })
        .IgnoreError();  // what is not closed is aborted
  }
  if (!root_->Failure().ok()) {
    root_->AbortAll();  // this group's work may be behind that of another
  }
  member_->group().End();  // before its memory goes, which would wait for work that peers hold up
  root_->Leave(member_.get());
}

// -- arena

absl::StatusOr<CudaMemory> NcclCommunicator::AllocateZeros(int64_t bytes, CudaStream& stream) {
  if (bytes == 0) {
    return CudaMemory();
  }
  absl::StatusOr<CudaMemory> memory = root_->gpu().AllocateDevice(bytes);
  if (!memory.ok()) {
    return Annotate(memory.status(), absl::StrCat("arena of rank ", rank()));
  }
  stream.FillZero(memory->data(), bytes);
  return memory;
}

absl::Status NcclCommunicator::MapArena(const ArenaSizes& sizes) {
  CudaStream& stream = member_->host_stream();
  ASSIGN_OR_RETURN(arena_->private_part, AllocateZeros(sizes.private_bytes, stream));
  ASSIGN_OR_RETURN(arena_->symmetric, AllocateZeros(sizes.symmetric_bytes, stream));
  ASSIGN_OR_RETURN(arena_->common, AllocateZeros(sizes.common_bytes, stream));
  return stream.Synchronize();
}

absl::Status NcclCommunicator::AllocateArena(const ArenaSizes& sizes) {
  CHECK_MSG(is_root_ && !arena_->allocated, "the arena is allocated once, and not for a split");
  arena_->allocated = true;
  const int64_t total = sizes.private_bytes + sizes.symmetric_bytes + sizes.common_bytes;
  // The sum is part of the issue hash: ranks that want different arenas are told so by name.
  RETURN_IF_ERROR(member_->HostGather(
      log().Issue(CollectiveKind::kAllocateArena, {}, {.elements = total}), {}, {}));
  const absl::Status mapped = MapArena(sizes);
  const auto mine = static_cast<std::byte>(mapped.ok() ? 0 : 1);
  std::vector<std::byte> all(Size(size()));
  RETURN_IF_ERROR(member_->HostGather(
      log().Issue(CollectiveKind::kAllocateArena, {}, {.elements = 1}), {&mine, 1}, all));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] != std::byte{0}) {
      // A rank that has its memory fails because of a peer, and its error says so.
      return root_->Fail(
          mapped.ok() ? absl::AbortedError(absl::StrCat("rank ", r, " has no memory for its arena"))
                      : mapped);
    }
  }
  return absl::OkStatus();
}

std::byte* NcclCommunicator::arena(plan::MemoryKind kind) {
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return static_cast<std::byte*>(arena_->private_part.data());
    case plan::MemoryKind::kSymmetric:
      return static_cast<std::byte*>(arena_->symmetric.data());
    case plan::MemoryKind::kCommon:
      return static_cast<std::byte*>(arena_->common.data());
    case plan::MemoryKind::kOffload:
      break;
  }
  return nullptr;
}

// -- splits

absl::StatusOr<std::vector<int>> NcclCommunicator::AgreeOnGroups(const IssueRecord& issue,
                                                                 const SplitOptions& options) {
  const std::vector<int32_t> mine = SplitRow(options, size());
  std::vector<int32_t> all(mine.size() * Size(size()));
  RETURN_IF_ERROR(member_->HostGather(
      issue, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  auto leaders = SplitLeaders(all, size());
  if (!leaders.ok()) {
    return root_->Fail(leaders.status());  // the same on every rank
  }
  return leaders;
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclCommunicator::Split(const SplitOptions& options) {
  CHECK_MSG(is_root_, "the whole group is split, not its parts");
  const IssueRecord issue = log().Issue(CollectiveKind::kSplit, {}, SplitAmount(options));
  ASSIGN_OR_RETURN(const std::vector<int> leaders, AgreeOnGroups(issue, options));
  const int position = PositionIn(options.members, rank());
  auto group = member_->group().BeginSplit(At(leaders, rank()),
                                           {.name = options.name,
                                            .ranks = static_cast<int>(options.members.size()),
                                            .rank = position,
                                            .max_ctas = root_->options().max_ctas});
  if (!group.ok()) {
    return root_->Fail(group.status());
  }
  const auto part = std::make_shared<NcclMember>(
      *root_,
      *group,
      root_->ledger().Open({.name = options.name, .members = options.members}),
      position);
  root_->Join(part);
  auto communicator = std::make_unique<NcclCommunicator>(root_, arena_, part, false);
  RETURN_IF_ERROR(root_->WaitForSetup(
      absl::StrCat("split of group ", options.name), [&]() -> absl::StatusOr<bool> {
        ASSIGN_OR_RETURN(const bool whole, member_->group().Settled());
        ASSIGN_OR_RETURN(const bool made, part->group().Settled());
        return whole && made;
      }));
  if (absl::Status prepared = part->Prepare(); !prepared.ok()) {
    return root_->Fail(std::move(prepared));
  }
  return communicator;
}

// -- tensors

absl::Status NcclCommunicator::Captures() const {
  return root_->options().check_collectives
             ? absl::FailedPreconditionError(
                   "ranks compare every collective, as they do where they "
                   "share a device")
             : absl::OkStatus();
}

absl::Status NcclCommunicator::Finish(absl::Status issued, CudaStream& stream) {
  if (issued.ok()) {
    issued = member_->Launched(stream);
  }
  return issued.ok() ? issued : root_->Fail(std::move(issued));
}

absl::Status NcclCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  CudaStream& stream = StreamOfDevice(options.stream);
  const int64_t bytes = options.shard_elements * options.element_bytes;
  const IssueRecord issue =
      log().Issue(CollectiveKind::kAllGather,
                  options.tag,
                  {.elements = options.shard_elements, .element_bytes = options.element_bytes});
  RETURN_IF_ERROR(member_->Announce(issue, stream));
  if (bytes == 0) {
    return member_->Passed(stream);
  }
  return Finish(member_->group().AllGather(stream, options.shard, options.gathered, bytes), stream);
}

absl::StatusOr<PieceViews> NcclCommunicator::ExchangePieces(const ExchangeOptions& options) {
  const int64_t bytes = options.shard_elements * options.element_bytes;
  CHECK(bytes >= 0 && options.contributors >= 0 && options.contributors <= size());
  CudaStream& stream = StreamOfDevice(options.stream);
  exchange_stream_ = &stream;
  const IssueRecord issue = log().Issue(CollectiveKind::kExchange,
                                        options.tag,
                                        {.elements = options.shard_elements,
                                         .element_bytes = options.element_bytes,
                                         .contributors = options.contributors});
  const bool contributes = rank() < options.contributors && bytes > 0;
  CHECK_MSG(!contributes || options.staging != nullptr, "a contributor needs staging");
  auto* staging = reinterpret_cast<std::byte*>(const_cast<float*>(options.staging));
  auto* receive = reinterpret_cast<std::byte*>(options.receive);
  std::vector<NcclGroup::Message> sends, receives;
  PieceViews views;
  for (int peer = 0; peer < size() && contributes; ++peer) {
    if (peer != rank()) {
      sends.push_back({.peer = peer, .data = staging + peer * bytes, .bytes = bytes});
    }
  }
  for (int peer = 0; peer < options.contributors; ++peer) {
    std::byte* piece = nullptr;
    if (bytes > 0 && peer == rank()) {
      piece = staging + rank() * bytes;
    } else if (bytes > 0) {
      piece = receive + peer * bytes;
      receives.push_back({.peer = peer, .data = piece, .bytes = bytes});
    }
    views.pieces.push_back(reinterpret_cast<const float*>(piece));
  }
  RETURN_IF_ERROR(member_->Announce(issue, stream));
  if (sends.empty() && receives.empty()) {
    RETURN_IF_ERROR(member_->Passed(stream));
  } else {
    RETURN_IF_ERROR(Finish(member_->group().Exchange(stream, sends, receives), stream));
  }
  return views;
}

// Pieces have left and come where the stream has passed the exchange, so nothing is sent; the next
// collective's hash covers the call.
absl::Status NcclCommunicator::ReleasePieces(const CollectiveTag& tag) {
  CHECK_MSG(exchange_stream_ != nullptr, "pieces are released that were never exchanged");
  log().Issue(CollectiveKind::kRelease, tag, {});
  RETURN_IF_ERROR(root_->Failure());
  return member_->Passed(*exchange_stream_);
}

absl::Status NcclCommunicator::AllGatherBytes(const CollectiveTag& tag,
                                              std::span<const std::byte> mine,
                                              std::span<std::byte> all) {
  CHECK(all.size() == mine.size() * Size(size()));
  const auto bytes = static_cast<int64_t>(mine.size());
  CHECK_LE(bytes, kMaxGatherBytes);
  return member_->HostGather(
      log().Issue(CollectiveKind::kAllGatherBytes, tag, {.elements = bytes, .element_bytes = 1}),
      mine,
      all);
}

// The id that rank 0 makes, on every rank.
absl::StatusOr<std::string> AgreeOnId(const NcclOptions& options) {
  std::string record = absl::StrCat(kRecordPrefix, "member");
  if (options.rank == 0) {
    ASSIGN_OR_RETURN(const std::string id, kernels::MakeNcclId(*options.gpu));
    record = absl::StrCat(kRecordPrefix, absl::BytesToHexString(id));
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> records,
                   options.rendezvous("nccl", std::move(record)));
  if (records.size() != Size(options.size)) {
    return absl::InternalError(absl::StrCat(
        "rendezvous of group nccl: ", records.size(), " records, expected ", options.size));
  }
  absl::string_view text = records[0];
  if (!absl::ConsumePrefix(&text, kRecordPrefix) ||
      text.size() != size_t{2} * kernels::cuda::kRavelNcclIdBytes) {
    return absl::InvalidArgumentError("NCCL record of rank 0: expected nccl1: and an id");
  }
  return absl::HexStringToBytes(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options) {
  if (options.gpu == nullptr) {
    return absl::InvalidArgumentError("transport nccl: needs a CUDA device");
  }
  RETURN_IF_ERROR(
      Annotate(kernels::NcclVersion(options.gpu->library()).status(), "transport nccl"));
  ASSIGN_OR_RETURN(const std::string id, AgreeOnId(options));
  ASSIGN_OR_RETURN(const std::shared_ptr<NcclGroup> group,
                   NcclGroup::Begin(*options.gpu,
                                    id,
                                    {.name = "world",
                                     .ranks = options.size,
                                     .rank = options.rank,
                                     .max_ctas = options.max_ctas}));
  const auto root = std::make_shared<NcclRoot>(options);
  const auto member = std::make_shared<NcclMember>(
      *root, group, root->ledger().Open(WholeGroup(options.size)), options.rank);
  root->Join(member);
  auto communicator = std::make_unique<NcclCommunicator>(
      root, std::make_shared<NcclArena>(), member, /*is_root=*/true);
  RETURN_IF_ERROR(root->WaitForSetup(absl::StrCat("rank ", options.rank, " joins group world"),
                                     [&] { return group->Settled(); }));
  if (absl::Status prepared = member->Prepare(); !prepared.ok()) {
    return root->Fail(std::move(prepared));
  }
  return communicator;
}

}  // namespace ravel::comm
