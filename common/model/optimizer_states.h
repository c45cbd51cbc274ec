#pragma once

// The states that each optimizer keeps for the parameters that it trains: one table, which plans,
// reports, checkpoints and the engine read.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "common/dtype.h"

namespace ravel::plan {

// On disk (plan proto): do not renumber. kSgdNesterov: training.optimizer.name sgd with nesterov.
enum class OptimizerKind : uint8_t { kAdamW = 0, kSgd = 1, kSgdNesterov = 2 };
inline constexpr OptimizerKind kLastOptimizer = OptimizerKind::kSgdNesterov;

// The part of a tensor in the saved state. On disk (manifest): do not renumber; ckpt::TensorRole
// has the numbers below 10, the states of optimizers take those from 10 to ckpt::kMaxTensorRole.
// The two moments are older than this rule.
enum class StateRole : uint8_t {
  kParam = 1,
  kExpAvg = 5,
  kExpAvgSq = 6,
  kStep = 7,
  kMomentum = 10
};

// kParameter: an element for each of the parameter's, in buffers of the plan. kScalar: the count of
// updates, one fp32, which the hosts of all ranks hold.
enum class StateShape : uint8_t { kParameter, kScalar };
// kChosen: what training.optimizer.stateDtype says.
enum class StateElement : uint8_t { kF32, kChosen };

struct StateSpec {
  const char* name = "";  // of buffers, and in keys of checkpoints: state.PARAMETER.NAME
  StateRole role = StateRole::kParam;
  StateElement element = StateElement::kF32;
  StateShape shape = StateShape::kParameter;
};

inline constexpr size_t kMaxBufferStates = 4;

// All states of an optimizer: those with buffers, in the order of ProgramBuffer::slot, then
// scalars.
std::span<const StateSpec> StatesOf(OptimizerKind kind);
// Those with buffers; at most kMaxBufferStates.
std::span<const StateSpec> BufferStatesOf(OptimizerKind kind);
// Index into BufferStatesOf. CHECKs that the role is there.
size_t BufferStateIndex(OptimizerKind kind, StateRole role);
// True if training.optimizer.stateDtype says something: some state has a choice.
bool HasChosenType(OptimizerKind kind);
// Type of a state where `chosen` is that of training.optimizer.stateDtype.
DType StateTypeOf(const StateSpec& state, DType chosen);

// "adamw": as in job files.
const char* OptimizerName(OptimizerKind kind);
// "exp_avg": the state of any optimizer that has the role; nullptr where none has.
const char* StateName(StateRole role);
// The optimizer that has a role; kParam and kStep belong to all.
bool HasRole(OptimizerKind kind, StateRole role);
// Key of a tensor of the saved state: NAME, state.NAME.exp_avg, ...
std::string StateKey(std::string_view parameter, StateRole role);

}  // namespace ravel::plan
