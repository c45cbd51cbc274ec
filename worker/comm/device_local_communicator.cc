// Collectives between threads that share one CUDA device. Each collective is a meeting: every rank
// records an event, offers it with its memory to the others on the host, and makes its stream wait
// for all offered events. Memory is then read in place; only an all-gather whose shards do not
// already lie in the shared part copies, and meets a second time so that shards may be overwritten.
// All ranks check the same offers and therefore reach the same verdict on a mismatch. Cost: one
// host barrier per meeting; no host wait for the device.

#include "worker/comm/device_local_communicator.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include <absl/base/thread_annotations.h>
#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/mutex.h"
#include "common/signed_size.h"
#include "worker/comm/issue_log.h"
#include "worker/comm/local_communicator.h"

namespace ravel::comm {
namespace {

using kernels::CudaEvent;
using kernels::CudaMemory;
using kernels::CudaStream;

constexpr int64_t kDeviceAlignment = 256;

// State that the ranks of a group share. Lives until the last of them goes, so that neither memory
// nor events go while work of a peer may still refer to them. Thread-safe.
class DeviceGroup {
 public:
  DeviceGroup(kernels::CudaGpu& gpu, int size)
      : gpu_(gpu), parts_(Size(size)), commons_(parts_.size()) {}

  kernels::CudaGpu& gpu() { return gpu_; }

  absl::StatusOr<CudaEvent*> NewEvent() {
    ASSIGN_OR_RETURN(CudaEvent event, gpu_.MakeEvent());
    MutexLock lock(mutex_);
    return &events_.emplace_back(std::move(event));
  }

  // Each rank's own part, and the copies of the common block: written by one rank each, read after
  // the hosts have met.
  CudaMemory& part(int rank) { return At(parts_, rank); }
  CudaMemory& common(int64_t copy) { return At(commons_, copy); }

 private:
  kernels::CudaGpu& gpu_;
  Mutex mutex_;
  std::deque<CudaEvent> events_ ABSL_GUARDED_BY(mutex_);
  std::vector<CudaMemory> parts_;
  std::vector<CudaMemory> commons_;
};

// The call and memory that a rank shows its peers when it issues a collective.
struct Offer {
  const CudaEvent* event = nullptr;   // recorded where the memory may be read
  const std::byte* memory = nullptr;  // that peers may read; nullptr: none
  int64_t elements = 0;
  int32_t element_bytes = 0;
  int32_t contributors = 0;
  CollectiveKind kind = CollectiveKind::kBarrier;
};

bool SameCall(const Offer& a, const Offer& b) {
  return a.kind == b.kind && a.elements == b.elements && a.element_bytes == b.element_bytes &&
         a.contributors == b.contributors;
}

std::string CallText(const Offer& offer) {
  return absl::StrCat(CollectiveKindName(offer.kind),
                      " of ",
                      offer.elements,
                      " elements of ",
                      offer.element_bytes,
                      " bytes");
}

CudaStream& CudaStreamOf(kernels::Stream* stream) {
  auto* on_device = dynamic_cast<CudaStream*>(stream);
  CHECK_MSG(on_device != nullptr, "a collective of a device needs a stream of it");
  return *on_device;
}

class DeviceLocalCommunicator final : public Communicator {
 public:
  // Creates the communicator of the whole group; `host` is this rank's communicator of it on the
  // host.
  static absl::StatusOr<std::unique_ptr<Communicator>> Create(std::shared_ptr<DeviceGroup> group,
                                                              std::unique_ptr<Communicator> host) {
    auto root = std::make_shared<Root>(std::move(group), host->rank(), host->size());
    std::vector<int> all(Size(host->size()));
    std::iota(all.begin(), all.end(), 0);
    return Make(std::move(root), std::move(host), std::move(all));
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  const char* transport() const override { return "device_local"; }
  kernels::Backend backend() const override { return kernels::Backend::kCuda; }
  bool shared_memory() const override { return true; }

  absl::Status AllocateArena(const ArenaSizes& sizes) override;
  std::byte* arena(plan::MemoryKind kind) override;
  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override;

  absl::Status Barrier(const CollectiveTag& tag) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return host_->Barrier(tag);
  }
  absl::Status AllGather(const AllGatherOptions& options) override;
  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override;
  absl::Status ReleasePieces(const CollectiveTag& tag) override;
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override {
    RETURN_IF_ERROR(root_->failure.Get());
    return host_->AllGatherBytes(tag, mine, all);
  }
  void Abort(std::string_view reason) override { host_->Abort(reason); }
  absl::Status Failure() const override { return root_->failure.Get(); }
  IssueState issued() const override { return host_->issued(); }
  CollectiveLedger& ledger() override { return host_->ledger(); }

