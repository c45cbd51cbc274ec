#include "common/ckpt/box_runs.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::ckpt {
namespace {

// The innermost dimensions that the box spans whole, and one more, are contiguous in the tensor:
// their elements.
int64_t ContiguousElements(const Shape& shape, const Box& box) {
  int64_t elements = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    elements *= box.length[dim];
    if (box.length[dim] != shape[dim]) {
      break;
    }
  }
  return elements;
}

}  // namespace

int64_t TensorIndex(const Shape& shape, const Box& box, int64_t box_index) {
  int64_t index = 0;
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    index += (box.offset[dim] + box_index % box.length[dim]) * stride;
    box_index /= box.length[dim];
    stride *= shape[dim];
  }
  return index;
}

int64_t BoxIndex(const Shape& shape, const Box& box, int64_t tensor_index) {
  int64_t index = 0;
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    index += (tensor_index % shape[dim] - box.offset[dim]) * stride;
    tensor_index /= shape[dim];
    stride *= box.length[dim];
  }
  return index;
}

void VisitBoxRuns(
    const Shape& shape, const Box& box, int64_t begin, int64_t end, const BoxRunVisitor& visit) {
  CHECK(box.offset.size() == shape.size() && box.length.size() == shape.size());
  CHECK(0 <= begin && begin <= end && end <= ElementCount(box.length));
  const int64_t contiguous = ContiguousElements(shape, box);
  while (begin < end) {
    const int64_t elements = std::min(contiguous - begin % contiguous, end - begin);
    visit({TensorIndex(shape, box, begin), begin, elements});
    begin += elements;
  }
}

std::vector<Box> BoxesOfRange(const Box& box, int64_t begin, int64_t end) {
  std::vector<Box> boxes = RangeToBoxes(box.length, begin, end);
  for (Box& part : boxes) {
    for (size_t dim = 0; dim < box.offset.size(); ++dim) {
      part.offset[dim] += box.offset[dim];
    }
  }
  return boxes;
}

}  // namespace ravel::ckpt
