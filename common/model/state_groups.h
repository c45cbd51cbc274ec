#pragma once

// Groups of elements that share a scale, in states of the optimizer that are kept as fp8: 128
// consecutive elements of one row of the whole tensor, the last group of a row being shorter. A
// tensor of one dimension counts as one row. So a group is a set of global coordinates, which no
// shard cuts: shards end with rows, those of one-dimensional tensors with multiples of 256.

#include <cstdint>

#include "common/shape.h"

namespace ravel::plan {

inline constexpr int64_t kStateGroup = 128;

// Elements of a row: the groups of a row begin at its first element.
int64_t StateRow(const Shape& shape);
// The groups of elements [begin, end), row-major. CHECKs that both are where a group begins or the
// tensor ends.
int64_t StateGroups(const Shape& shape, int64_t begin, int64_t end);
// Shape of a tensor's scales: [rows, groups of a row], [groups] of one dimension.
Shape ScaleShape(const Shape& shape);

// A square's code, UE5M3: E4M3 with the sign's bit in the exponent. 114688 is the largest, 0xFF is
// no code of a state and NaN here.
float SquareOfCode(uint8_t code);

}  // namespace ravel::plan
