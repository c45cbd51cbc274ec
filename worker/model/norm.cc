#include "worker/model/norm.h"

#include <string>

#include <absl/strings/str_cat.h>

#include "kernels/norm.h"

namespace ravel::model {

Norm::Norm(const UnitTensors& tensors, std::string_view name)
    : kind_(tensors.architecture().norm), weight_(tensors.Index(name, "weight")) {
  const plan::ModelConfig& config = tensors.inventory().config;
  epsilon_ = static_cast<float>(has_mean() ? config.layer_norm_eps : config.rms_norm_eps);
  if (has_mean()) {
    bias_ = tensors.Index(name, "bias");
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
  if (has_mean()) {
    kernels::LayerNormBackward(stream,
                               {.dy = args.dy,
                                .x = args.x,
                                .w = args.memory.weights[weight_],
                                .mean = args.statistics.mean,
                                .rstd = args.statistics.rstd,
                                .dresidual = args.dresidual,
                                .dx = args.dx,
                                .dw = args.gradients.views[weight_],
                                .db = args.gradients.views[bias_],
                                .output = args.gradients.output});
    return;
  }
  kernels::RmsNormBackward(stream,
                           {.dy = args.dy,
                            .sum = args.x,
                            .w = args.memory.weights[weight_],
                            .rstd = args.statistics.rstd,
                            .dresidual = args.dresidual,
                            .dx = args.dx,
                            .dw = args.gradients.views[weight_],
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
