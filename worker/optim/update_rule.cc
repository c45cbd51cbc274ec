#include "worker/optim/update_rule.h"

#include "worker/optim/adamw_rule.h"

namespace ravel::optim {

std::unique_ptr<UpdateRule> MakeUpdateRule(const plan::ShardingPlan& plan,
                                           const plan::JobSpec& spec) {
  return std::make_unique<AdamWRule>(plan, spec);
}

}  // namespace ravel::optim
