// Updates whose states may be fp8: group by group, new values first, then the scales that they ask
// for, then their codes. A group's old values are read before any of its new ones is written.

#include "kernels/cpu/grouped_update.h"

#include <algorithm>
#include <span>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cpu/update_elements.h"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/update_rules.h"

namespace ravel::kernels::cpu {
namespace {

// A group of elements: where it begins in the flat ranges and in the tensor, and its scale.
struct Group {
  int64_t offset = 0;
  int64_t elements = 0;
  uint64_t index = 0;
  int64_t scale = 0;
};

struct Random {
  uint64_t seed = 0;
  uint32_t site = 0;
  uint32_t step = 0;
};

enum class StatePart : uint64_t { kMean = 0, kSquare = 4 };

// A state of all elements: fp32, bf16, or fp8 with scales.
struct State {
  TensorView values;
  uint8_t* scales = nullptr;
  StatePart part = StatePart::kMean;
};

using Values = float[kUpdateGroup];

void Read(const State& state, const Group& group, Values& to) {
  const bool mean = state.part == StatePart::kMean;
  for (int64_t i = 0; i < group.elements; ++i) {
    const int64_t at = group.offset + i;
    if (state.values.dtype == DType::kF32) {
      to[i] = state.values.As<float>()[at];
    } else if (state.values.dtype == DType::kBF16) {
      to[i] = scalar::Bf16Value(state.values.As<uint16_t>()[at]);
    } else {
      const uint8_t code = state.values.As<uint8_t>()[at];
      const uint8_t scale = state.scales[group.scale];
      to[i] = mean ? scalar::DecodeMean(code, scale) : scalar::DecodeSquare(code, scale);
    }
  }
}

// The scale that the new values ask for.
uint8_t ScaleOf(const State& state, std::span<const float> values) {
  uint32_t amax = 0;
  for (const float value : values) {
    amax = std::max(amax, scalar::MagnitudeBits(value));
  }
  return state.part == StatePart::kMean ? scalar::ScaleOfMeans(amax) : scalar::ScaleOfSquares(amax);
}

void Write(const State& state, const Group& group, const Random& random, const Values& from) {
  const bool mean = state.part == StatePart::kMean;
  const bool fp8 = state.values.dtype == DType::kF8E4M3;
  const uint8_t scale = fp8 ? ScaleOf(state, {from, Size(group.elements)}) : uint8_t{0};
  for (int64_t i = 0; i < group.elements; ++i) {
    const int64_t at = group.offset + i;
    if (state.values.dtype == DType::kF32) {
      state.values.As<float>()[at] = from[i];
      continue;
    }
    if (mean && !fp8) {
      state.values.As<uint16_t>()[at] = scalar::Bf16Nearest(from[i]);
      continue;
    }
    const uint64_t index = group.index + static_cast<uint64_t>(i);
    const uint32_t half = HalfOf(StateDraw(random.seed, random.site, random.step, index),
                                 index % 4 + static_cast<uint64_t>(state.part));
    if (!fp8) {
      state.values.As<uint16_t>()[at] = scalar::Bf16Stochastic(from[i], half);
    } else {
      state.values.As<uint8_t>()[at] = mean ? scalar::EncodeMean(from[i], scale, half)
                                            : scalar::EncodeSquare(from[i], scale, half);
    }
  }
  if (fp8) {
    state.scales[group.scale] = scale;
  }
}

float GradientAt(const TensorView& g, int64_t i) {
  return g.dtype == DType::kBF16 ? scalar::Bf16Value(g.As<uint16_t>()[i]) : g.As<float>()[i];
}

template <typename Rule>
void UpdateGroup(const GroupedUpdateArgs& args,
                 const Group& group,
                 const UpdateScalars& scalars,
                 const Random& random) {
  constexpr bool kTwo = Rule::kStates > 1;
  const State mean = {args.update.m, args.m_scales.As<uint8_t>(), StatePart::kMean};
  const State square = {args.update.v, args.v_scales.As<uint8_t>(), StatePart::kSquare};
  Values m = {};
  Values v = {};
  Read(mean, group, m);
  if constexpr (kTwo) {
    Read(square, group, v);
  }
  for (int64_t i = 0; i < group.elements; ++i) {
    const int64_t at = group.offset + i;
    const scalar::AdamWElement next = Rule::Step(
        scalars, {MainWeightAt(args.update, at), m[i], v[i]}, GradientAt(args.update.g, at));
    StoreMainWeight(args.update, at, next.p);
    m[i] = next.m;
    v[i] = next.v;
  }
  Write(mean, group, random, m);
  if constexpr (kTwo) {
    Write(square, group, random, v);
  }
}

template <typename Rule>
void UpdatePieceOf(const GroupedUpdateArgs& args,
                   const UpdatePiece& piece,
                   const UpdateScalars& scalars,
                   const Random& random) {
  CHECK_MSG(Rule::kNarrowStates, "states are fp32");
  CHECK_MSG(args.update.v.present() == (Rule::kStates > 1) || piece.elements == 0,
            "another number of states");
  const int64_t row = piece.row > 0 ? piece.row : std::max<int64_t>(1, piece.elements);
  int64_t scale = piece.first_scale;
  for (int64_t done = 0; done < piece.elements;) {
    const int64_t count = std::min({kUpdateGroup, row - done % row, piece.elements - done});
    UpdateGroup<Rule>(args,
                      {.offset = piece.offset + done,
                       .elements = count,
                       .index = static_cast<uint64_t>(piece.first_index + done),
                       .scale = scale++},
                      scalars,
                      random);
    done += count;
  }
}

}  // namespace

void GroupedUpdate(const GroupedUpdateArgs& args) {
  const ElementUpdateArgs& update = args.update;
  if (update.apply != nullptr && *update.apply == 0) {
    return;
  }
  UpdateScalars scalars =
      update.device_scalars != nullptr ? *update.device_scalars : update.scalars;
  const float decay = scalars.weight_decay;
  const uint32_t step =
      update.device_step != nullptr ? static_cast<uint32_t>(*update.device_step) : update.step;
  for (const UpdatePiece& piece : std::span(update.table.pieces, Size(update.table.count))) {
    scalars.weight_decay = piece.decays != 0 ? decay : 0.0f;
    scalar::ForEachRule([&](auto rule) {
      using Rule = decltype(rule);
      if (Rule::kRule == update.rule) {
        UpdatePieceOf<Rule>(
            args, piece, scalars, {.seed = update.seed, .site = piece.site, .step = step});
      }
    });
  }
}

}  // namespace ravel::kernels::cpu
