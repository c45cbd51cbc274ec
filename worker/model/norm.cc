#include "worker/model/norm.h"

#include <string>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "kernels/norm.h"

namespace ravel::model {

Norm::Norm(const UnitTensors& tensors, std::string_view name)
    : kind_(tensors.architecture().norm), weight_(tensors.Index(name, "weight")) {
  const plan::ModelConfig& config = tensors.inventory().config;
  epsilon_ = static_cast<float>(has_mean() ? config.layer_norm_eps : config.rms_norm_eps);
  weight_leaves_ = GradientLeaves(tensors, weight_);
  if (has_mean()) {
    bias_ = tensors.Index(name, "bias");
    bias_leaves_ = GradientLeaves(tensors, bias_);
  }
  if (tensors.inventory().cut.cuts()) {
    blocks_ = tensors.inventory().cut.token_blocks();
  }
}

void Norm::Forward(kernels::Stream& stream, const ForwardArgs& args) const {
  if (has_mean()) {
    kernels::LayerNormForward(stream,
                              {.x = args.x,
                               .w = args.memory.weights[weight_],
                               .b = args.memory.weights[bias_],
                               .epsilon = epsilon_,
                               .copy = args.copy,
                               .y = args.y,
                               .mean = args.statistics.mean,
                               .rstd = args.statistics.rstd});
    return;
  }
  kernels::RmsNormForward(stream,
                          {.x = args.x,
                           .residual = {},
                           .w = args.memory.weights[weight_],
                           .epsilon = epsilon_,
                           .sum = args.copy,
                           .y = args.y,
                           .rstd = args.statistics.rstd});
}

void Norm::Backward(kernels::Stream& stream, const BackwardArgs& args) const {
  CHECK_EQ(args.x.size[0] % blocks_, 0);
  for (int64_t block = 0; block < blocks_; ++block) {
    BackwardRows(stream, args, block);
  }
  weight_leaves_.Fold(stream, args.memory, args.gradients);
  if (has_mean()) {
    bias_leaves_.Fold(stream, args.memory, args.gradients);
  }
}

// The rows of one block; a norm is of each row by itself.
void Norm::BackwardRows(kernels::Stream& stream, const BackwardArgs& args, int64_t block) const {
  const int64_t rows = args.x.size[0] / blocks_;
  const auto matrix = [&](const TensorView& view) {
    return view.present() ? RowsOf(view, block * rows, rows) : view;
  };
  const auto vector = [&](const TensorView& view) {
    return VectorView(view.As<float>() + block * rows, rows);
  };
  // A weight without leaves is one that has one block, or none at all that is trained.
  const auto leaf = [&](const GradientLeaves& leaves) {
    return leaves.Leaf(args.memory, args.gradients, leaves.count() > 1 ? block : 0);
  };
  if (has_mean()) {
    kernels::LayerNormBackward(stream,
                               {.dy = matrix(args.dy),
                                .x = matrix(args.x),
                                .w = args.memory.weights[weight_],
                                .mean = vector(args.statistics.mean),
                                .rstd = vector(args.statistics.rstd),
                                .dresidual = matrix(args.dresidual),
                                .dx = matrix(args.dx),
                                .dw = leaf(weight_leaves_),
                                .db = leaf(bias_leaves_),
                                .output = args.gradients.output});
    return;
  }
  kernels::RmsNormBackward(stream,
                           {.dy = matrix(args.dy),
                            .sum = matrix(args.x),
                            .w = args.memory.weights[weight_],
                            .rstd = vector(args.statistics.rstd),
                            .dresidual = matrix(args.dresidual),
                            .dx = matrix(args.dx),
                            .dw = leaf(weight_leaves_),
                            .dw_output = args.gradients.output});
}

NormActivations::NormActivations(const UnitTensors& tensors,
                                 std::string_view index,
                                 std::string_view area)
    : rstd_(tensors.spec(), absl::StrCat("rstd", std::string(index)), "rstd"),
      result_(tensors.spec(), absl::StrCat("n", std::string(index)), area) {
  if (tensors.architecture().norm == plan::NormKind::kLayer) {
    mean_ = Activation(tensors.spec(), absl::StrCat("mean", std::string(index)), "mean");
  }
}

Norm::Statistics NormActivations::StatisticsIn(const UnitMemory& memory) const {
  return {.mean = mean_.declared() ? mean_.In(memory) : TensorView{}, .rstd = rstd_.In(memory)};
}

}  // namespace ravel::model
