#pragma once

#include <cstdint>

#include "kernels/grouped_update.h"
#include "worker/optim/update_rule.h"

namespace ravel::optim {

// A rule of kernels/scalar/update_rules.h, in the types that the plan gives to weights and states:
// its states are those of the group, in their order.
class ElementwiseRule final : public UpdateRule {
 public:
  ElementwiseRule(kernels::ElementRule rule, const kernels::UpdateHyper& hyper, uint64_t seed)
      : rule_(rule), hyper_(hyper), seed_(seed) {}

  kernels::UpdateHyper hyper() const override { return hyper_; }
  void Update(kernels::Stream& stream, const GroupUpdate& update) const override;
  kernels::WeightUpdateArgs WeightUpdateOf(const GroupUpdate& update,
                                           const kernels::UpdatePiece& at,
                                           int64_t columns) const override;

 private:
  kernels::GroupedUpdateArgs ArgsOf(const GroupUpdate& update) const;

  const kernels::ElementRule rule_;
  const kernels::UpdateHyper hyper_;
  const uint64_t seed_;
};

}  // namespace ravel::optim
