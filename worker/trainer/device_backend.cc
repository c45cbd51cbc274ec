// An engine on a device: the host issues work and waits for nothing, so results lag by a step, and
// the arena is reached by copies.

#include <algorithm>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <sched.h>

#include "common/check.h"
#include "common/logging.h"
#include "common/model/gemm_paths.h"
#include "common/plan/report/plan_printer.h"
#include "common/signed_size.h"
#include "worker/optim/device_statistics.h"
#include "worker/shard/device_access.h"
#include "worker/shard/device_replay.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/host_state.h"
#include "worker/shard/numa_node.h"
#include "worker/trainer/device_batches.h"
#include "worker/trainer/engine_backend.h"
#include "worker/trainer/exit_code.h"
#include "worker/trainer/gemm_probe.h"

namespace ravel::trainer {
namespace {

// What the device refuses is its fault, not that of a peer.
absl::Status MarkDeviceError(const absl::Status& status) {
  return WithCode(status,
                  absl::IsResourceExhausted(status) ? ExitCode::kOutOfMemory : ExitCode::kDevice);
}

class DeviceBackend final : public EngineBackend {
 public:
  DeviceBackend(const Args& args, kernels::CudaGpu& gpu) : EngineBackend(args), gpu_(gpu) {}

  absl::Status Check() const override;
  absl::Status OpenOffload() override;
  absl::Status ExplainArena(absl::Status allocated, int64_t planned_bytes) const override;
  absl::Status Open(shard::MeshCommunicators& communicators,
                    shard::ParameterGroups& groups) override;
  absl::StatusOr<GemmChoices> Prepare(shard::UnitExecutor& executor,
                                      const BatchViews& batch) override;

  shard::ReplayBackend& replay() override { return *replay_; }
  shard::HostAccess& memory() override {
    return state_access_ != nullptr ? *state_access_ : static_cast<shard::HostAccess&>(*memory_);
  }
  std::span<std::byte> offloaded() override {
    return host_state_ == nullptr ? std::span<std::byte>() : host_state_->all();
  }
  optim::HostUpdater* host_updater() override { return updater_.get(); }
  optim::StepStatistics& statistics() override { return *statistics_; }
  void* Scratch(int64_t bytes) override { return streams_->compute().Scratch(bytes); }
  void Join() override { streams_->Join(); }

  void BeginPrograms() override { batches_.BeginStep(); }
  BatchViews HostBatch(int64_t program) const override { return batches_.host(program); }
  void Upload(int64_t program) override { batches_.Upload(streams_->compute(), program); }
  absl::Status FinishBatches() override { return streams_->Finish(streams_->compute()); }

  int64_t lag() const override { return 1; }
  int64_t host_waits() const override { return streams_->host_waits(); }
  std::string AttentionReport() const override { return streams_->compute().AttentionReport(); }
  int64_t device_bytes() const override {
    return streams_->scratch_bytes() + statistics_->device_bytes() + pieces_.device_bytes() +
           replay_->device_bytes() + (host_codes_ == nullptr ? 0 : host_codes_->device_bytes());
  }
  int64_t MeasureBytes(std::span<const std::byte> part) const override { return std::ssize(part); }

 private:
  absl::Status OpenStreams();
  absl::Status OpenParts(shard::MeshCommunicators& communicators, shard::ParameterGroups& groups);
  absl::StatusOr<bool> ChooseGraphs();
  absl::Status ProbeGemms();
  int UpdateThreads() const;
  absl::Status OpenUpdater(shard::ParameterGroups& groups);

