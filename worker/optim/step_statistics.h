#pragma once

// A step's statistics where its gradients are, on a host or on a device: what this rank measures,
// the messages of all ranks, what they decide, and the scalars of the update.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "common/plan/sharding_plan.h"
#include "common/status.h"
#include "kernels/digest.h"
#include "kernels/step_statistics.h"
#include "kernels/stream.h"
#include "worker/optim/loss_scale.h"
#include "worker/optim/norm_tree.h"
#include "worker/shard/instruction_runner.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// Sum and count of the token losses of one lane: micro-batches and their tokens in order, fp64;
// targets of -1 do not count.
struct LaneLoss {
  double sum = 0;
  int64_t tokens = 0;
};

// A rank's message, in words of 8 bytes: kernels::StatisticsHeader, a count of elements that are
// not finite per tensor, a loss per turn, and the nodes of NormTree; where norms of tensors are
// asked for, two more lists of nodes. HostStatistics and DeviceStatistics differ in whose memory
// this is, and in when the host can read it. Used only from the thread that issues the rank's work,
// or in the order of the program's events.
class StepStatistics {
 public:
  // All outlive it.
  struct Args {
    const plan::ShardingPlan& plan;
    shard::ParameterGroups& groups;
    int rank = 0;
    bool norms = false;
  };
  StepStatistics(const StepStatistics&) = delete;
  StepStatistics& operator=(const StepStatistics&) = delete;
  virtual ~StepStatistics() = default;

  const NormTree& tree() const { return tree_; }
  bool norms() const { return args_.norms; }

  // One step: these in turn, each on a stream that comes after the call before.
  struct Beginning {
    // Asked once: on a device at once, on a host when the gradients are measured. Without tokens.
    std::function<kernels::StatisticsHeader()> header;
    int64_t step = 0;  // StepOutcome::step
    std::span<const double> weight_nodes = {};
    std::span<const double> update_nodes = {};
    std::optional<int64_t> updates = std::nullopt;       // overwrites the count of the outcome
    std::optional<LossScale> loss_scale = std::nullopt;  // likewise
  };
  virtual void BeginStep(kernels::Stream& stream, const Beginning& beginning) = 0;
  // Losses and targets of a micro-batch, in memory of the stream's backend. At any time before
  // Measure.
  void AddMicroBatch(kernels::Stream& stream,
                     int64_t turn,
                     const TensorView& losses,
                     const TensorView& targets);
  // Measures the groups, which completes the message. Returns the memory of this message, and of
  // those of all ranks.
  virtual shard::StatisticsMessages Measure(kernels::Stream& stream);
  // After Measure, before the exchange: flags by tensor (kernels::CountFlags).
  void CountNonFinite(kernels::Stream& stream, const TensorView& flags) {
    kernels::CountFlags(stream,
                        {.flags = flags, .counts = message_ + kernels::kStatisticsHeaderWords});
  }
  // At the same time: adds to the digest of scales that all ranks have alike.
  void DigestScales(kernels::Stream& stream, const TensorView& words, uint64_t first_index) {
    auto& header = *reinterpret_cast<kernels::StatisticsHeader*>(message_);
    kernels::AddDigest(stream, {.range = words, .first_index = first_index, .sum = &header.scales});
  }
  // `loss_scale`: its rule, where gradients are scaled.
  void Decide(kernels::Stream& stream,
              double clip_norm,
              const kernels::LossScaleRule& loss_scale,
              const kernels::UpdateHyper& hyper);
  // For updates: memory of the stream's backend.
  const kernels::StepOutcome& outcome() const { return *outcome_; }
  // Its `apply`: i32 [1].
  TensorView apply() const {
    return {
        .data = &outcome_->apply, .dtype = DType::kI32, .rank = 1, .size = {1}, .row_stride = 1};
  }
  // Sends what was decided to the host.
  virtual void EndStep(kernels::Stream& stream) = 0;

  // True where the host has the messages and the outcome of a step as soon as it is decided; else
  // it reads them after EndStep.
  virtual bool known_at_once() const = 0;
  // Steps that were ended and not read.
  virtual int64_t unread() const = 0;
  // The oldest of them, or the step that was decided last where that is known at once. What it
  // returns stays until the step after next begins, or the next one.
  struct Record {
    std::span<const std::byte> messages;  // of all ranks
    const kernels::StepOutcome* outcome = nullptr;
  };
  virtual absl::StatusOr<Record> Read() = 0;

  // Losses of evaluation: by turn, from zero.
  virtual void BeginEvaluation(kernels::Stream& stream) = 0;
  void AddEvaluation(kernels::Stream& stream,
                     int64_t turn,
                     const TensorView& losses,
                     const TensorView& targets);
  // Memory of the stream's backend: [turns].
  const LaneLoss* evaluation() const { return evaluation_; }

 protected:
  explicit StepStatistics(const Args& args);

  // Tables that kernels read and nobody writes.
  struct Tables {
    std::vector<kernels::RowNode> nodes;
    SumProgram sums;
  };
  const Tables& tables() const { return tables_; }
  // Cuts memory into the parts below; null: only counts. Returns the bytes that they need.
  int64_t Place(std::byte* memory);
  // Words of a message before its lists of nodes, of one such list, and of all.
  int64_t nodes_word() const;
  int64_t longest() const { return tree_.longest(); }
  int64_t words() const { return words_; }
  int64_t gathered_bytes() const;

  const Args args_;
  int64_t* message_ = nullptr;
  int64_t* gathered_ = nullptr;
  kernels::RowNode* nodes_ = nullptr;
  kernels::SumStep* steps_ = nullptr;
  int64_t* level_ends_ = nullptr;
  kernels::StepOutcome* outcome_ = nullptr;
  LaneLoss* evaluation_ = nullptr;

 private:
  Tables MakeTables();

  const NormTree tree_;
  int64_t rows_ = 0;
  int64_t words_ = 0;
  Tables tables_;
  float* row_sums_ = nullptr;
  double* sums_ = nullptr;
};

}  // namespace ravel::optim
