#pragma once

// One rank of a training job as a library: everything between a plan and a loss, without processes,
// sockets or files of state. The trainer process drives it; tests drive several as threads of one
// process.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_host/cuda_device.h"
#include "kernels/stream.h"
#include "worker/comm/communicator.h"
#include "worker/data/batch_loader.h"
#include "worker/model/module.h"
#include "worker/optim/step_optimizer.h"
#include "worker/shard/unit_executor.h"
#include "worker/trainer/engine_backend.h"
#include "worker/trainer/gemm_choices.h"
#include "worker/trainer/run_settings.h"

namespace ravel::trainer {

struct StepResult {
  int64_t step = 0;  // finished steps, this one included
  float loss = 0;    // before the update
  double grad_norm = 0;
  double learning_rate = 0;
  int64_t target_tokens = 0;
  int64_t non_finite = 0;
  bool skipped = false;
  double loss_scale = 0;       // that the step was computed with; 0: no loss is scaled
  bool lowers_scale = false;   // skipped, and the next step has a lower scale
  optim::ControlWord control;  // what all ranks agreed on
};

// Used only from the thread of its rank; the calls below that say so are collective. On a device
// the arena, and so all that groups() point at, is device memory: memory() is the host's way to it.
// The host issues the work of a step and waits for nothing; what came of it is read when the device
// has got there, at most one step later.
class RankEngine {
 public:
  // Plan and communicator outlive the engine.
  struct Args {
    const plan::ShardingPlan& plan;
    RunSettings settings;
    comm::Communicator& communicator;
    std::function<optim::ControlWord()> control;  // may be empty
    EngineOptions options = {};
    // The device that the communicator's arena is on; nullptr: on the host. Outlives the engine.
    kernels::CudaGpu* gpu = nullptr;
    // Chooses algorithms of gemms on a device; absent: each as it comes up, by this rank,
    // the first that is proposed.
    std::optional<GemmOptions> gemms = std::nullopt;
  };
  // Collective: allocates the arena of the plan, opens the data, checks that plan and communicator
  // agree.
  static absl::StatusOr<std::unique_ptr<RankEngine>> Create(Args args);

  // Random weights of the job's seed, the same on any number of ranks; moments are zero.
  absl::Status InitializeWeights();

  // After somebody else wrote main weights: model weights of another type follow them. Collective
  // where weights are quantized; kLoaded: the state of delayed scales was written, too.
  absl::Status RefreshWeights(
      shard::UnitExecutor::Refresh refresh = shard::UnitExecutor::Refresh::kNew);
  // The state of quantized weights; nullptr where there are none.
  quant::QuantState* quant() { return executor_->quant(); }

  // Collective. Step `step` (0-based): every lane forward and backward, the update. Issued; on a
  // host it is also done. At most one step is unread when the next is issued.
  absl::Status IssueStep(int64_t step);
  // The result of the oldest step that was not read; waits for a device to get there. Everything
  // else here that speaks of state is for when no step is unread.
  absl::StatusOr<StepResult> ReadStep();
  int64_t unread_steps() const { return static_cast<int64_t>(unread_.size()); }
  // By how many steps the results may lag: 0 where each has to be read before the next is issued,
  // as on a host, or where a skipped step is replayed.
  int64_t lag() const { return args_.settings.localise ? 0 : backend_->lag(); }
  // Both.
  absl::StatusOr<StepResult> TrainStep(int64_t step);
  // Counts of the device; 0 or empty on a host (EngineBackend).
  int64_t host_waits() const { return backend_->host_waits(); }
  std::string AttentionReport() const { return backend_->AttentionReport(); }
  const shard::StepGraphs* graphs() const { return backend_->replay().graphs(); }

  // The algorithms of gemms that were chosen; empty on a host.
  const GemmChoices& gemm_choices() const { return gemm_choices_; }

  // Collective. Replays a step whose gradients were not finite, which changed no weights, looks at
  // everything that each instruction writes, and says what was wrong first on any rank: rank, lane,
  // micro-batch, unit, call, instruction, tensor, coordinate and value.
  absl::StatusOr<std::string> Localise(int64_t step);

