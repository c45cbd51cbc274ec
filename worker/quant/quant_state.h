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
#include "kernels/weight_update.h"

namespace ravel::quant {

// Rows of a quantized matrix that this rank stores, or of the part that the tensor axis leaves to
// it.
struct QuantPiece {
  plan::TensorId tensor = {};
  int64_t first_row = 0;   // in that part
  TensorView main_weight;  // [rows, columns] fp32
  TensorView codes;        // [rows, bytes of a row] u8
};

// Some of a piece's rows.
QuantPiece RowsOf(const QuantPiece& piece, int64_t first, int64_t rows);

// The operands of one quantized matrix and of the gemms that read it, in memory of the rank.
// Scales that are not delayed have absent views.
struct GemmScales {
  kernels::WeightScales weight;
  TensorView input_encode;  // of the gemm's input, and of the gradient of its output
  TensorView gradient_encode;
  TensorView input_staged;  // largest amax of the step
  TensorView gradient_staged;
  TensorView non_finite;
  bool of_codes = false;   // the gemms read codes; else operands are decoded first
  bool of_blocks = false;  // codes with a scale for each block
  bool as_mxfp8 = false;   // of kFloat8Block: each scale as four of kMxFp8
  // Of codes: which of the gemms may lose low bits of sums.
  bool fast_forward = false;
  bool fast_input_gradient = false;
  float amax_epsilon = 0;  // scales follow from no amax below it
};

// Used only from the thread of its rank, but for MeasureElements, QuantizeAhead and Quantize of
// different elements on a host, which threads may call at once.
class QuantState {
 public:
  // Memory of the plan's buffers, which outlives this, on a host or on a device.
  struct Memory {
    uint32_t* amax = nullptr;         // [words of the layout, padded]
    float* delayed_scales = nullptr;  // QuantWords::scales; nullptr: no scale is delayed
    uint32_t* flags = nullptr;        // [tensors of the inventory]
    int64_t history = 0;
    int64_t margin = 0;  // binades that delayed scales leave free
    plan::AmaxAlgorithm algorithm = plan::AmaxAlgorithm::kMax;
    plan::FirstScale first = plan::FirstScale::kCurrent;
  };
  // How gemms of quantized matrices are computed. A path that is no emulation makes them read
  // codes.
  struct Gemms {
    plan::GemmPath path = plan::GemmPath::kNone;
    plan::FastAccumulation fast = plan::FastAccumulation::kForward;
    float amax_epsilon = 0;
  };
  // `coordinate`: of the rank on the tensor axis.
  QuantState(const plan::ModelInventory& inventory,
             int64_t coordinate,
             const Gemms& gemms,
             const Memory& memory);

  const plan::QuantLayout& layout() const { return layout_; }
  // False of tensors without a recipe.
  bool Has(plan::TensorId tensor) const { return layout_.Find(tensor) != nullptr; }
  // With `stages` false neither amaxes of activations nor flags are kept: evaluation.
  GemmScales ScalesOf(plan::TensorId tensor, bool stages) const;