 private:
  // State that a rank's communicators share.
  struct Root {
    Root(std::shared_ptr<DeviceGroup> its_group, int its_rank, int its_size)
        : group(std::move(its_group)), rank(its_rank), size(its_size) {}
    int64_t CopyOf(int of_rank) const { return of_rank * sizes.common_copies / size; }

    const std::shared_ptr<DeviceGroup> group;
    const int rank;
    const int size;
    StickyFailure failure;
    bool allocated = false;
    ArenaSizes sizes;
    int64_t symmetric_begin = 0;
  };
  DeviceLocalCommunicator(std::shared_ptr<Root> root,
                          std::unique_ptr<Communicator> host,
                          std::vector<int> members)
      : root_(std::move(root)),
        host_(std::move(host)),
        members_(std::move(members)),
        offers_(members_.size()) {}
  static absl::StatusOr<std::unique_ptr<Communicator>> Make(std::shared_ptr<Root> root,
                                                            std::unique_ptr<Communicator> host,
                                                            std::vector<int> members) {
    std::unique_ptr<DeviceLocalCommunicator> made(
        new DeviceLocalCommunicator(std::move(root), std::move(host), std::move(members)));
    for (CudaEvent*& event : made->events_) {
      ASSIGN_OR_RETURN(event, made->root_->group->NewEvent());
    }
    return made;
  }

  // Hosts hand over events that are recorded on their streams now, with what they offer; then this
  // stream waits for those of the peers. Fills offers_.
  absl::Status Meet(const CollectiveTag& tag, CudaStream& stream, Offer mine);
  absl::Status CheckOffers();
  bool IsSharedSlice(const AllGatherOptions& options) const;
  absl::Status MakeArena(const ArenaSizes& sizes);
  absl::Status Allocate(int64_t bytes, const char* what, CudaMemory& memory);

  const std::shared_ptr<Root> root_;
  const std::unique_ptr<Communicator> host_;
  const std::vector<int> members_;  // ranks of the whole group
  std::vector<Offer> offers_;       // by rank, of the last meeting
  // In turns: when one is recorded again, all peers have come to the meeting in between, and so
  // have issued their waits for its last recording.
  std::array<CudaEvent*, 2> events_ = {};
  uint64_t meetings_ = 0;
  CudaStream* exchange_stream_ = nullptr;  // of the last ExchangePieces
};

absl::Status DeviceLocalCommunicator::Meet(const CollectiveTag& tag,
                                           CudaStream& stream,
                                           Offer mine) {
  RETURN_IF_ERROR(root_->failure.Get());
  if (size() > 1) {
    CudaEvent* event = events_[meetings_++ % events_.size()];
    stream.Record(*event);
    mine.event = event;
  }
  RETURN_IF_ERROR(host_->AllGatherBytes(tag,
                                        std::as_bytes(std::span<const Offer>(&mine, 1)),
                                        std::as_writable_bytes(std::span<Offer>(offers_))));
  RETURN_IF_ERROR(CheckOffers());
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) {
      stream.Wait(*At(offers_, r).event);
    }
  }
  return absl::OkStatus();
}

// The same verdict on every rank: all have the same offers.
absl::Status DeviceLocalCommunicator::CheckOffers() {
  for (size_t r = 1; r < offers_.size(); ++r) {
    if (!SameCall(offers_[0], offers_[r])) {
      const absl::Status status = root_->failure.Set(
          absl::FailedPreconditionError(absl::StrCat(kMismatchText,
                                                     ": rank 0 of the group has issued ",
                                                     CallText(offers_[0]),
                                                     ", rank ",
                                                     r,
                                                     " ",
                                                     CallText(offers_[r]))));
      host_->Abort(std::string(status.message()));
      return status;
    }
  }
  return absl::OkStatus();
}

