#include "common/shape.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "common/check.h"

namespace ravel {

int64_t ElementCount(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    count *= size;
  }
  return count;
}

int64_t RowElements(const Shape& shape) {
  int64_t count = 1;
  for (size_t i = 1; i < shape.size(); ++i) {
    count *= shape[i];
  }
  return count;
}

std::string ShapeText(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

Box WholeBox(const Shape& shape) {
  return {Shape(shape.size(), 0), shape};
}

Box Intersect(const Box& a, const Box& b) {
  CHECK_EQ(a.offset.size(), b.offset.size());
  Box common = a;
  for (size_t i = 0; i < a.offset.size(); ++i) {
    const int64_t begin = std::max(a.offset[i], b.offset[i]);
    const int64_t end = std::min(a.offset[i] + a.length[i], b.offset[i] + b.length[i]);
    common.offset[i] = begin;
    common.length[i] = std::max<int64_t>(0, end - begin);
  }
  return common;
}

bool IsEmpty(const Box& box) {
  return ElementCount(box.length) == 0;
}

std::vector<Box> RangeToBoxes(const Shape& shape, int64_t begin, int64_t end) {
  CHECK(0 <= begin && begin <= end && end <= ElementCount(shape));
  std::vector<Box> boxes;
  if (shape.empty()) {
    if (begin < end) {
      boxes.push_back({});
    }
    return boxes;
  }
  while (begin < end) {
    // The largest slab that starts at `begin`, is aligned to its own size and ends by `end`.
    size_t dim = shape.size() - 1;
    int64_t block = 1;  // elements of one index step along `dim`
    while (dim > 0 && begin % (block * shape[dim]) == 0 && begin + block * shape[dim] <= end) {
      block *= shape[dim];
      --dim;
    }
    const int64_t index = begin / block % shape[dim];
    const int64_t count = std::min((end - begin) / block, shape[dim] - index);
    Box box = WholeBox(shape);
    int64_t rest = begin / block;
    for (size_t d = dim + 1; d-- > 0;) {
      box.offset[d] = rest % shape[d];
      box.length[d] = d == dim ? count : 1;
      rest /= shape[d];
    }
    boxes.push_back(box);
    begin += count * block;
  }
  return boxes;
}

}  // namespace ravel
