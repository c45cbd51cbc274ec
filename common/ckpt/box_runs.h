#pragma once

// A box of a tensor as runs of elements that are contiguous in the tensor and in the box. Pure.

#include <cstdint>
#include <functional>
#include <vector>

#include "common/shape.h"

namespace ravel::ckpt {

// An element of a box has a row-major index in the tensor and one in the box; both orders are the
// same. The box lies in the shape, the element in the box.
int64_t TensorIndex(const Shape& shape, const Box& box, int64_t box_index);
int64_t BoxIndex(const Shape& shape, const Box& box, int64_t tensor_index);

struct BoxRun {
  int64_t tensor_begin = 0;  // row-major index in the tensor
  int64_t box_begin = 0;     // row-major index in the box
  int64_t elements = 0;
};
using BoxRunVisitor = std::function<void(const BoxRun&)>;

// Elements [begin, end) of the box in its row-major order, as runs that ascend in both indices; a
// box of whole rows is one run, an empty one none. The box lies in the shape.
void VisitBoxRuns(
    const Shape& shape, const Box& box, int64_t begin, int64_t end, const BoxRunVisitor& visit);
// All of its elements.
inline void VisitBoxRuns(const Shape& shape, const Box& box, const BoxRunVisitor& visit) {
  VisitBoxRuns(shape, box, 0, ElementCount(box.length), visit);
}

// The same elements as boxes of the tensor, in order; at most 2 * dims - 1.
std::vector<Box> BoxesOfRange(const Box& box, int64_t begin, int64_t end);

}  // namespace ravel::ckpt
