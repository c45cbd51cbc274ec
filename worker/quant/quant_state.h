#pragma once

// The quantization state of one rank: amaxes of all quantized matrices, from which every scale
// follows, and the histories of delayed scales. All ranks have the same after each reduction of
// amaxes; codes are each rank's own part. Where the memory lies is the plan's matter, and how
// ranks exchange is the executor's.

#include <cstdint>
#include <span>
#include <vector>

#include "common/plan/layout/quant_layout.h"
#include "kernels/quantize.h"
#include "kernels/stream.h"

namespace ravel::quant {

// Rows of a quantized matrix that this rank stores.
struct QuantPiece {
  plan::TensorId tensor = {};
  int64_t first_row = 0;
  TensorView main_weight;  // [rows, columns] fp32
  TensorView codes;        // [rows, bytes of a row] u8
};

// The operands of one quantized matrix and of the gemms that read it, in memory of the rank.
// Scales that are not delayed have absent views.
struct GemmScales {
  kernels::WeightScales weight;
  TensorView input_encode;  // of the gemm's input, and of the gradient of its output
  TensorView gradient_encode;
  TensorView input_staged;  // largest amax of the step
  TensorView gradient_staged;
  TensorView non_finite;
};

// Used only from the thread of its rank.
class QuantState {
 public:
  // Memory of the plan's buffers, which outlives this; zero at first.
  struct Memory {
    uint32_t* amax = nullptr;         // [words of the layout, padded]
    float* delayed_scales = nullptr;  // QuantWords::scales; nullptr: no scale is delayed
    int64_t history = 0;
    int64_t margin = 0;  // binades that delayed scales leave free
  };
  QuantState(const plan::ModelInventory& inventory, const Memory& memory);

  const plan::QuantLayout& layout() const { return layout_; }
  // False of tensors without a recipe.
  bool Has(plan::TensorId tensor) const { return layout_.Find(tensor) != nullptr; }
  // With `stages` false no amax of activations is kept: evaluation.
  GemmScales ScalesOf(plan::TensorId tensor, bool stages) const;

  // This rank's part of the amaxes of weights; those of activations stay.
  void MeasureWeights(kernels::Stream& stream, std::span<const QuantPiece> pieces);
  // words[i] = the largest of pieces[...][i].
  static void Maximum(std::span<const float* const> pieces, std::span<uint32_t> words);
  // After the amaxes of all ranks are there: the scales of the next cast of weights, and, where the
  // step was applied, the histories with this step's amaxes. A skipped step changes nothing.
  void FinishStep(kernels::Stream& stream, bool applied);
  // The same where histories were loaded: amaxes are new, histories are not.
  void FinishLoad(kernels::Stream& stream);
  void Quantize(kernels::Stream& stream, std::span<const QuantPiece> pieces) const;

  // Of all that every rank must have alike: amaxes of weights, delayed scales and histories.
  uint64_t ReplicatedDigest() const;
  // Of the digest of a weight (kernels/scalar/code_digest.h): the part of its scales.
  uint64_t ScalesDigest(plan::TensorId tensor) const;

  // A tensor of each domain of which an amax since the last call was not finite; this step's
  // gradients are not to be used then, though saturated codes hide it.
  std::vector<plan::TensorId> TakeNonFinite();

  // The state of delayed scales, for checkpoints: equal on all ranks. Of kCastScale one element for
  // each slot, of kAmaxHistory all histories, slot after slot; `first` is the first element.
  void ReadState(plan::StateRole role, int64_t first, std::span<float> to) const;
  void WriteState(plan::StateRole role, int64_t first, std::span<const float> from);

 private:
  TensorView Word(int64_t word) const;
  float& CastScale(int64_t slot) const;
  std::span<float> History(int64_t slot) const;
  // The next cast of a slot multiplies by this; 0: its history is empty.
  float& NextScale(int64_t slot) const;
  void UpdateSlot(kernels::Stream& stream, int64_t slot, uint32_t amax);
  void CastWeight(int64_t slot, uint32_t amax);

  const plan::QuantLayout layout_;
  const Memory memory_;
  mutable std::vector<uint32_t> non_finite_;  // by domain
};

}  // namespace ravel::quant
