#include "common/model/optimizer_states.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "common/check.h"

namespace ravel::plan {
namespace {

constexpr StateSpec kStep = {
    .name = "step", .role = StateRole::kStep, .shape = StateShape::kScalar};

constexpr StateSpec kAdamWStates[] = {
    {.name = "exp_avg", .role = StateRole::kExpAvg, .element = StateElement::kChosen},
    {.name = "exp_avg_sq", .role = StateRole::kExpAvgSq, .element = StateElement::kChosen},
    kStep};

constexpr StateSpec kSgdStates[] = {{.name = "momentum_buffer", .role = StateRole::kMomentum},
                                    kStep};

struct Optimizer {
  OptimizerKind kind;
  const char* name;
  std::span<const StateSpec> states;
};

constexpr Optimizer kOptimizers[] = {
    {OptimizerKind::kAdamW, "adamw", kAdamWStates},
    {OptimizerKind::kSgd, "sgd", kSgdStates},
    {OptimizerKind::kSgdNesterov, "sgd", kSgdStates},
};

const Optimizer& Of(OptimizerKind kind) {
  for (const Optimizer& optimizer : kOptimizers) {
    if (optimizer.kind == kind) {
      return optimizer;
    }
  }
  CheckFailed(__FILE__, __LINE__, "optimizer kind", "is not in the table");
}

}  // namespace

std::span<const StateSpec> StatesOf(OptimizerKind kind) {
  return Of(kind).states;
}

std::span<const StateSpec> BufferStatesOf(OptimizerKind kind) {
  const std::span<const StateSpec> states = StatesOf(kind);
  const auto scalar = std::find_if(states.begin(), states.end(), [](const StateSpec& state) {
    return state.shape == StateShape::kScalar;
  });
  return states.first(static_cast<size_t>(scalar - states.begin()));
}

size_t BufferStateIndex(OptimizerKind kind, StateRole role) {
  const std::span<const StateSpec> states = BufferStatesOf(kind);
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].role == role) {
      return i;
    }
  }
  CheckFailed(__FILE__, __LINE__, "state role", "is none of the optimizer's");
}

bool HasChosenType(OptimizerKind kind) {
  const std::span<const StateSpec> states = StatesOf(kind);
  return std::any_of(states.begin(), states.end(), [](const StateSpec& state) {
    return state.element == StateElement::kChosen;
  });
}

DType StateTypeOf(const StateSpec& state, DType chosen) {
  return state.element == StateElement::kChosen ? chosen : DType::kF32;
}

const char* OptimizerName(OptimizerKind kind) {
  return Of(kind).name;
}

const char* StateName(StateRole role) {
  for (const Optimizer& optimizer : kOptimizers) {
    for (const StateSpec& state : optimizer.states) {
      if (state.role == role) {
        return state.name;
      }
    }
  }
  return nullptr;
}

bool HasRole(OptimizerKind kind, StateRole role) {
  const std::span<const StateSpec> states = StatesOf(kind);
  return role == StateRole::kParam ||
         std::any_of(states.begin(), states.end(), [role](const StateSpec& state) {
           return state.role == role;
         });
}

std::string StateKey(std::string_view parameter, StateRole role) {
  if (role == StateRole::kParam) {
    return std::string(parameter);
  }
  const char* name = StateName(role);
  CHECK_MSG(name != nullptr, "a role of no optimizer");
  return absl::StrCat("state.", std::string(parameter), ".", name);
}

}  // namespace ravel::plan
