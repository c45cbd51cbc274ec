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
  };
  // One GEMM: parts [begin, end), which are one matrix.
  struct Block {
    TensorView matrix;  // absent: frozen
    int64_t columns = 0;
  };
  std::vector<Block> Blocks(const std::vector<TensorView>& views) const;

  plan::MatrixLayout layout_;
  std::vector<Part> parts_;
  bool bundled_ = false;
};

}  // namespace ravel::model