  // Collective. The optimizer's norms of the last step, which no further step's statistics will
  // carry; nothing where none are due.
  absl::Status ExchangeLastNorms();

  bool has_validation() const { return loader_->has_validation(); }
  // Collective. Mean loss over the evaluation batches; changes no state.
  absl::StatusOr<float> Evaluate();

  shard::ParameterGroups& groups() { return groups_; }
  const plan::TensorSpec& tensor(plan::TensorId index) const {
    return args_.plan.inventory.tensors[index];
  }
  int64_t updates() const {
    CHECK_MSG(unread_steps() == 0, "steps are under way");
    return optimizer_->updates();
  }
  void set_updates(int64_t updates) { optimizer_->set_updates(updates); }
  // Only of a plan in fp16.
  void set_loss_scale(const optim::LossScale& scale) { optimizer_->set_loss_scale(scale); }
  // Bytes of this rank's arena (its share of what ranks have in common): as the plan says, and as
  // measured. On a host: pages in memory, asked of the system when the arena is made and after each
  // evaluation; at most kMostMeasuredSlack more than planned. On a device: what was allocated.
  int64_t planned_bytes() const;
  int64_t measured_bytes() const { return measured_bytes_; }
  static constexpr int64_t kMostMeasuredSlack = 6 * 4096;
  // Memory of a device that this rank has allocated beside its arena: scratch of streams,
  // statistics, a bf16 wire. 0 on hosts.
  int64_t device_bytes() const { return backend_->device_bytes(); }
  shard::HostAccess& memory() { return backend_->memory(); }
  // The arena's private, symmetric and common memory, each as this rank sees it.
  using ArenaSpans = std::vector<std::span<const std::byte>>;
  ArenaSpans arenas() const;
  // What the plan offloads, mapped; empty where that is nothing. And what its updates took.
  std::span<const std::byte> offloaded() const { return backend_->offloaded(); }
  optim::OffloadPipeline* offload() { return backend_->offload(); }
  optim::HostUpdater* host_updater() { return backend_->host_updater(); }
  const shard::ArenaBuffers& buffers() const { return *buffers_; }
  const optim::StepOptimizer& optimizer() const { return *optimizer_; }
  optim::StepOptimizer& optimizer() { return *optimizer_; }
  shard::UnitExecutor& executor() { return *executor_; }

 private:
  explicit RankEngine(Args args);
  absl::Status CheckGroup() const;
  absl::Status SetUp();
  absl::Status AllocateArena();
  absl::Status OpenParts();
  void MakeOptimizer();
  void MakeExecutor();
  absl::Status FillRopeTables();
  absl::Status DrawNormal(const shard::ParameterGroup& group,
                          const plan::OwnedRun& run,
                          const plan::TensorSpec& tensor);
  void MeasureArena();
  kernels::Stream& main_stream() { return backend_->main_stream(); }
  int64_t LaneOf(int64_t turn) const {
    return plan::LaneOf(args_.plan, turn, args_.communicator.rank());
  }
  TensorView Shared(std::string_view name) const;
  void PrefetchStep(int64_t step);
  // Loads and runs a program of a step, or of an evaluation batch: the `program`-th.
  absl::Status RunSlot(int64_t step, const plan::StepSlot& slot, int64_t program);
  absl::Status WaitForReaders();
  absl::Status EvaluateBatch(int64_t batch);
  absl::StatusOr<float> CombineEvaluation(const std::vector<optim::LaneLoss>& mine);

  Args args_;
  comm::ArenaSizes arena_;
  int64_t measured_bytes_ = 0;
  std::unique_ptr<data::BatchLoader> loader_;
  shard::MeshCommunicators communicators_;
  std::unique_ptr<shard::ArenaBuffers> buffers_;
  shard::ParameterGroups groups_;
  model::Modules modules_;
  std::unique_ptr<optim::StepOptimizer> optimizer_;
  std::unique_ptr<shard::UnitExecutor> executor_;
  GemmChoices gemm_choices_;
  std::deque<int64_t> unread_;  // steps
  // Last: goes first, and waits for the work that refers to all of the above.
  std::unique_ptr<EngineBackend> backend_;
};

}  // namespace ravel::trainer
