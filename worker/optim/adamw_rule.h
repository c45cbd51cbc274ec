#pragma once

#include "worker/optim/update_rule.h"

namespace ravel::optim {

// AdamW with decoupled weight decay (kernels/adamw.h, kernels/mixed_adamw.h), in the types that the
// plan gives to weights and moments.
class AdamWRule final : public UpdateRule {
 public:
  AdamWRule(const plan::ShardingPlan& plan, const plan::JobSpec& spec)
      : plan_(plan), optimizer_(spec.optimizer), seed_(spec.seed) {}

  kernels::AdamWHyper hyper() const override;
  void Update(kernels::Stream& stream,
              const shard::ParameterGroup& group,
              const kernels::StepOutcome& outcome) override;

 private:
  const plan::ShardingPlan& plan_;
  const plan::OptimizerSpec optimizer_;
  const uint64_t seed_;
};

}  // namespace ravel::optim
