#pragma once

// A step's statistics on a device: what the gradients sum to, what all ranks' sums decide, and the
// scalars of the update; the host reads them when the device has got there, one step later or when
// it likes.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/cuda_device.h"
#include "kernels/step_statistics.h"
#include "worker/optim/norm_tree.h"
#include "worker/shard/device_streams.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Sum and count of the token losses of one lane: micro-batches and their tokens in order, fp64;
// targets of -1 do not count.
struct LaneLoss {
  double sum = 0;
  int64_t tokens = 0;
};

// A rank's message is kernels::StatisticsHeader, a count of elements that are not finite per
// tensor, a loss per turn, and the nodes of NormTree; where norms of tensors are asked for, two
// more lists of nodes. Used only from the thread that issues the rank's work.
class DeviceStatistics {
 public:
  // Steps that may be begun and not read.
  static constexpr int64_t kUnread = 2;

  // All outlive it. ResourceExhausted where the device has no room.
  struct Args {
    shard::DeviceStreams& streams;
    const plan::ShardingPlan& plan;
    shard::ParameterGroups& groups;
    int rank = 0;
    bool norms = false;
  };
  static absl::StatusOr<std::unique_ptr<DeviceStatistics>> Create(const Args& args);

  // Device memory beside the arena.
  int64_t device_bytes() const { return device_.bytes(); }

  // One step: these in turn, each on a stream that comes after the call before.
  struct Beginning {
    kernels::StatisticsHeader header;  // without tokens
    int64_t step = 0;                  // StepOutcome::step
    std::span<const double> weight_nodes = {};
    std::span<const double> update_nodes = {};
    std::optional<int64_t> updates = std::nullopt;  // overwrites the device's count
  };
  void BeginStep(kernels::Stream& stream, const Beginning& beginning);
  // Losses and targets of a micro-batch, on the device. At any time before MeasureGradients.
  void AddMicroBatch(kernels::Stream& stream,
                     int64_t turn,
                     const TensorView& losses,
                     const TensorView& targets);
  // Of what the groups measure: the message is whole.
  void MeasureGradients(kernels::Stream& stream);
  // Where it is, and where those of all ranks go: words of 8 bytes.
  shard::DeviceMessages messages() const;
  void Decide(kernels::Stream& stream, double clip_norm, const kernels::AdamWHyper& hyper);
  // Memory of the device, for updates.
  const kernels::StepOutcome* outcome() const { return outcome_; }
  // Sends what was decided to the host.
  void EndStep(kernels::Stream& stream);

  // Steps that were ended and not read.
  int64_t unread() const { return ended_ - read_; }
  // The oldest of them: waits for the device. What it returns stays until the step after next
  // begins.
  struct Record {
    std::span<const std::byte> messages;  // of all ranks
    const kernels::StepOutcome* outcome = nullptr;
  };
  absl::StatusOr<Record> Read();

  // Losses of evaluation: by turn, from zero.
  void BeginEvaluation(kernels::Stream& stream);
  void AddEvaluation(kernels::Stream& stream,
                     int64_t turn,
                     const TensorView& losses,
                     const TensorView& targets);
  // Memory of the device: [turns].
  const LaneLoss* evaluation() const { return evaluation_; }

 private:
  struct Slot {
    kernels::CudaMemory begins;   // pinned: a message, then the step and the count of updates
    kernels::CudaMemory records;  // pinned: messages of all ranks, then the outcome
    kernels::CudaEvent recorded;
  };
  explicit DeviceStatistics(const Args& args) : args_(args), tree_(args.plan) {}
  int64_t lists() const { return args_.norms ? 3 : 1; }
  int64_t nodes_word() const;
  // What kernels read and nobody writes, copied to the device.
  absl::Status CopyTables(const std::vector<kernels::RowNode>& nodes, const SumProgram& sums);
  void Place(const std::vector<kernels::RowNode>& nodes, const SumProgram& sums);
  std::vector<kernels::RowNode> RowNodes();

  const Args args_;
  const NormTree tree_;
  int64_t rows_ = 0;
  int64_t node_count_ = 0;
  int64_t words_ = 0;  // of a message
  int64_t bytes_ = 0;
  kernels::DecideUpdateArgs decide_;
  kernels::CudaMemory device_;
  // What tables were copied from. Not freed before the end: that waits for all work of the device,
  // also of ranks beside this one that wait for it in an exchange.
  std::vector<kernels::CudaMemory> copied_;
  // In device_.
  float* row_sums_ = nullptr;
  int64_t* message_ = nullptr;
  int64_t* gathered_ = nullptr;
  kernels::RowNode* nodes_ = nullptr;
  kernels::SumStep* steps_ = nullptr;
  int64_t* level_ends_ = nullptr;
  double* sums_ = nullptr;
  kernels::StepOutcome* outcome_ = nullptr;
  LaneLoss* evaluation_ = nullptr;

  std::array<Slot, kUnread> slots_;
  int64_t begun_ = 0;
  int64_t ended_ = 0;
  int64_t read_ = 0;
};

}  // namespace ravel::optim