// -- arena

absl::Status DeviceLocalCommunicator::Allocate(int64_t bytes,
                                               const char* what,
                                               CudaMemory& memory) {
  kernels::CudaGpu& gpu = root_->group->gpu();
  auto made = gpu.AllocateDevice(std::max(bytes, kDeviceAlignment));
  if (!made.ok()) {
    return Annotate(made.status(), absl::StrCat(what, " of the arena"));
  }
  memory = *std::move(made);
  ASSIGN_OR_RETURN(const auto stream, gpu.MakeCopyStream(kernels::CudaGpu::Priority::kNormal));
  stream->FillZero(memory.data(), memory.bytes());
  return stream->Synchronize();
}

absl::Status DeviceLocalCommunicator::MakeArena(const ArenaSizes& sizes) {
  Root& root = *root_;
  root.symmetric_begin = RoundUp(sizes.private_bytes, kDeviceAlignment);
  RETURN_IF_ERROR(Allocate(
      root.symmetric_begin + sizes.symmetric_bytes, "a rank's part", root.group->part(root.rank)));
  const int64_t copy = root.CopyOf(root.rank);
  const bool first = root.rank == 0 || copy != root.CopyOf(root.rank - 1);
  if (first && sizes.common_bytes > 0) {
    RETURN_IF_ERROR(Allocate(sizes.common_bytes, "the common block", root.group->common(copy)));
  }
  return absl::OkStatus();
}

