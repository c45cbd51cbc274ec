#pragma once

#include <cstdint>
#include <optional>

#include "kernels/embedding.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// The gradient of the residual stream, of all tokens: `dhidden`, or what is gathered of it.
class GatheredGradient {
 public:
  GatheredGradient(const plan::ModelInventory& inventory, plan::UnitId unit);
  // UnitMemory::rows = this rank's.
  void Give(kernels::Stream& stream, const UnitMemory& memory) const;
  TensorView In(const UnitMemory& memory) const;

 private:
  bool sequence_;
  size_t dhidden_;  // shared
  size_t dy_all_ = 0;
};

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
  bool cut_;                 // over ranks
  kernels::TableRows rows_;  // that this rank has
  size_t ids_, hidden_;      // shared
  GatheredGradient gradient_;
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
  std::optional<int64_t> first_token_;  // of `hidden`, where ranks have their own alone
  size_t hidden_;                       // shared
  GatheredGradient gradient_;
};

}  // namespace ravel::model
