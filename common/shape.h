#pragma once

// Shapes and N-D rectangles in global coordinates.

#include <cstdint>
#include <string>
#include <vector>

namespace ravel {

// Sizes of a row-major tensor, outermost first; {} is a scalar.
using Shape = std::vector<int64_t>;

// Product of the sizes; 1 for a scalar.
int64_t ElementCount(const Shape& shape);
// Product of the sizes after the first: the elements of one row; 1 for a scalar.
int64_t RowElements(const Shape& shape);
// "[2, 3]"
std::string ShapeText(const Shape& shape);

// An N-D rectangle: offset and length per dimension.
struct Box {
  Shape offset;
  Shape length;
  bool operator==(const Box&) const = default;
};

// The whole of a tensor of this shape.
Box WholeBox(const Shape& shape);
// The common part of two boxes of equal rank; any length may be 0.
Box Intersect(const Box& a, const Box& b);
bool IsEmpty(const Box& box);
// A range [begin, end) of row-major element indices as at most 2n-1 boxes, in order.
std::vector<Box> RangeToBoxes(const Shape& shape, int64_t begin, int64_t end);

}  // namespace ravel