absl::Status DeviceLocalCommunicator::AllocateArena(const ArenaSizes& sizes) {
  CHECK_MSG(!root_->allocated, "the arena is allocated once, by the whole group");
  CHECK(sizes.private_bytes >= 0 && sizes.symmetric_bytes >= 0 && sizes.common_bytes >= 0);
  CHECK_MSG(sizes.common_copies >= 1 && size() % sizes.common_copies == 0,
            "every copy of the common memory has the same number of ranks");
  root_->allocated = true;
  root_->sizes = sizes;
  const absl::Status made = MakeArena(sizes);
  if (!made.ok()) {
    host_->Abort(absl::StrCat("rank ", rank(), ": ", made.message()));
    return root_->failure.Set(made);
  }
  // All have theirs, of the same sizes: offsets of one rank are those of all.
  const std::array<int64_t, 4> mine = {
      sizes.private_bytes, sizes.symmetric_bytes, sizes.common_bytes, sizes.common_copies};
  std::vector<std::array<int64_t, 4>> all(Size(size()));
  RETURN_IF_ERROR(host_->AllGatherBytes(
      {}, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
  for (const auto& other : all) {
    if (other != all[0]) {
      return root_->failure.Set(
          absl::FailedPreconditionError("arena sizes differ between the ranks of a device"));
    }
  }
  return absl::OkStatus();
}

std::byte* DeviceLocalCommunicator::arena(plan::MemoryKind kind) {
  if (!root_->allocated) {
    return nullptr;
  }
  auto* part = static_cast<std::byte*>(root_->group->part(root_->rank).data());
  switch (kind) {
    case plan::MemoryKind::kPrivate:
      return part;
    case plan::MemoryKind::kSymmetric:
      return root_->sizes.symmetric_bytes == 0 ? nullptr : part + root_->symmetric_begin;
    case plan::MemoryKind::kCommon:
      return static_cast<std::byte*>(root_->group->common(root_->CopyOf(root_->rank)).data());
    case plan::MemoryKind::kOffload:
      break;
  }
  return nullptr;
}

// -- splits

absl::StatusOr<std::unique_ptr<Communicator>> DeviceLocalCommunicator::Split(
    const SplitOptions& options) {
  RETURN_IF_ERROR(root_->failure.Get());
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> host, host_->Split(options));
  return Make(root_, std::move(host), options.members);
}

// -- tensors

// The same verdict on every rank: their positions in equal layouts are equal.
bool DeviceLocalCommunicator::IsSharedSlice(const AllGatherOptions& options) const {
  const CudaMemory& common = root_->group->common(root_->CopyOf(root_->rank));
  if (common.data() == nullptr ||
      root_->CopyOf(members_.front()) != root_->CopyOf(members_.back())) {
    return false;
  }
  const int64_t bytes = options.shard_elements * options.element_bytes;
  const auto* begin = static_cast<const std::byte*>(common.data());
  const auto* gathered = reinterpret_cast<const std::byte*>(options.gathered);
  return gathered >= begin && gathered + bytes * size() <= begin + root_->sizes.common_bytes &&
         reinterpret_cast<const std::byte*>(options.shard) == gathered + rank() * bytes;
}

absl::Status DeviceLocalCommunicator::AllGather(const AllGatherOptions& options) {
  CHECK_GE(options.shard_elements, 0);
  CudaStream& stream = CudaStreamOf(options.stream);
  Offer offer = {.memory = reinterpret_cast<const std::byte*>(options.shard),
                 .elements = options.shard_elements,
                 .element_bytes = static_cast<int32_t>(options.element_bytes),
                 .kind = CollectiveKind::kAllGather};
  if (IsSharedSlice(options)) {
    offer.kind = CollectiveKind::kAllGatherInPlace;
    return Meet(options.tag, stream, offer);
  }
  RETURN_IF_ERROR(Meet(options.tag, stream, offer));
  const int64_t bytes = options.shard_elements * options.element_bytes;
  auto* gathered = reinterpret_cast<std::byte*>(options.gathered);
  for (int i = 0; i < size() && bytes > 0; ++i) {
    const int r = (rank() + i) % size();  // so that ranks do not all read the same shard
    const std::byte* source = At(offers_, r).memory;
    if (gathered + r * bytes != source) {
      stream.CopyMemory(gathered + r * bytes, source, bytes);
    }
  }
  offer.memory = nullptr;
  return Meet(options.tag, stream, offer);  // shards may be written again
}

absl::StatusOr<PieceViews> DeviceLocalCommunicator::ExchangePieces(const ExchangeOptions& options) {
  const int64_t bytes = options.shard_elements * options.element_bytes;
  CHECK(bytes >= 0 && options.contributors >= 0 && options.contributors <= size());
  CHECK_MSG(rank() >= options.contributors || options.staging != nullptr || bytes == 0,
            "a contributor has staged nothing");
  exchange_stream_ = &CudaStreamOf(options.stream);
  RETURN_IF_ERROR(Meet(options.tag,
                       *exchange_stream_,
                       {.memory = reinterpret_cast<const std::byte*>(options.staging),
                        .elements = options.shard_elements,
                        .element_bytes = static_cast<int32_t>(options.element_bytes),
                        .contributors = options.contributors,
                        .kind = CollectiveKind::kExchange}));
  PieceViews views;
  for (int r = 0; r < options.contributors; ++r) {
    const std::byte* staging = At(offers_, r).memory;
    views.pieces.push_back(
        reinterpret_cast<const float*>(bytes > 0 ? staging + rank() * bytes : nullptr));
  }
  return views;
}

absl::Status DeviceLocalCommunicator::ReleasePieces(const CollectiveTag& tag) {
  CHECK_MSG(exchange_stream_ != nullptr, "there was no exchange");
  return Meet(tag, *std::exchange(exchange_stream_, nullptr), {.kind = CollectiveKind::kRelease});
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateDeviceLocalGroup(
    kernels::CudaGpu& gpu, int size) {
  ASSIGN_OR_RETURN(auto hosts, CreateLocalGroup(size));
  const auto group = std::make_shared<DeviceGroup>(gpu, size);
  std::vector<std::unique_ptr<Communicator>> made;
  for (std::unique_ptr<Communicator>& host : hosts) {
    ASSIGN_OR_RETURN(auto communicator, DeviceLocalCommunicator::Create(group, std::move(host)));
    made.push_back(std::move(communicator));
  }
  return made;
}

}  // namespace ravel::comm