  // This rank's part of the amaxes of weights, which are 0 before; those of activations stay.
  void MeasureWeights(kernels::Stream& stream, std::span<const QuantPiece> pieces);
  // The same of `count` elements of a piece from `first` on, counted through its rows. An amax is a
  // maximum, so pieces may be cut anywhere.
  void MeasureElements(kernels::Stream& stream,
                       const QuantPiece& piece,
                       int64_t first,
                       int64_t count);
  struct RowRange {
    int64_t first = 0;
    int64_t rows = 0;
  };
  // The rows of a piece, of `count` elements from `first` on, whose scales this rank knows before
  // amaxes are reduced (rows 0: none): of delayed scales those that are whole here, once there is a
  // history; of blocks that share no scale of the whole, those of blocks that are whole here.
  RowRange KnownRows(const QuantPiece& piece, int64_t first, int64_t count) const;
  // Codes of such rows, a piece: of delayed scales by that of the next cast, where 0 counts as 1.
  void QuantizeAhead(kernels::Stream& stream, const QuantPiece& rows) const;
  // On a host: false where the next cast of a weight has no scale yet, which is delayed.
  bool HasHistory(plan::TensorId tensor) const;
  // After MeasureElements of the same: QuantizeAhead of the rows that are known, which those are.
  // Quantize makes the others after FinishStep.
  RowRange QuantizeUpdated(kernels::Stream& stream,
                           const QuantPiece& piece,
                           int64_t first,
                           int64_t count) const;
  // The place where an update that does both leaves the amaxes of a piece and, if it `encodes`,
  // codes: of blocks that are whole here, whose rows are known, or by a delayed scale if there is
  // one then.
  struct Target {
    kernels::WeightTarget target;
    RowRange encoded;
  };
  Target TargetOf(const QuantPiece& piece, bool encodes) const;
  // Bytes of the amaxes of weights, from the first word.
  int64_t weight_bytes() const;
  // After the amaxes of all ranks are there: the scales of the next cast of weights, and, where
  // *apply (i32; absent: yes) is not 0, the histories with this step's amaxes. A skipped step
  // changes nothing. Amaxes of activations are 0 again.
  void FinishStep(kernels::Stream& stream, const TensorView& apply);
  // The same where histories were loaded: amaxes are new, histories are not.
  void FinishLoad(kernels::Stream& stream);
  // The codes of pieces, by the scales of now. `encoded`: their updates have had targets that
  // encode, so those of delayed scales may be there.
  void Quantize(kernels::Stream& stream,
                std::span<const QuantPiece> pieces,
                bool encoded = false) const;

  // All that every rank must have alike, where its memory lies: amaxes of weights; delayed scales
  // and histories.
  std::span<const uint32_t> weight_amaxes() const;
  std::span<const float> delayed_scales() const;
  // A digest of both. Only of memory on the host.
  uint64_t ReplicatedDigest() const;
  // The part of a weight's scales in its digest (kernels/scalar/code_digest.h), by copies of both
  // on the host.
  uint64_t ScalesDigest(plan::TensorId tensor,
                        std::span<const uint32_t> amaxes,
                        std::span<const float> delayed) const;

  // By tensor of the inventory: not 0 where a gemm of this step that reads it has met an amax that
  // was not finite. Of matrices that one gemm reads it is the first. Gradients are not to be used
  // then, though saturated codes hide it.
  TensorView flags() const;

  // Where the state of delayed scales lies that checkpoints hold, equal on all ranks. Of kCastScale
  // one element for each slot, of kAmaxHistory all histories, slot after slot. Elements between
  // those of a stride are of no matter to a checkpoint, and are made anew by FinishLoad.
  struct StateRange {
    float* data = nullptr;
    int64_t stride = 1;
  };
  StateRange StateOf(plan::StateRole role, int64_t first, int64_t elements) const;

 private:
  TensorView Word(int64_t word) const;
  // The amaxes of the blocks in this rank's part of a matrix.
  TensorView GridOf(const plan::QuantTensor& of) const;
  // Amaxes of [rows, columns] of `weights`, whose first element is at (first_row, first_column) of
  // this rank's part of a matrix, and at the beginning of a block.
  void MeasureBox(kernels::Stream& stream,
                  const plan::QuantTensor& of,
                  const TensorView& weights,
                  int64_t first_row,
                  int64_t first_column);
  // The scale of a slot's codes, and that of its next cast; 0: its history is empty.
  float* CastScale(int64_t slot) const;
  float* NextScale(int64_t slot) const;
  kernels::DelayedScalesArgs DelayedScales() const;
  float* histories() const {
    return memory_.delayed_scales + kernels::kDelayedWords * layout_.slots;
  }

  // This rank's part of a grid.
  struct GridPart {
    int64_t first_row = 0;
    int64_t first_column = 0;
    int64_t rows = 0;
    int64_t columns = 0;
  };

  const plan::QuantLayout layout_;
  std::vector<GridPart> grids_;  // by index in the layout
  const Gemms gemms_;
  const Memory memory_;
};

}  // namespace ravel::quant
