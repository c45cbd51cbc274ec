#pragma once

#include "worker/model/norm.h"
#include "worker/model/vocabulary_parts.h"

namespace ravel::model {

// Final norm, output projection and cross-entropy, fused so that no [tokens, vocabulary] matrix
// exists. The projection's weight is the unit's own, or, tied, the borrowed embedding table.
// `hidden` is read, never written, by either pass.
class HeadModule final : public UnitModule {
 public:
  HeadModule(const plan::ModelInventory& inventory, plan::UnitId unit);

 protected:
  void ForwardSegment(kernels::Stream& stream,
                      const UnitMemory& memory,
                      plan::SegmentKind kind) const override;
  void BackwardSegment(kernels::Stream& stream,
                       const UnitMemory& memory,
                       plan::SegmentKind kind,
                       const WeightGradients& gradients) const override;

 private:
  // The vocabulary in parts; `gradients`: of a backward. On one rank: losses, and, with gradients,
  // d_normed and that of the projection.
  void RunParts(kernels::Stream& stream,
                const UnitMemory& memory,
                const WeightGradients* gradients) const;
  // Over ranks, one of their segments.
  void RunCut(kernels::Stream& stream,
              const UnitMemory& memory,
              plan::SegmentKind kind,
              const WeightGradients* gradients) const;
  // The norm's result of all tokens.
  TensorView Normed(const UnitMemory& memory) const {
    return sequence_ ? memory.workspace[n_all_] : normed_.ResultIn(memory);
  }
  VocabularyParts::Args PartArgs(const UnitMemory& memory, const WeightGradients* gradients) const;

  Norm norm_;
  NormActivations normed_;
  VocabularyParts parts_;
  size_t projection_;                         // weight
  size_t logits_, d_normed_;                  // workspace
  bool sequence_;                             // ranks have their own tokens alone
  size_t n_all_ = 0;                          // workspace
  size_t targets_, loss_, hidden_, dhidden_;  // shared
};

}  // namespace ravel::model