  kernels::CudaGpu& gpu_;
  std::unique_ptr<shard::DeviceAccess> memory_;
  std::unique_ptr<optim::DeviceStatistics> statistics_;
  std::unique_ptr<shard::DeviceReplay> replay_;
  DeviceBatches batches_;
  shard::NumaNode node_;
  std::unique_ptr<shard::HostState> host_state_;
  std::unique_ptr<optim::HostCodes> host_codes_;
  std::unique_ptr<optim::HostUpdater> updater_;
  std::unique_ptr<shard::HostStateAccess> state_access_;
  // Last: goes first, and waits for the work that refers to all of the above.
  std::unique_ptr<shard::DeviceStreams> streams_;
};

absl::Status DeviceBackend::Check() const {
  if (args_.communicator.backend() != kernels::Backend::kCuda) {
    return absl::FailedPreconditionError(
        absl::StrCat("transport ", args_.communicator.transport(), " has no memory on a device"));
  }
  const plan::GemmPath path = args_.plan.options.gemm_path;
  if (path == plan::GemmPath::kCpuReference) {
    return absl::FailedPreconditionError(
        absl::StrCat("the plan's gemms take the path ", plan::GemmPathName(path), ", of a CPU"));
  }
  const kernels::CudaDevice& device = gpu_.properties();
  return plan::CheckGemmPath(path,
                             {.name = device.name,
                              .compute_major = device.compute_major,
                              .compute_minor = device.compute_minor,
                              .cublas_lt_version = gpu_.cublas_version()});
}

// Before anything is in the arena.
absl::Status DeviceBackend::ProbeGemms() {
  std::byte* const arena = args_.communicator.arena(plan::MemoryKind::kPrivate);
  const plan::GemmPath path = args_.plan.options.gemm_path;
  if (args_.plan.memory.private_bytes < ProbeBytes(path)) {
    return absl::FailedPreconditionError(absl::StrCat("gemm path ",
                                                      plan::GemmPathName(path),
                                                      ": its probe needs ",
                                                      ProbeBytes(path),
                                                      " bytes, the plan has ",
                                                      args_.plan.memory.private_bytes));
  }
  return trainer::ProbeGemms(path,
                             args_.plan.options.fast_accumulation,
                             streams_->compute(),
                             *memory_,
                             std::span(arena, Size(ProbeBytes(path))));
}

absl::Status DeviceBackend::OpenOffload() {
  const int64_t bytes = args_.plan.memory.offload_bytes;
  if (bytes == 0) {
    return absl::OkStatus();
  }
  if (!args_.plan.options.offload_copies) {
    return absl::FailedPreconditionError(absl::StrCat(
        shard::kOffloadFractionField, ": the plan offloads to a file, of cpu devices"));
  }
  node_ = shard::NodeOfDevice(gpu_.properties().pci);
  auto state = shard::HostState::Create(bytes, node_);
  RETURN_IF_ERROR(MarkDeviceError(state.status()));
  host_state_ = *std::move(state);
  return absl::OkStatus();
}

// The processors that this process may use and that are the device's, shared with the trainers of
// the other devices.
int DeviceBackend::UpdateThreads() const {
  constexpr int kMostUpdateThreads = 64;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int cpus = ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  if (node_.index >= 0) {
    cpus = static_cast<int>(std::count_if(node_.cpus.begin(), node_.cpus.end(), [&](int cpu) {
      return CPU_ISSET(static_cast<size_t>(cpu), &allowed);
    }));
  }
  const auto devices = gpu_.library().Devices();
  const int sharing = devices.ok() ? std::max(1, static_cast<int>(devices->size())) : 1;
  return std::clamp(cpus / sharing, 1, kMostUpdateThreads);
}

absl::Status DeviceBackend::OpenUpdater(shard::ParameterGroups& groups) {
  const int64_t chosen = args_.options.offload_chunk_elements;
  ASSIGN_OR_RETURN(
      host_codes_,
      optim::HostCodes::Create(args_.plan,
                               groups,
                               args_.communicator.rank() % plan::TensorRanks(args_.plan.inventory),
                               gpu_,
                               node_));
  ASSIGN_OR_RETURN(
      updater_,
      optim::HostUpdater::Create({.plan = args_.plan,
                                  .groups = groups,
                                  .streams = *streams_,
                                  .state = *host_state_,
                                  .codes = host_codes_.get(),
                                  .node = node_,
                                  .overlap = args_.offload.overlap,
                                  .chunk_elements = chosen > 0 ? chosen : plan::kHostChunkElements,
                                  .most_slots = args_.options.offload_slots,
                                  .threads = UpdateThreads()}));
  state_access_ = std::make_unique<shard::HostStateAccess>(*memory_, *streams_, *host_state_);
  return absl::OkStatus();
}

absl::Status DeviceBackend::ExplainArena(absl::Status allocated, int64_t planned_bytes) const {
  return Annotate(allocated,
                  absl::StrCat("the plan's ",
                               plan::BytesText(planned_bytes),
                               " of each rank do not fit what the device has left"));
}

absl::Status DeviceBackend::OpenStreams() {
  ASSIGN_OR_RETURN(
      streams_,
      shard::DeviceStreams::Create(gpu_, args_.plan, [&communicator = args_.communicator] {
        return communicator.Failure();
      }));
  streams_->compute().UseAttention({.deterministic = args_.exact});
  ASSIGN_OR_RETURN(memory_, shard::DeviceAccess::Create(*streams_));
  return absl::OkStatus();
}

absl::Status DeviceBackend::OpenParts(shard::MeshCommunicators& communicators,
                                      shard::ParameterGroups& groups) {
  RETURN_IF_ERROR(OpenStreams());
  ASSIGN_OR_RETURN(statistics_, optim::DeviceStatistics::Create(StatisticsArgs(groups), *streams_));
  ASSIGN_OR_RETURN(replay_,
                   shard::DeviceReplay::Create(
                       {.plan = args_.plan, .streams = *streams_, .communicators = communicators}));
  ASSIGN_OR_RETURN(pieces_, optim::PieceTables::OnDevice(args_.plan, groups, *memory_, gpu_));
  if (host_state_ != nullptr) {
    RETURN_IF_ERROR(OpenUpdater(groups));
  }
  return absl::OkStatus();
}

absl::Status DeviceBackend::Open(shard::MeshCommunicators& communicators,
                                 shard::ParameterGroups& groups) {
  return MarkDeviceError(OpenParts(communicators, groups));
}

// Programs of ranks that exchange become graphs on all of them, or on none.
absl::StatusOr<bool> DeviceBackend::ChooseGraphs() {
  comm::Communicator& communicator = args_.communicator;
  const EngineOptions& options = args_.options;
  if (args_.plan.options.layer_drop > 0) {
    return false;  // a graph would repeat the layers of the step in which it was captured
  }
  if (args_.plan.options.offload_copies) {
    return false;  // the next step would begin when the host has updated everything
  }
  if (args_.plan.ranks == 1) {
    return options.graphs;
  }
  absl::Status why_not = communicator.Captures();
  if (!absl::IsUnimplemented(why_not)) {  // which is a matter of the transport, and so of all ranks
    if (!options.graphs || !options.exchanging_graphs) {
      why_not = absl::FailedPreconditionError("they were not asked for");
    }
    const auto mine = static_cast<std::byte>(why_not.ok() ? 0 : 1);
    std::vector<std::byte> all(Size(communicator.size()));
    RETURN_IF_ERROR(communicator.AllGatherBytes({}, {&mine, 1}, all));
    const auto refusing = std::find(all.begin(), all.end(), std::byte{1});
    if (refusing != all.end() && why_not.ok()) {
      why_not =
          absl::FailedPreconditionError(absl::StrCat("rank ", refusing - all.begin(), " has none"));
    }
  }
  if (!why_not.ok()) {
    log::Info(absl::StrCat("graphs: none, since ranks exchange through ",
                           communicator.transport(),
                           ": ",
                           std::string(why_not.message())));
  }
  return why_not.ok();
}

absl::StatusOr<GemmChoices> DeviceBackend::Prepare(shard::UnitExecutor& executor,
                                                   const BatchViews& batch) {
  ASSIGN_OR_RETURN(const bool graphs, ChooseGraphs());
  replay_->UseGraphs(graphs);
  RETURN_IF_ERROR(MarkDeviceError(executor.Prepare()));
  auto batches = DeviceBatches::Create(gpu_, args_.plan.lanes.programs(), batch);
  RETURN_IF_ERROR(MarkDeviceError(batches.status()));
  batches_ = *std::move(batches);
  RETURN_IF_ERROR(MarkDeviceError(ProbeGemms()));
  if (!args_.gemms.has_value()) {
    return GemmChoices{};
  }
  return ChooseGemms({.options = *args_.gemms,
                      .plan = args_.plan,
                      .exact = args_.exact,
                      .communicator = args_.communicator,
                      .streams = *streams_,
                      .executor = executor});
}

}  // namespace

std::unique_ptr<EngineBackend> EngineBackend::OnDevice(const Args& args, kernels::CudaGpu& gpu) {
  return std::make_unique<DeviceBackend>(args, gpu);
}

}  // namespace ravel::trainer
