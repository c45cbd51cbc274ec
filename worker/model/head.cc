// T tokens, h hidden, V vocabulary; x is the residual stream after the last layer.
//
//   n = norm(x)                       [T, h]
//   z = n W^T                         [c, V] for chunks of c tokens: logits are never whole
//   loss_t = logsumexp(z_t) - z_t[target_t];  0 where the target is to be ignored
//
// Backward starts here: dz_t = softmax(z_t) - onehot(target_t), so dn = dz W and dW += dz^T n in
// the same pass over the chunks. In fp16 dz is multiplied by the loss scale, and so is every
// gradient. Nothing divides by the number of tokens or by the scale; the optimizer does, once.

#include "worker/model/head.h"

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/loss.h"
#include "kernels/part_sum.h"

namespace ravel::model {
namespace {

size_t ProjectionOf(const UnitTensors& tensors) {
  const bool tied = tensors.inventory().config.tie_word_embeddings;
  const plan::Architecture& architecture = tensors.architecture();
  return tensors.Index(tied ? architecture.token_table : architecture.head, "weight");
}

// A scale that the device knows is no argument of a call, so that one graph serves all steps.
float LossScaleOf(const UnitMemory& memory) {
  return memory.loss_scale == nullptr || memory.device_loss_scale != nullptr ? 1.0f
                                                                             : *memory.loss_scale;
}

}  // namespace

HeadModule::HeadModule(const plan::ModelInventory& inventory, plan::UnitId unit)
    : UnitModule(inventory, unit),
      norm_(UnitTensors(inventory, unit),
            plan::ArchitectureOf(inventory.config.architecture).final_norm),
      normed_(UnitTensors(inventory, unit), ""),
      parts_(UnitTensors(inventory, unit)),
      projection_(ProjectionOf(UnitTensors(inventory, unit))),
      sequence_(inventory.cut.sequence) {
  const plan::UnitSpec& spec = inventory.units[unit];
  logits_ = ActivationIndex(spec.workspace, "logits");
  d_normed_ = ActivationIndex(spec.workspace, "dn");
  if (sequence_) {
    n_all_ = ActivationIndex(spec.workspace, "n_all");
  }
  targets_ = ActivationIndex(inventory.shared, "targets");
  loss_ = ActivationIndex(inventory.shared, "loss");
  hidden_ = ActivationIndex(inventory.shared, "hidden");
  dhidden_ = ActivationIndex(inventory.shared, "dhidden");
}

void HeadModule::ForwardSegment(kernels::Stream& stream,
                                const UnitMemory& memory,
                                plan::SegmentKind kind) const {
  if (kind == plan::SegmentKind::kFinalNorm) {
    norm_.Forward(stream,
                  {.memory = memory,
                   .x = memory.shared[hidden_],
                   .copy = {},
                   .y = normed_.ResultIn(memory),
                   .statistics = normed_.StatisticsIn(memory)});
    return;
  }
  if (kind != plan::SegmentKind::kLoss) {
    RunCut(stream, memory, kind, nullptr);
    return;
  }
  if (parts_.cuts()) {
    RunParts(stream, memory, nullptr);
    return;
  }
  kernels::LinearCrossEntropyForward(stream,
                                     {.x = normed_.ResultIn(memory),
                                      .w = memory.weights[projection_],
                                      .targets = memory.shared[targets_],
                                      .loss = memory.shared[loss_],
                                      .workspace = memory.workspace[logits_]});
}

void HeadModule::BackwardSegment(kernels::Stream& stream,
                                 const UnitMemory& memory,
                                 plan::SegmentKind kind,
                                 const WeightGradients& gradients) const {
  if (kind == plan::SegmentKind::kFinalNorm) {
    norm_.Backward(stream,
                   {.memory = memory,
                    .gradients = gradients,
                    .dy = memory.workspace[d_normed_],
                    .x = memory.shared[hidden_],
                    .dresidual = {},
                    .dx = memory.shared[dhidden_],
                    .statistics = normed_.StatisticsIn(memory)});
    return;
  }
  if (kind != plan::SegmentKind::kLoss) {
    RunCut(stream, memory, kind, &gradients);
    return;
  }
  if (parts_.cuts()) {
    RunParts(stream, memory, &gradients);
    return;
  }
  kernels::LinearCrossEntropyTrain(stream,
                                   {.x = normed_.ResultIn(memory),
                                    .w = memory.weights[projection_],
                                    .targets = memory.shared[targets_],
                                    .loss = memory.shared[loss_],
                                    .dx = memory.workspace[d_normed_],
                                    .dw = gradients.views[projection_],
                                    .dw_output = gradients.output,
                                    .workspace = memory.workspace[logits_],
                                    .loss_scale = LossScaleOf(memory),
                                    .device_loss_scale = memory.device_loss_scale});
}

VocabularyParts::Args HeadModule::PartArgs(const UnitMemory& memory,
                                           const WeightGradients* gradients) const {
  return {.memory = memory,
          .x = Normed(memory),
          .w = memory.weights[projection_],
          .targets = memory.shared[targets_],
          .loss = memory.shared[loss_],
          .logits = memory.workspace[logits_],
          .dx = memory.workspace[d_normed_],
          .dw = gradients == nullptr ? TensorView() : gradients->views[projection_],
          .dw_output = gradients == nullptr ? kernels::Output::kOverwrite : gradients->output,
          .loss_scale = LossScaleOf(memory),
          .device_loss_scale = memory.device_loss_scale};
}

void HeadModule::RunParts(kernels::Stream& stream,
                          const UnitMemory& memory,
                          const WeightGradients* gradients) const {
  const VocabularyParts::Args args = PartArgs(memory, gradients);
  for (const VocabularyParts::Chunk& chunk : VocabularyParts::ChunksOf(args)) {
    parts_.Statistics(stream, args, chunk);
    parts_.Loss(stream, args, chunk);
    if (gradients != nullptr) {
      parts_.FinishGradient(stream, args, chunk, parts_.GradientParts(stream, args, chunk));
    }
  }
}

void HeadModule::RunCut(kernels::Stream& stream,
                        const UnitMemory& memory,
                        plan::SegmentKind kind,
                        const WeightGradients* gradients) const {
  if (kind == plan::SegmentKind::kLossNormed) {
    CopyView(stream, normed_.ResultIn(memory), memory.rows);
    return;
  }
  if (kind == plan::SegmentKind::kLossInput) {
    kernels::SumParts(stream, {.pieces = memory.pieces, .out = memory.rows});
    return;
  }
  const VocabularyParts::Args args = PartArgs(memory, gradients);
  const VocabularyParts::Chunk chunk = At(VocabularyParts::ChunksOf(args), memory.chunk);
  if (kind == plan::SegmentKind::kLossStatistics) {
    parts_.Statistics(stream, args, chunk);
    return;
  }
  CHECK_MSG(kind == plan::SegmentKind::kLossOfChunk, "a segment of a head");
  parts_.Loss(stream, args, chunk);
  if (gradients != nullptr) {
    parts_.GradientParts(stream, args, chunk);
  }
}

}  // namespace ravel::model
