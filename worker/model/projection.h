#pragma once

// y = x * w [+ bias] for one weight or for several that read the same input and lie side by side in
// y: q|k|v, gate|up.

#include <optional>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/stream.h"
#include "worker/model/part_sums.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// The columns of y are those of each part, in order. Where the inventory bundles the weights, their
// memory is contiguous and one GEMM does the work of all.
class Projection {
 public:
  // `members`: columns of y that this rank has of each of the maps that are fused or bundled;
  // empty: all columns of all weights. Where parts share a key head (plan::LocalSizes), `sharing`
  // slots of the gradients of the members after the first are of one head. `shared`: parts do so
  // on some number of ranks; each member then has gemms of its own on all.
  struct Members {
    std::vector<int64_t> columns = {};
    int64_t sharing = 1;
    bool shared = false;
  };
  Projection(const UnitTensors& tensors, const plan::LinearNames& names);
  Projection(const UnitTensors& tensors, const plan::LinearNames& names, const Members& members);

  // y (=|+=) x * w + bias.
  struct ForwardArgs {
    const UnitMemory& memory;
    TensorView x;
    TensorView y;
    kernels::Output output = kernels::Output::kOverwrite;
  };
  void Forward(kernels::Stream& stream, const ForwardArgs& args) const;

  // Sums in parts (PartSums), for SumParts to finish. Of a layer whose inputs this rank has a part
  // of: x * w, without the bias, which FinishForward adds. Where weights are quantized, what is cut
  // (x here, dy in InputGradientParts, either in WeightGradient) is quantized part by part, each
  // with scales of its own.
  struct PartArgs {
    const UnitMemory& memory;
    TensorView from;
    int64_t first = 0;  // row of the addend
  };
  std::vector<TensorView> ForwardParts(kernels::Stream& stream, const PartArgs& args) const;
  // y = round((residual + bias) + the tree of pieces).
  struct FinishArgs {
    const UnitMemory& memory;
    const std::vector<TensorView>& pieces;
    TensorView residual;
    TensorView y;
  };
  void FinishForward(kernels::Stream& stream, const FinishArgs& args) const;
  // dy * w^T of a layer whose outputs this rank has a part of. Part p is the p-th share of each
  // member, in their order.
  std::vector<TensorView> InputGradientParts(kernels::Stream& stream, const PartArgs& args) const;

  // dx = dy * w^T.
  struct InputGradientArgs {
    const UnitMemory& memory;
    TensorView dy;
    TensorView dx;
  };
  void InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const;

  // dw (=|+=) x^T * dy and db (=|+=) the sum of the rows of bias_dy, or, where that is absent, of
  // dy; of the parts that are not frozen.
  struct WeightGradientArgs {
    const UnitMemory& memory;
    const WeightGradients& gradients;
    TensorView x;
    TensorView dy;
    TensorView bias_dy = {};
  };
  void WeightGradient(kernels::Stream& stream, const WeightGradientArgs& args) const;

