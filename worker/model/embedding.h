#pragma once

#include "kernels/embedding.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// hidden = table[ids]; backward adds dhidden's rows into the table's gradient. Where ranks have
// rows of the table each, the addend has those of this one, and hidden is the sum.
class EmbeddingModule final : public UnitModule {
 public:
  EmbeddingModule(const plan::ModelInventory& inventory, plan::UnitId unit);

 protected:
  void ForwardSegment(kernels::Stream& stream,
                      const UnitMemory& memory,
                      plan::SegmentKind kind) const override;
  void BackwardSegment(kernels::Stream& stream,
                       const UnitMemory& memory,
                       plan::SegmentKind kind,
                       const WeightGradients& gradients) const override;

 private:
  bool cut_;                       // over ranks
  kernels::TableRows rows_;        // that this rank has
  size_t ids_, hidden_, dhidden_;  // shared
};

// Learned positions: hidden[t] += table[t mod sequence]; backward leaves dhidden as it is.
class PositionsModule final : public UnitModule {
 public:
  PositionsModule(const plan::ModelInventory& inventory,
                  plan::UnitId unit,
                  const plan::MicroBatchShape& micro_batch);

 protected:
  void ForwardSegment(kernels::Stream& stream,
                      const UnitMemory& memory,
                      plan::SegmentKind kind) const override;
  void BackwardSegment(kernels::Stream& stream,
                       const UnitMemory& memory,
                       plan::SegmentKind kind,
                       const WeightGradients& gradients) const override;

 private:
  int64_t sequence_tokens_;
  size_t hidden_, dhidden_;  // shared
};

}  // namespace ravel::model
