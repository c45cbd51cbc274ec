// An engine on a host: all work is done when its call returns, so nothing lags, and the arena is
// read and written where it lies.

#include <vector>

#include <absl/strings/str_cat.h>

#include "common/logging.h"
#include "common/model/gemm_paths.h"
#include "common/signed_size.h"
#include "worker/optim/host_statistics.h"
#include "worker/shard/host_replay.h"
#include "worker/trainer/engine_backend.h"
#include "worker/trainer/memory_report.h"

namespace ravel::trainer {
namespace {

class HostBackend final : public EngineBackend {
 public:
  explicit HostBackend(const Args& args) : EngineBackend(args) {}

  absl::Status Check() const override {
    if (args_.communicator.backend() != kernels::Backend::kCpu) {
      return absl::FailedPreconditionError(
          absl::StrCat("transport ", args_.communicator.transport(), " needs a device"));
    }
    const plan::GemmPath path = args_.plan.options.gemm_path;
    if (path != plan::GemmPath::kNone && path != plan::GemmPath::kCpuReference) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the plan's gemms take the path ", plan::GemmPathName(path), ", which needs a device"));
    }
    return absl::OkStatus();
  }
  absl::Status ExplainArena(absl::Status allocated, int64_t) const override { return allocated; }

  absl::Status OpenOffload() override {
    const int64_t bytes = args_.plan.memory.offload_bytes;
    if (args_.plan.options.offload_copies) {
      return absl::FailedPreconditionError(absl::StrCat(
          shard::kOffloadField, ": the plan offloads to a host's memory, of gpu devices"));
    }
    if (bytes == 0) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(tier_, shard::OffloadTier::Create(args_.offload.path, bytes));
    memory_ = shard::TieredAccess(tier_.get());
    if (tier_->in_memory()) {
      log::Warning(absl::StrCat(shard::kOffloadField,
                                ": ",
                                args_.offload.path,
                                " lies in memory: offloading to it saves none"));
    }
    return absl::OkStatus();
  }
  std::span<std::byte> offloaded() override {
    return tier_ == nullptr ? std::span<std::byte>() : tier_->all();
  }
  optim::OffloadPipeline* offload() override {
    return pipeline_.has_value() ? &*pipeline_ : nullptr;
  }

  absl::Status Open(shard::MeshCommunicators&, shard::ParameterGroups& groups) override {
    replay_ = args_.options.host_replay != nullptr ? args_.options.host_replay(args_.communicator)
                                                   : std::make_unique<shard::HostReplay>();
    statistics_.emplace(StatisticsArgs(groups));
    pieces_ = optim::PieceTables::OnHost(args_.plan, groups);
    if (tier_ != nullptr) {
      pipeline_.emplace(optim::OffloadPipeline::Args{.plan = args_.plan,
                                                     .groups = groups,
                                                     .pieces = pieces_,
                                                     .tier = *tier_,
                                                     .overlap = args_.offload.overlap,
                                                     .chunk_elements = ChunkElements()});
    }
    return absl::OkStatus();
  }
  absl::StatusOr<GemmChoices> Prepare(shard::UnitExecutor& executor,
                                      const BatchViews& batch) override {
    batch_ = batch;
    RETURN_IF_ERROR(executor.Prepare());
    return GemmChoices{};
  }

  shard::ReplayBackend& replay() override { return *replay_; }
  shard::HostAccess& memory() override { return memory_; }
  optim::StepStatistics& statistics() override { return *statistics_; }
  void* Scratch(int64_t bytes) override {
    scratch_.resize(Size(bytes));
    return scratch_.data();
  }
  void Join() override {}

  void BeginPrograms() override {}
  BatchViews HostBatch(int64_t) const override { return batch_; }
  void Upload(int64_t) override {}
  absl::Status FinishBatches() override { return absl::OkStatus(); }

  int64_t lag() const override { return 0; }
  int64_t host_waits() const override { return 0; }
  std::string AttentionReport() const override { return ""; }
  int64_t device_bytes() const override { return 0; }
  // Asks the system, at most a few pages more than were touched.
  int64_t MeasureBytes(std::span<const std::byte> part) const override {
    return ResidentBytes(part);
  }

 private:
  int64_t ChunkElements() const {
    const int64_t chosen = args_.options.offload_chunk_elements;
    return chosen > 0 ? chosen : plan::kOffloadChunkElements;
  }

  std::unique_ptr<shard::OffloadTier> tier_;
  shard::TieredAccess memory_;
  std::unique_ptr<shard::ReplayBackend> replay_;
  std::optional<optim::HostStatistics> statistics_;
  std::vector<std::byte> scratch_;
  std::optional<optim::OffloadPipeline> pipeline_;  // uses the tier
  BatchViews batch_;
};

}  // namespace

std::unique_ptr<EngineBackend> EngineBackend::OnHost(const Args& args) {
  return std::make_unique<HostBackend>(args);
}

}  // namespace ravel::trainer
