#include "worker/optim/update_rule.h"

#include "common/check.h"
#include "worker/optim/elementwise_rule.h"

namespace ravel::optim {

std::unique_ptr<UpdateRule> MakeUpdateRule(plan::OptimizerKind kind,
                                           const UpdateSettings& settings,
                                           uint64_t seed) {
  kernels::UpdateHyper hyper = {.beta1 = settings.beta1, .weight_decay = settings.weight_decay};
  const auto elementwise = [&](kernels::ElementRule rule) {
    return std::make_unique<ElementwiseRule>(rule, hyper, seed);
  };
  switch (kind) {
    case plan::OptimizerKind::kAdamW:
      hyper.beta2 = settings.beta2;
      hyper.epsilon = settings.eps;
      return elementwise(kernels::ElementRule::kAdamW);
    case plan::OptimizerKind::kSgd:
      return elementwise(kernels::ElementRule::kSgd);
    case plan::OptimizerKind::kSgdNesterov:
      return elementwise(kernels::ElementRule::kSgdNesterov);
    case plan::OptimizerKind::kLion:
      hyper.beta2 = settings.beta2;
      return elementwise(kernels::ElementRule::kLion);
  }
  CheckFailed(__FILE__, __LINE__, "optimizer kind", "has no rule");
}

}  // namespace ravel::optim
