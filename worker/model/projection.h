#pragma once

// y = x * w [+ bias] for one weight or for several that read the same input and lie side by side in
// y: q|k|v, gate|up.

#include <optional>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/stream.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// The columns of y are those of each part, in order. Where the inventory bundles the weights, their
// memory is contiguous and one GEMM does the work of all.
class Projection {
 public:
  Projection(const UnitTensors& tensors, const plan::LinearNames& names);

  // y (=|+=) x * w + bias.
  struct ForwardArgs {
    const UnitMemory& memory;
    TensorView x;
    TensorView y;
    kernels::Output output = kernels::Output::kOverwrite;
  };
  void Forward(kernels::Stream& stream, const ForwardArgs& args) const;

  // dx = dy * w^T.
  struct InputGradientArgs {
    const UnitMemory& memory;
    TensorView dy;
    TensorView dx;
  };
  void InputGradient(kernels::Stream& stream, const InputGradientArgs& args) const;

  // dw (=|+=) x^T * dy and db (=|+=) the sum of dy's rows, of the parts that are not frozen.
  struct WeightGradientArgs {
    const UnitMemory& memory;
    const WeightGradients& gradients;
    TensorView x;
    TensorView dy;
  };
  void WeightGradient(kernels::Stream& stream, const WeightGradientArgs& args) const;

 private:
  struct Part {
    int64_t columns = 0;         // of y
    size_t weight = 0;           // index in UnitMemory::weights
    std::optional<size_t> bias;  // the same, if any
    uint32_t site = 0;           // of the weight's random numbers
  };
  // One GEMM: parts [begin, end), which are one matrix.
  struct Block {
    TensorView matrix;  // absent: frozen; of codes that of the first part
    int64_t columns = 0;
    size_t first = 0;  // part
    size_t parts = 1;
  };
  std::vector<Block> Blocks(const std::vector<TensorView>& views) const;
  // Of weights: the matrix of a block as gemms read it, decoded where it is of codes.
  struct Operand {
    TensorView matrix;
    TensorView scale;  // absent: 1
  };
  Operand Weight(kernels::Stream& stream,
                 const UnitMemory& memory,
                 const Block& block,
                 kernels::BlocksAlong inner) const;
  Operand Decoded(kernels::Stream& stream, const UnitMemory& memory, const Block& block) const;
  Operand Codes(kernels::Stream& stream,
                const UnitMemory& memory,
                const Block& block,
                kernels::BlocksAlong inner) const;
  bool Quantized(const UnitMemory& memory, size_t part) const;
  bool AnyQuantized(const UnitMemory& memory) const;
  // True where gemms read codes, and not what they are decoded to.
  bool OfCodes(const UnitMemory& memory, size_t part) const {
    return Quantized(memory, part) && memory.scales[parts_[part].weight].of_codes;
  }
  // True where a gemm of a block's codes may lose low bits of sums.
  bool Fast(const UnitMemory& memory, const Block& block, bool quant::GemmScales::*which) const {
    return Quantized(memory, block.first) && memory.scales[parts_[block.first].weight].*which;
  }
  // x or dy as a gemm with codes reads it, in scratch; once per call. Codes of kRows are
  // transposed.
  struct ActivationArgs {
    const UnitMemory& memory;
    TensorView from;
    kernels::ActivationRole role = kernels::ActivationRole::kInput;
    kernels::BlocksAlong along = kernels::BlocksAlong::kColumns;
  };
  Operand Activation(kernels::Stream& stream, const ActivationArgs& args) const;
  Operand ActivationCodes(kernels::Stream& stream, const ActivationArgs& args, size_t part) const;

  // Workspaces of quantized gemms, if the unit declares them.
  struct Scratch {
    size_t weight = 0;
    size_t input = 0;
    size_t gradient = 0;
    size_t scales = 0;
  };

  plan::MatrixLayout layout_;
  std::vector<Part> parts_;
  bool bundled_ = false;
  std::optional<Scratch> scratch_;
};

}  // namespace ravel::model
