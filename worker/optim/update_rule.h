#pragma once

// The interface of an optimizer: it changes weights and states once a step is decided.

#include <cstdint>
#include <memory>

#include "common/model/optimizer_states.h"
#include "kernels/step_statistics.h"
#include "kernels/stream.h"
#include "kernels/update.h"
#include "kernels/weight_update.h"
#include "worker/optim/update_settings.h"
#include "worker/shard/parameter_group.h"

namespace ravel::optim {

// The operands of one call, all in memory of the stream's backend.
struct GroupUpdate {
  const shard::ParameterGroup& group;
  // What of it is updated: all that this rank stores, or a part of it with memory of its own.
  shard::ParameterGroup::Stored stored;
  TensorView gradient;
  kernels::PieceTable pieces;  // offsets into those
  // Read when the stream gets there: the call is the same in every step, as graphs want it. Nothing
  // changes where the outcome does not apply.
  const kernels::StepOutcome& outcome;
};

// An element's update depends on its weight, states and gradient, on the scalars of the step, and
// on the element's global index alone. Used only from the thread of its rank, or in the order of
// the program's events.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // Returns the constants from which the decision computes the scalars of each update. The learning
  // rate comes from the messages instead.
  virtual kernels::UpdateHyper hyper() const = 0;
  // Gives the update to the stream: one call of a kernel, however many tensors the group has.
  virtual void Update(kernels::Stream& stream, const GroupUpdate& update) const = 0;
  // The update of one quantized piece of the group alone, for kernels::WeightUpdate, without its
  // target: `at` is of PieceTables::weights, `columns` the length of its rows here.
  virtual kernels::WeightUpdateArgs WeightUpdateOf(const GroupUpdate& update,
                                                   const kernels::UpdatePiece& at,
                                                   int64_t columns) const = 0;
};

// The rule of an optimizer. `seed` keys the rounding of states.
std::unique_ptr<UpdateRule> MakeUpdateRule(plan::OptimizerKind kind,
                                           const UpdateSettings& settings,
                                           uint64_t seed);

}  // namespace ravel::optim
