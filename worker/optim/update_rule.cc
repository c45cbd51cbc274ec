#include "worker/optim/update_rule.h"

#include "common/check.h"
#include "worker/optim/elementwise_rule.h"

namespace ravel::optim {

std::unique_ptr<UpdateRule> MakeUpdateRule(const plan::JobSpec& spec) {
  const plan::OptimizerSpec& optimizer = spec.optimizer;
  kernels::UpdateHyper hyper = {.beta1 = optimizer.beta1, .weight_decay = optimizer.weight_decay};
  const auto elementwise = [&](kernels::ElementRule rule) {
    return std::make_unique<ElementwiseRule>(rule, hyper, spec.seed);
  };
  switch (optimizer.kind) {
    case plan::OptimizerKind::kAdamW:
      hyper.beta2 = optimizer.beta2;
      hyper.epsilon = optimizer.eps;
      return elementwise(kernels::ElementRule::kAdamW);
    case plan::OptimizerKind::kSgd:
      return elementwise(kernels::ElementRule::kSgd);
    case plan::OptimizerKind::kSgdNesterov:
      return elementwise(kernels::ElementRule::kSgdNesterov);
  }
  CheckFailed(__FILE__, __LINE__, "optimizer kind", "has no rule");
}

}  // namespace ravel::optim
