#pragma once

// What differs between an engine on a host and one on a device: the arena's memory, streams and
// their order, statistics, the way of a batch to its memory. Chosen once, when the engine is made.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "common/trace.h"
#include "kernels/cuda_host/cuda_device.h"
#include "worker/comm/communicator.h"
#include "worker/optim/host_updater.h"
#include "worker/optim/offload_pipeline.h"
#include "worker/optim/piece_tables.h"
#include "worker/optim/step_statistics.h"
#include "worker/shard/host_access.h"
#include "worker/shard/mesh_communicators.h"
#include "worker/shard/parameter_group.h"
#include "worker/shard/unit_executor.h"
#include "worker/trainer/gemm_choices.h"

namespace ravel::trainer {

struct EngineOptions {
  // Tests: fills fresh staging memory with NaN.
  bool poison = false;
  // Records every instruction; outlives the engine.
  trace::Recorder* recorder = nullptr;
  // On a device: programs of training become graphs. `exchanging_graphs`: of ranks that exchange,
  // too, where their communicator lets them (Communicator::Captures).
  bool graphs = true;
  bool exchanging_graphs = false;
  // Elements of offloaded state that are updated at a time; 0: kOffloadChunkElements, or of a
  // device's host kHostChunkElements. Tests take fewer.
  int64_t offload_chunk_elements = 0;
  // Tests: at most so many slots for chunks on their way to a device's host and back; 0: as
  // planned.
  int64_t offload_slots = 0;
  // Tests: replays programs of a host in another way than HostReplay does; empty: none.
  std::function<std::unique_ptr<shard::ReplayBackend>(comm::Communicator& world)> host_replay =
      nullptr;
};

// Ids and targets of one micro-batch.
struct BatchViews {
  TensorView ids;
  TensorView targets;
};

// Used only from the thread of its rank. Calls that say so are collective.
class EngineBackend {
 public:
  // Plan, communicator and device outlive the backend.
  struct Args {
    const plan::ShardingPlan& plan;
    comm::Communicator& communicator;
    bool exact = true;   // equal calls give equal bits
    bool norms = false;  // norms of tensors are measured
    EngineOptions options = {};
    // RankEngine::Args.
    std::optional<GemmOptions> gemms = std::nullopt;
    plan::OffloadSpec offload = {};
  };
  static std::unique_ptr<EngineBackend> OnHost(const Args& args);
  static std::unique_ptr<EngineBackend> OnDevice(const Args& args, kernels::CudaGpu& gpu);
  virtual ~EngineBackend() = default;
  EngineBackend(const EngineBackend&) = delete;
  EngineBackend& operator=(const EngineBackend&) = delete;

  // FailedPrecondition where plan or transport are for the other kind.
  virtual absl::Status Check() const = 0;
  // Takes the room of what the plan offloads, before the arena. Errors name the job's field.
  virtual absl::Status OpenOffload() = 0;
  // That room; empty where nothing is offloaded.
  virtual std::span<std::byte> offloaded() { return {}; }
  // After Open: updates what lies there; nullptr where nothing does.
  virtual optim::OffloadPipeline* offload() { return nullptr; }
  // The same of a device's host.
  virtual optim::HostUpdater* host_updater() { return nullptr; }
  // Adds to an error of AllocateArena what this kind of memory makes of it.
  virtual absl::Status ExplainArena(absl::Status allocated, int64_t planned_bytes) const = 0;
  // Collective. With an arena: streams, the way to its memory, statistics, tables of pieces. All
  // outlive the backend, whose work is done when it goes.
  virtual absl::Status Open(shard::MeshCommunicators& communicators,
                            shard::ParameterGroups& groups) = 0;
  // Collective. Before the first step. `batch`: where the arena takes ids and targets.
  virtual absl::StatusOr<GemmChoices> Prepare(shard::UnitExecutor& executor,
                                              const BatchViews& batch) = 0;

  // After Open.
  virtual shard::ReplayBackend& replay() = 0;
  virtual shard::HostAccess& memory() = 0;
  virtual optim::StepStatistics& statistics() = 0;
  const optim::PieceTables& pieces() const { return pieces_; }
  // Work of a step that is no instruction of its programs.
  kernels::Stream& main_stream() { return replay().stream(plan::StreamId::kCompute); }
  // Memory of main_stream() that its work may use until the next call.
  virtual void* Scratch(int64_t bytes) = 0;
  // All later work of any stream comes after all work so far.
  virtual void Join() = 0;

  // The programs of a step, or of an evaluation's batch, follow.
  virtual void BeginPrograms() = 0;
  // Where the host puts the micro-batch of the `program`-th of them, and what sends it on.
  virtual BatchViews HostBatch(int64_t program) const = 0;
  virtual void Upload(int64_t program) = 0;
  // The host may overwrite what it has put into batches so far.
  virtual absl::Status FinishBatches() = 0;

  // By how many steps their results may lag.
  virtual int64_t lag() const = 0;
  // Waits of the host for the device so far.
  virtual int64_t host_waits() const = 0;
  // A line for each description of attention: what computes it, chosen before the first step.
  virtual std::string AttentionReport() const = 0;
  // Memory of a device beside the arena.
  virtual int64_t device_bytes() const = 0;
  // Bytes of a part of the arena that take memory now.
  virtual int64_t MeasureBytes(std::span<const std::byte> part) const = 0;

 protected:
  explicit EngineBackend(const Args& args) : args_(args) {}
  optim::StepStatistics::Args StatisticsArgs(shard::ParameterGroups& groups) const {
    return {.plan = args_.plan,
            .groups = groups,
            .rank = args_.communicator.rank(),
            .norms = args_.norms};
  }

  Args args_;
  optim::PieceTables pieces_;
};

}  // namespace ravel::trainer
