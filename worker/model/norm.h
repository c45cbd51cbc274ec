#pragma once

#include <string_view>

#include "kernels/stream.h"
#include "worker/model/part_sums.h"
#include "worker/model/unit_parts.h"

namespace ravel::model {

// The norm that an architecture has over the residual stream: RMSNorm or LayerNorm.
class Norm {
 public:
  // `name`: of the norm's tensors, without ".weight".
  Norm(const UnitTensors& tensors, std::string_view name);

  // Destinations of a row's statistics; only LayerNorm has a `mean`.
  struct Statistics {
    TensorView mean;
    TensorView rstd;
  };
  struct ForwardArgs {
    const UnitMemory& memory;
    TensorView x;
    TensorView copy;  // optional: = x
    TensorView y;
    Statistics statistics;
  };
  void Forward(kernels::Stream& stream, const ForwardArgs& args) const;

  // dx = gradient of x [+ dresidual]; both may be the same memory. Where sums are in parts, those
  // of weights are over equal blocks of rows, then over the blocks.
  struct BackwardArgs {
    const UnitMemory& memory;
    const WeightGradients& gradients;
    TensorView dy;
    TensorView x;
    TensorView dresidual;  // optional
    TensorView dx;
    Statistics statistics;
  };
  void Backward(kernels::Stream& stream, const BackwardArgs& args) const;

  bool has_mean() const { return kind_ == plan::NormKind::kLayer; }

 private:
  void BackwardRows(kernels::Stream& stream, const BackwardArgs& args, int64_t block) const;

  plan::NormKind kind_;
  float epsilon_;
  size_t weight_;
  size_t bias_ = 0;     // of LayerNorm
  int64_t blocks_ = 1;  // of rows
  GradientLeaves weight_leaves_, bias_leaves_;
};

// The activations of a norm in the inventory: "mean0", "rstd0", "n0" for index "0".
class NormActivations {
 public:
  // `area`: the workspace of the result where it is not kept.
  NormActivations(const UnitTensors& tensors, std::string_view index, std::string_view area = "");

  Norm::Statistics StatisticsIn(const UnitMemory& memory) const;
  TensorView ResultIn(const UnitMemory& memory) const { return result_.In(memory); }
  bool remade() const { return result_.remade(); }

 private:
  Activation mean_;
  Activation rstd_;
  Activation result_;
};

}  // namespace ravel::model
