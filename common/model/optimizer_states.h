#pragma once

// The states that each optimizer keeps for the parameters that it trains: one table, which plans,
// reports, checkpoints and the engine read.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"

namespace ravel::plan {

// On disk (plan proto): do not renumber. kSgdNesterov: training.optimizer.name sgd with nesterov.
enum class OptimizerKind : uint8_t { kAdamW = 0, kSgd = 1, kSgdNesterov = 2, kLion = 3 };
inline constexpr OptimizerKind kLastOptimizer = OptimizerKind::kLion;

// The part of a tensor in the saved state. On disk (manifest): do not renumber; ckpt::TensorRole
// has the numbers below 10, the states of optimizers take those from 10 to ckpt::kMaxTensorRole.
// The two moments are older than this rule.
enum class StateRole : uint8_t {
  kParam = 1,
  kExpAvg = 5,
  kExpAvgSq = 6,
  kStep = 7,
  kCastScale = 8,    // of delayed scales, of no optimizer: by which codes were cast, [3]: of the
                     // weight, the gemm's input, the gradient of its output
  kAmaxHistory = 9,  // their histories, [3, amaxes], oldest first
  kMomentum = 10,
  kExpAvgScale = 11,
  kExpAvgSqScale = 12
};

// kParameter: an element for each of the parameter's, in buffers of the plan. kScale: one for each
// group of elements (state_groups.h) of the state that StateSpec::scales names, only where that is
// fp8: powers of two, E8M0 in buffers and fp32 in files. kScalar: the count of updates, one fp32,
// which the hosts of all ranks hold.
enum class StateShape : uint8_t { kParameter, kScale, kScalar };
// kMean, kSquare: what training.optimizer.stateDtype says of averages of gradients, and of averages
// of their squares.
enum class StateElement : uint8_t { kF32, kMean, kSquare };

struct StateSpec {
  const char* name = "";  // of buffers, and in keys of checkpoints: state.PARAMETER.NAME
  StateRole role = StateRole::kParam;
  StateElement element = StateElement::kF32;
  StateShape shape = StateShape::kParameter;
  int scales = -1;  // kScale: the index in BufferStatesOf of what it scales
};

// What training.optimizer.stateDtype says: each fp32, bf16 or fp8. As fp8 a mean is E4M3, and a
// square, which has no sign, is UE5M3 in bytes (kernels/scalar/float8.h); both have scales.
inline constexpr DType kFp8Mean = DType::kF8E4M3;
inline constexpr DType kFp8Square = DType::kU8;
constexpr bool IsFp8State(DType type) {
  return type == kFp8Mean || type == kFp8Square;
}
struct StateTypes {
  DType mean = DType::kF32;
  DType square = DType::kF32;
  bool operator==(const StateTypes&) const = default;
};
inline constexpr StateTypes kF32States = {};
inline constexpr StateTypes kBf16States = {DType::kBF16, DType::kBF16};
inline constexpr StateTypes kFp8States = {kFp8Mean, kFp8Square};

inline constexpr size_t kMaxBufferStates = 4;

// All states of an optimizer: those with an element per parameter, in the order of
// ProgramBuffer::slot, then scales, which are there only where a state is fp8, then scalars.
std::span<const StateSpec> StatesOf(OptimizerKind kind);
// Those that a job has with these types.
std::vector<StateSpec> StatesOf(OptimizerKind kind, const StateTypes& types);
// Those with an element per parameter; at most kMaxBufferStates.
std::span<const StateSpec> BufferStatesOf(OptimizerKind kind);
// Index into BufferStatesOf. CHECKs that the role is there.
size_t BufferStateIndex(OptimizerKind kind, StateRole role);
// True if training.optimizer.stateDtype says something: some state has a choice.
bool HasChosenType(OptimizerKind kind);
// Type of a state in buffers, and, but for scales, in files.
DType StateTypeOf(const StateSpec& state, const StateTypes& types);
// The role of the scales of a state; nullopt where it has none in any type.
std::optional<StateRole> ScaleRoleOf(StateRole role);
// True if an update takes whole groups at a time: a state is fp8, or the types of the optimizer's
// states differ.
bool UpdatesInGroups(OptimizerKind kind, const StateTypes& types);
// "fp32"; "fp8,bf16" where the two differ: as in job files.
std::string StateTypesText(const StateTypes& types);
// Its reverse; nullopt for anything else. "bf16" is both.
std::optional<StateTypes> ParseStateTypes(std::string_view text);

// "adamw": as in job files.
const char* OptimizerName(OptimizerKind kind);
// "exp_avg": the state of any optimizer that has the role, or of scales; nullptr where none has.
const char* StateName(StateRole role);
// The optimizer that has a role; kParam, kStep and those of scales belong to all.
bool HasRole(OptimizerKind kind, StateRole role);
// True of the state of delayed scales.
bool IsOfScales(StateRole role);
// Key of a tensor of the saved state: NAME, state.NAME.exp_avg, ...
std::string StateKey(std::string_view parameter, StateRole role);

}  // namespace ravel::plan
