#include "common/model/optimizer_states.h"

#include <algorithm>
#include <array>

#include <absl/strings/str_cat.h>

#include "common/check.h"
#include "common/signed_size.h"

namespace ravel::plan {
namespace {

constexpr StateSpec kStep = {
    .name = "step", .role = StateRole::kStep, .shape = StateShape::kScalar};

constexpr StateSpec kAdamWStates[] = {
    {.name = "exp_avg", .role = StateRole::kExpAvg, .element = StateElement::kMean},
    {.name = "exp_avg_sq", .role = StateRole::kExpAvgSq, .element = StateElement::kSquare},
    {.name = "exp_avg_scale",
     .role = StateRole::kExpAvgScale,
     .shape = StateShape::kScale,
     .scales = 0},
    {.name = "exp_avg_sq_scale",
     .role = StateRole::kExpAvgSqScale,
     .shape = StateShape::kScale,
     .scales = 1},
    kStep};

// The average of gradients that AdamW has, too.
constexpr StateSpec kLionStates[] = {
    {.name = "exp_avg", .role = StateRole::kExpAvg, .element = StateElement::kMean},
    {.name = "exp_avg_scale",
     .role = StateRole::kExpAvgScale,
     .shape = StateShape::kScale,
     .scales = 0},
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
    {OptimizerKind::kLion, "lion", kLionStates},
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
  const auto end = std::find_if(states.begin(), states.end(), [](const StateSpec& state) {
    return state.shape != StateShape::kParameter;
  });
  return states.first(static_cast<size_t>(end - states.begin()));
}

std::vector<StateSpec> StatesOf(OptimizerKind kind, const StateTypes& types) {
  std::vector<StateSpec> states;
  for (const StateSpec& state : StatesOf(kind)) {
    const bool scale = state.shape == StateShape::kScale;
    if (!scale || IsFp8State(StateTypeOf(At(BufferStatesOf(kind), state.scales), types))) {
      states.push_back(state);
    }
  }
  return states;
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
    return state.element != StateElement::kF32;
  });
}

DType StateTypeOf(const StateSpec& state, const StateTypes& types) {
  switch (state.element) {
    case StateElement::kMean:
      return types.mean;
    case StateElement::kSquare:
      return types.square;
    case StateElement::kF32:
      break;
  }
  return DType::kF32;
}

std::optional<StateRole> ScaleRoleOf(StateRole role) {
  for (const Optimizer& optimizer : kOptimizers) {
    for (const StateSpec& state : optimizer.states) {
      if (state.shape == StateShape::kScale && At(optimizer.states, state.scales).role == role) {
        return state.role;
      }
    }
  }
  return std::nullopt;
}

bool UpdatesInGroups(OptimizerKind kind, const StateTypes& types) {
  const std::span<const StateSpec> states = BufferStatesOf(kind);
  const DType first = StateTypeOf(states.front(), types);
  return IsFp8State(first) ||
         std::any_of(states.begin(), states.end(), [&](const StateSpec& state) {
           return StateTypeOf(state, types) != first;
         });
}

namespace {

constexpr std::array<std::pair<const char*, StateTypes>, 3> kTypeNames = {
    {{"fp32", kF32States}, {"bf16", kBf16States}, {"fp8", kFp8States}}};

const char* TypeText(DType StateTypes::*state, DType type) {
  for (const auto& [name, named] : kTypeNames) {
    if (named.*state == type) {
      return name;
    }
  }
  CheckFailed(__FILE__, __LINE__, "type of a state", "is not in the table");
}

std::optional<StateTypes> ParseType(std::string_view text) {
  for (const auto& [name, named] : kTypeNames) {
    if (text == name) {
      return named;
    }
  }
  return std::nullopt;
}

}  // namespace

std::string StateTypesText(const StateTypes& types) {
  const std::string mean = TypeText(&StateTypes::mean, types.mean);
  const std::string square = TypeText(&StateTypes::square, types.square);
  return mean == square ? mean : absl::StrCat(mean, ",", square);
}

std::optional<StateTypes> ParseStateTypes(std::string_view text) {
  const size_t comma = text.find(',');
  const std::optional<StateTypes> mean = ParseType(text.substr(0, comma));
  const std::optional<StateTypes> square =
      comma == std::string_view::npos ? mean : ParseType(text.substr(comma + 1));
  return mean.has_value() && square.has_value()
             ? std::make_optional<StateTypes>({.mean = mean->mean, .square = square->square})
             : std::nullopt;
}

const char* OptimizerName(OptimizerKind kind) {
  return Of(kind).name;
}

bool IsOfScales(StateRole role) {
  return role == StateRole::kCastScale || role == StateRole::kAmaxHistory;
}

const char* StateName(StateRole role) {
  if (IsOfScales(role)) {
    return role == StateRole::kCastScale ? "scale" : "amax_history";
  }
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
  return role == StateRole::kParam || IsOfScales(role) ||
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
