// Plain loops for gradient sums, casts and transpositions of mixed precision, and updates in
// blocks. The loops are the reference for the device kernels, so they are written for reading. A
// main weight is either fp32, or bf16 with a 16-bit remainder that together give the same fp32
// value. Of the optimizer states the first is rounded to nearest, the second stochastically: its
// random bits come from Philox by (seed, step, tensor, global index), so the result does not depend
// on how a tensor is cut into shards.

#include "kernels/cpu/mixed_ops.h"

#include <cmath>
#include <cstring>
#include <span>

#include "common/check.h"
#include "common/signed_size.h"
#include "kernels/cpu/grouped_update.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/update_rules.h"
#include "kernels/tree_reduce.h"

namespace ravel::kernels::cpu {
namespace {

float FloatAt(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::kBF16:
      return scalar::Bf16Value(view.As<uint16_t>()[i]);
    case DType::kF16:
      return scalar::Fp16Value(view.As<uint16_t>()[i]);
    default:
      return view.As<float>()[i];
  }
}

void CheckStates(const ElementUpdateArgs& args) {
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    if (Rule::kRule == args.rule) {
      CHECK_MSG(args.v.present() == (Rule::kStates > 1) || args.g.elements() == 0,
                "another number of states");
      CHECK_MSG(Rule::kNarrowStates || args.m.dtype == DType::kF32, "states are fp32");
    }
  });
}

}  // namespace

void ElementUpdate(const ElementUpdateArgs& args) {
  if (args.apply != nullptr && *args.apply == 0) {
    return;
  }
  CheckStates(args);
  UpdateScalars scalars = args.device_scalars != nullptr ? *args.device_scalars : args.scalars;
  const uint32_t step =
      args.device_step != nullptr ? static_cast<uint32_t>(*args.device_step) : args.step;
  const UpdatePiece whole = {
      .elements = args.g.elements(), .first_index = args.first_index, .site = args.site};
  const PieceTable table =
      args.table.pieces != nullptr ? args.table : PieceTable{.pieces = &whole, .count = 1};
  const float decay = scalars.weight_decay;
  for (const UpdatePiece& piece : std::span(table.pieces, Size(table.count))) {
    scalars.weight_decay = piece.decays != 0 ? decay : 0.0f;
    UpdateBlocks({.update = args}, piece, scalars, step);
  }
}

namespace {

float ValueOf(float value) {
  return value;
}
float ValueOf(uint16_t bits) {
  return scalar::Bf16Value(bits);
}

// The tree of pieces [begin, begin + count) at element i.
template <typename Piece>
float TreeAt(const std::vector<const Piece*>& pieces, size_t begin, size_t count, int64_t i) {
  return count == 1 ? ValueOf(pieces[begin][i])
                    : TreeAt(pieces, begin, count / 2, i) +
                          TreeAt(pieces, begin + count / 2, count / 2, i);
}

}  // namespace

void ReduceAdd(Stream& stream, const ReduceAddArgs& args) {
  float* out = args.out.As<float>();
  const int64_t n = args.out.elements();
  const bool rounded = !args.rounded_pieces.empty();
  if (args.output == Output::kOverwrite && !rounded) {
    TreeSum(stream, {.pieces = args.pieces, .out = args.out});
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float sum = rounded ? TreeAt(args.rounded_pieces, 0, args.rounded_pieces.size(), i)
                                : TreeAt(args.pieces, 0, args.pieces.size(), i);
      out[i] = args.output == Output::kOverwrite ? sum : out[i] + sum;
    }
  }
  double squares = 0.0;
  int64_t non_finite = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double value = static_cast<double>(out[i]);
    squares += value * value;
    non_finite += std::isfinite(out[i]) ? 0 : 1;
  }
  if (args.squared_norm != nullptr) {
    *args.squared_norm = squares;
  }
  if (args.non_finite != nullptr) {
    *args.non_finite += non_finite;
  }
}

void Cast(const CastArgs& args) {
  const int64_t n = args.from.elements();
  for (int64_t i = 0; i < n; ++i) {
    const float x = FloatAt(args.from, i);
    if (args.to.dtype == DType::kF32) {
      args.to.As<float>()[i] = x;
    } else if (args.to.dtype == DType::kF16) {
      args.to.As<uint16_t>()[i] = scalar::Fp16Nearest(x);
    } else {
      args.to.As<uint16_t>()[i] = args.rounding == Bf16Rounding::kNearest ? scalar::Bf16Nearest(x)
                                                                          : scalar::Bf16HalfAway(x);
    }
  }
}

void TransposeMatrix(const TransposeArgs& args) {
  const size_t bytes = static_cast<size_t>(DTypeBytes(args.from.dtype));
  const auto at = [bytes](const TensorView& view, int64_t row, int64_t column) {
    return view.As<char>() + static_cast<size_t>(row * view.row_stride + column) * bytes;
  };
  for (int64_t row = 0; row < args.from.size[0]; ++row) {
    for (int64_t column = 0; column < args.from.size[1]; ++column) {
      std::memcpy(at(args.to, column, row), at(args.from, row, column), bytes);
    }
  }
}

}  // namespace ravel::kernels::cpu