 private:
  struct Part {
    int64_t columns = 0;         // of y
    size_t weight = 0;           // index in UnitMemory::weights
    std::optional<size_t> bias;  // the same, if any
    GradientLeaves weight_leaves = {};
    GradientLeaves bias_leaves = {};
    uint32_t site = 0;  // of the weight's random numbers
    int64_t first = 0;  // where fused maps lie apart: columns of those before it
  };
  // Views of weights or gradients: the matrix and the bias of a part; absent: frozen, or there is
  // none.
  TensorView MatrixOf(const std::vector<TensorView>& views, const Part& part) const;
  TensorView BiasOf(const std::vector<TensorView>& views, const Part& part) const;
  // One GEMM: parts [begin, end), which are one matrix.
  struct Block {
    TensorView matrix;  // absent: frozen; of codes that of the first part
    int64_t columns = 0;
    size_t first = 0;  // part
    size_t parts = 1;
    // Several that are made at once lie apart: elements of the scratch and scales before this
    // one's.
    int64_t scratch = 0;
    int64_t scale = 0;
    bool in_parts = false;  // scales of blocks are then made by SliceOf
  };
  std::vector<Block> Blocks(const std::vector<TensorView>& views) const;
  // Outputs of one map: columns of y, from output `row` of the weight on.
  struct Member {
    size_t part = 0;
    int64_t row = 0;
    int64_t columns = 0;
    int64_t sharing = 1;
  };
  // Outputs of a block, and inputs, that one part has, as gemms are told them; 0: what is not cut.
  // Parts that share a key head have it each.
  int64_t PartOutputs(const Block& block) const;
  int64_t PartInputs(int64_t inputs) const;
  void AddMembers(const Members& members);
  void TakeApart(const Members& members);
  bool SharesHeads() const { return members_.back().sharing > 1; }
  // Gradients of layers whose outputs are cut, where parts share heads or are quantized by
  // themselves.
  void MemberGradients(kernels::Stream& stream, const WeightGradientArgs& args) const;
  // Gradients of layers whose inputs are cut, and quantized part by part.
  void InputPartGradients(kernels::Stream& stream, const WeightGradientArgs& args) const;
  void BiasGradients(kernels::Stream& stream, const WeightGradientArgs& args) const;
  // Of weights: the matrix of a block as gemms read it, decoded where it is of codes.
  struct Operand {
    TensorView matrix;
    TensorView scale;  // absent: 1
    ScaleForm form = ScaleForm::kTensor;
    TensorView whole = {};  // of packed codes, beside the scales of their blocks
  };
  // Places in the scratch of scales: lines apart.
  static constexpr int64_t kWeightScale = 0;
  static constexpr int64_t kInputScale = 16;
  static constexpr int64_t kGradientScale = 32;
  static constexpr int64_t kFactors = 48;  // two, of a gemm of packed codes
  TensorView ScaleAt(const UnitMemory& memory, int64_t place) const;
  // True where a recipe has a scale for the whole tensor.
  static bool ScalesTheWhole(plan::Recipe recipe);
  // The memory that a gemm of the operand takes as GemmArgs::factors.
  TensorView Factors(const UnitMemory& memory, const Operand& operand) const;
  // Columns of an operand, of which several may share a byte.
  static TensorView CodeColumns(const Operand& operand, int64_t first, int64_t count);
  Operand Weight(kernels::Stream& stream,
                 const UnitMemory& memory,
                 const Block& block,
                 kernels::BlocksAlong inner) const;
  Operand Decoded(kernels::Stream& stream, const UnitMemory& memory, const Block& block) const;
  // Weight of all parts at once, by part.
  std::vector<Operand> Weights(kernels::Stream& stream,
                               const UnitMemory& memory,
                               kernels::BlocksAlong inner) const;
  // dw (=|+=) x^T * dy, or dy^T * x.
  struct ProductArgs {
    const UnitMemory& memory;
    Operand x;
    Operand dy;
    bool turned = false;  // both are of codes, transposed already
    TensorView to;
    kernels::Output output = kernels::Output::kOverwrite;
    // PartOutputs and PartInputs of what `to` is a gradient of.
    int64_t part_outputs = 0;
    int64_t part_inputs = 0;
  };
  void AddProduct(kernels::Stream& stream, const ProductArgs& args) const;
  // The product of one part reads [first, first + count) of what it sums over, which is `inner` of
  // the stored matrix.
  struct Slice {
    size_t part = 0;
    kernels::BlocksAlong inner = kernels::BlocksAlong::kColumns;
    int64_t first = 0;
    int64_t count = 0;
  };
  Operand SliceOf(kernels::Stream& stream,
                  const UnitMemory& memory,
                  const Operand& weight,
                  const Slice& slice) const;
  // True where what a gemm sums over lies along the columns of its operand.
  bool SumsColumns(const UnitMemory& memory, size_t part, kernels::BlocksAlong inner) const {
    return inner == kernels::BlocksAlong::kColumns || OfCodes(memory, part);
  }
  struct MemberArgs {
    const WeightGradientArgs& all;
    const Operand& x;  // quantized, if any member is
    TensorView dy;     // of the member
    TensorView to;     // gradient of its weight, or leaves
  };
  void MemberGradient(kernels::Stream& stream, const Member& member, const MemberArgs& args) const;
  // Number of a part of a member, from 1, over all ranks: its place among sites of random numbers.
  uint32_t PieceOf(const Member& member, int64_t part) const;
  Operand Codes(kernels::Stream& stream,
                const UnitMemory& memory,
                const Block& block,
                kernels::BlocksAlong inner) const;
  // Scales of a block's codes, as a gemm reads them that sums over `inner`.
  TensorView PlacedScales(kernels::Stream& stream,
                          const UnitMemory& memory,
                          const Block& block,
                          kernels::BlocksAlong inner) const;
  bool Quantized(const UnitMemory& memory, size_t part) const;
  // True where gemms read codes, and not what they are decoded to.
  bool OfCodes(const UnitMemory& memory, size_t part) const {
    return Quantized(memory, part) && memory.scales[parts_[part].weight].of_codes;
  }
  // True where the recipe has scales of blocks. Gradients of outputs are then quantized for each
  // gemm apart: a block is never of two of them, and a gemm of codes takes all scales that lie
  // together.
  bool ScalesBlocks(const UnitMemory& memory, size_t part) const {
    return Quantized(memory, part) &&
           plan::BlockEdge(memory.scales[parts_[part].weight].weight.recipe) > 0;
  }
  // True where gemms read codes with a scale for each block.
  bool OfBlocks(const UnitMemory& memory, size_t part) const {
    return Quantized(memory, part) && memory.scales[parts_[part].weight].of_blocks;
  }
  // True where a gemm of a block's codes may lose low bits of sums.
  bool Fast(const UnitMemory& memory, const Block& block, bool quant::GemmScales::*which) const {
    return Quantized(memory, block.first) && memory.scales[parts_[block.first].weight].*which;
  }
  // x or dy as a gemm with codes reads it, in scratch, in the recipe of `part`. Codes of kRows are
  // transposed.
  struct ActivationArgs {
    const UnitMemory& memory;
    size_t part = 0;
    TensorView from;
    kernels::ActivationRole role = kernels::ActivationRole::kInput;
    kernels::BlocksAlong along = kernels::BlocksAlong::kColumns;
    uint32_t piece = 0;  // PieceOf; 0: the whole
  };
  kernels::ActivationDraws DrawsOf(const ActivationArgs& args) const;
  Operand Activation(kernels::Stream& stream, const ActivationArgs& args) const;
  Operand ActivationCodes(kernels::Stream& stream, const ActivationArgs& args) const;
  Operand ActivationBlocks(kernels::Stream& stream, const ActivationArgs& args) const;
  // The first part that is quantized, if any is.
  std::optional<size_t> FirstQuantized(const UnitMemory& memory) const;
  // Gradients of all outputs, if gemms share them; then those of a block, taken from these or made.
  Operand GradientOfAll(kernels::Stream& stream, const ActivationArgs& args) const;
  Operand GradientOf(kernels::Stream& stream,
                     const ActivationArgs& args,
                     const Operand& all,
                     const Block& block,
                     int64_t column) const;

  // Workspaces of quantized gemms, if the unit declares them.
  struct Scratch {
    size_t weight = 0;
    size_t input = 0;
    size_t gradient = 0;
    size_t scales = 0;
    // Of codes with a scale for each block, if the unit declares them.
    std::optional<size_t> weight_scales = {};
    std::optional<size_t> input_scales = {};
    std::optional<size_t> gradient_scales = {};
  };

  plan::MatrixLayout layout_;
  std::vector<Part> parts_;
  bool bundled_ = false;
  // The tensor axis has cut fused maps, of [in, out]: what a rank has of each is a matrix by
  // itself, one after another (plan::DimensionCut::parts).
  bool apart_ = false;
  std::optional<Scratch> scratch_;
  PartSums sums_;
  bool inputs_cut_ = false;  // by the tensor axis, or where it would cut
  bool shared_;              // Members::shared
  std::vector<Member> members_;
};

}  // namespace ravel::model
