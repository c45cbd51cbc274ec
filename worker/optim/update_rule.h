#pragma once

// How an optimizer changes weights and states, once a step is decided.

#include <memory>

#include "common/model/job_spec.h"
#include "common/plan/sharding_plan.h"
#include "kernels/step_statistics.h"
#include "kernels/stream.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// An element's update depends on its weight, states and gradient, on the scalars of the step, and
// on the element's global index alone. Used only from the thread of its rank, or in the order of
// the program's events.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // What the decision makes the scalars of each update from. Its learning rate is the messages'.
  virtual kernels::AdamWHyper hyper() const = 0;
  // Gives to the stream the update of what this rank stores of a group. `outcome` is memory of the
  // stream's backend, read when the stream gets there: the call is the same in every step, as
  // graphs want it. Nothing changes where the outcome does not apply.
  virtual void Update(kernels::Stream& stream,
                      const shard::ParameterGroup& group,
                      const kernels::StepOutcome& outcome) = 0;
};

// The rule of the job's optimizer. The plan outlives it.
std::unique_ptr<UpdateRule> MakeUpdateRule(const plan::ShardingPlan& plan,
                                           const plan::JobSpec& spec);

}  // namespace ravel::optim
