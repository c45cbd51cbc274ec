#include "tests/worker/comm/nccl_testing.h"

#include <cstdlib>
#include <cstring>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <dlfcn.h>

#include "common/check.h"
#include "kernels/cuda_host/cuda_library.h"

namespace ravel::comm {
namespace {

using kernels::CudaGpu;
using kernels::CudaMemory;
using kernels::CudaStream;

// Arena of the host, beside that of the device.
struct HostArena {
  std::vector<std::byte> parts[4];  // by kind
};

class HostedCommunicator final : public Communicator {
 public:
  HostedCommunicator(std::shared_ptr<CudaGpu> gpu, std::shared_ptr<HostArena> arena)
      : gpu_(std::move(gpu)), arena_(std::move(arena)) {}

  absl::Status Take(std::unique_ptr<Communicator> inner) {
    inner_ = std::move(inner);
    ASSIGN_OR_RETURN(stream_, gpu_->MakeCopyStream(CudaGpu::Priority::kNormal));
    // Before anything is issued: making more may wait for peers, which the tests do not need.
    RETURN_IF_ERROR(Pinned(kStageBytes).status());
    RETURN_IF_ERROR(Stage(0, kStageBytes).status());
    return Stage(1, kStageBytes).status();
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  const char* transport() const override { return inner_->transport(); }
  bool shared_memory() const override { return inner_->shared_memory(); }

  absl::Status AllocateArena(const ArenaSizes& sizes) override {
    RETURN_IF_ERROR(inner_->AllocateArena(sizes));
    const auto resize = [this](plan::MemoryKind kind, int64_t bytes) {
      arena_->parts[static_cast<size_t>(kind)].resize(static_cast<size_t>(bytes));
    };
    resize(plan::MemoryKind::kPrivate, sizes.private_bytes);
    resize(plan::MemoryKind::kSymmetric, sizes.symmetric_bytes);
    resize(plan::MemoryKind::kCommon, sizes.common_bytes);
    return absl::OkStatus();
  }
  std::byte* arena(plan::MemoryKind kind) override {
    return arena_->parts[static_cast<size_t>(kind)].data();
  }

  absl::StatusOr<std::unique_ptr<Communicator>> Split(const SplitOptions& options) override {
    ASSIGN_OR_RETURN(std::unique_ptr<Communicator> part, inner_->Split(options));
    auto hosted = std::make_unique<HostedCommunicator>(gpu_, arena_);
    RETURN_IF_ERROR(hosted->Take(std::move(part)));
    return hosted;
  }
  absl::Status Barrier(const CollectiveTag& tag) override { return inner_->Barrier(tag); }

  absl::Status AllGather(const AllGatherOptions& options) override {
    const int64_t bytes = options.shard_elements * options.element_bytes;
    ASSIGN_OR_RETURN(std::byte* const all, Stage(0, bytes * size()));
    // In place on the device where it is so on the host.
    const auto* shard = reinterpret_cast<const std::byte*>(options.shard);
    const bool in_place = shard == reinterpret_cast<std::byte*>(options.gathered) + rank() * bytes;
    std::byte* own = all + rank() * bytes;
    if (!in_place) {
      ASSIGN_OR_RETURN(own, Stage(1, bytes));
    }
    RETURN_IF_ERROR(ToDevice(own, shard, bytes));
    AllGatherOptions on_device = options;
    on_device.shard = reinterpret_cast<const float*>(own);
    on_device.gathered = reinterpret_cast<float*>(all);
    on_device.stream = stream_.get();
    RETURN_IF_ERROR(inner_->AllGather(on_device));
    return FromDevice(options.gathered, all, bytes * size());
  }

  absl::StatusOr<PieceViews> ExchangePieces(const ExchangeOptions& options) override {
    const int64_t bytes = options.shard_elements * options.element_bytes;
    ASSIGN_OR_RETURN(std::byte* const staging, Stage(0, bytes * size()));
    ASSIGN_OR_RETURN(std::byte* const receive, Stage(1, bytes * size()));
    ExchangeOptions on_device = options;
    on_device.receive = reinterpret_cast<float*>(receive);
    on_device.stream = stream_.get();
    if (options.staging != nullptr) {
      RETURN_IF_ERROR(ToDevice(staging, options.staging, bytes * size()));
      on_device.staging = reinterpret_cast<const float*>(staging);
    }
    ASSIGN_OR_RETURN(PieceViews views, inner_->ExchangePieces(on_device));
    for (size_t r = 0; r < views.pieces.size(); ++r) {
      const auto* piece = reinterpret_cast<const std::byte*>(views.pieces[r]);
      const int64_t at = static_cast<int64_t>(r) * bytes;
      if (static_cast<int>(r) == rank()) {
        CHECK(piece == nullptr || piece == staging + at);
        views.pieces[r] = piece == nullptr ? nullptr : OfBytes(options.staging, at);
      } else if (piece != nullptr) {
        RETURN_IF_ERROR(FromDevice(OfBytes(options.receive, at), piece, bytes));
        views.pieces[r] = OfBytes(options.receive, at);
      }
    }
    return views;
  }
  absl::Status ReleasePieces(const CollectiveTag& tag) override {
    return inner_->ReleasePieces(tag);
  }
  absl::Status AllGatherBytes(const CollectiveTag& tag,
                              std::span<const std::byte> mine,
                              std::span<std::byte> all) override {
    return inner_->AllGatherBytes(tag, mine, all);
  }
  void Abort(std::string_view reason) override { inner_->Abort(reason); }
  absl::Status Failure() const override { return inner_->Failure(); }
  IssueState issued() const override { return inner_->issued(); }
  CollectiveLedger& ledger() override { return inner_->ledger(); }

 private:
  static constexpr int64_t kStageBytes = int64_t{8} << 20;
  template <typename Float>
  static Float* OfBytes(Float* floats, int64_t bytes) {
    using Byte = std::conditional_t<std::is_const_v<Float>, const std::byte, std::byte>;
    return reinterpret_cast<Float*>(reinterpret_cast<Byte*>(floats) + bytes);
  }

  // Device memory that later calls reuse; what was too small is kept, because freeing memory would
  // wait for ranks that are threads of this process.
  absl::StatusOr<std::byte*> Stage(int index, int64_t bytes) {
    if (stages_[index].empty() || stages_[index].back().bytes() < bytes) {
      ASSIGN_OR_RETURN(CudaMemory memory, gpu_->AllocateDevice(bytes + 1));
      stages_[index].push_back(std::move(memory));
    }
    return static_cast<std::byte*>(stages_[index].back().data());
  }
  absl::StatusOr<void*> Pinned(int64_t bytes) {
    if (pinned_.empty() || pinned_.back().bytes() < bytes) {
      ASSIGN_OR_RETURN(CudaMemory memory, gpu_->AllocatePinned(bytes + 1));
      pinned_.push_back(std::move(memory));
    }
    return pinned_.back().data();
  }
  absl::Status ToDevice(void* to, const void* from, int64_t bytes) {
    ASSIGN_OR_RETURN(void* const pinned, Pinned(bytes));
    if (bytes > 0) {
      std::memcpy(pinned, from, static_cast<size_t>(bytes));
      stream_->CopyMemory(to, pinned, bytes);
    }
    return WaitForStream(*stream_, *inner_);
  }
  absl::Status FromDevice(void* to, const void* from, int64_t bytes) {
    ASSIGN_OR_RETURN(void* const pinned, Pinned(bytes));
    if (bytes > 0) {
      stream_->CopyMemory(pinned, from, bytes);
    }
    RETURN_IF_ERROR(WaitForStream(*stream_, *inner_));
    if (bytes > 0) {
      std::memcpy(to, pinned, static_cast<size_t>(bytes));
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<CudaGpu> gpu_;  // shared with the parts that were split off
  const std::shared_ptr<HostArena> arena_;
  std::vector<CudaMemory> stages_[2];
  std::vector<CudaMemory> pinned_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<Communicator> inner_;
};

void* EmulatedNcclSymbol(const char* name) {
  void* library = dlopen(std::getenv("RAVEL_NCCL_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  CHECK_MSG(library != nullptr, "the emulated NCCL is not there");
  void* symbol = dlsym(library, name);
  CHECK_MSG(symbol != nullptr, name);
  return symbol;
}

}  // namespace

void UseTestLibraries() {
  setenv("RAVEL_CUDA_LIBRARY", RAVEL_TEST_CUDA_LIBRARY, 0);
  if (std::strlen(RAVEL_TEST_NCCL_LIBRARY) > 0) {
    setenv("RAVEL_NCCL_LIBRARY", RAVEL_TEST_NCCL_LIBRARY, 0);
  }
}

absl::StatusOr<std::unique_ptr<CudaGpu>> OpenTestGpu() {
  ASSIGN_OR_RETURN(const kernels::CudaLibrary library,
                   kernels::CudaLibrary::Open(kernels::DefaultCudaLibraryPath()));
  return CudaGpu::Open(library, 0);
}

absl::StatusOr<std::unique_ptr<Communicator>> CreateHostedNccl(NcclOptions options) {
  ASSIGN_OR_RETURN(std::shared_ptr<CudaGpu> gpu, OpenTestGpu());
  options.gpu = gpu.get();
  ASSIGN_OR_RETURN(std::unique_ptr<Communicator> inner, CreateNcclCommunicator(options));
  auto hosted = std::make_unique<HostedCommunicator>(std::move(gpu), std::make_shared<HostArena>());
  RETURN_IF_ERROR(hosted->Take(std::move(inner)));
  return hosted;
}

absl::Status WaitForStream(const CudaStream& stream, const Communicator& communicator) {
  for (;;) {
    RETURN_IF_ERROR(communicator.Failure());
    ASSIGN_OR_RETURN(const bool done, stream.Done());
    if (done) {
      return absl::OkStatus();
    }
    std::this_thread::yield();
  }
}

void InjectNcclFaults(const kernels::cuda::emulated::EmulatedNcclFaults& faults) {
  reinterpret_cast<kernels::cuda::emulated::EmulatedNcclInjectFunction>(
      EmulatedNcclSymbol(kernels::cuda::emulated::kEmulatedNcclInject))(&faults);
}

kernels::cuda::emulated::EmulatedNcclCounts CountsOfNccl() {
  kernels::cuda::emulated::EmulatedNcclCounts counts = {};
  reinterpret_cast<kernels::cuda::emulated::EmulatedNcclCountsFunction>(
      EmulatedNcclSymbol(kernels::cuda::emulated::kEmulatedNcclCounts))(&counts);
  return counts;
}

}  // namespace ravel::comm
