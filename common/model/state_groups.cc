#include "common/model/state_groups.h"

#include <cmath>
#include <limits>

#include "common/check.h"

namespace ravel::plan {
namespace {

// Groups before an element, which begins one or is the tensor's end.
int64_t GroupsBefore(const Shape& shape, int64_t element) {
  const int64_t row = StateRow(shape);
  const int64_t of_row = (row + kStateGroup - 1) / kStateGroup;
  const int64_t rest = element % row;
  CHECK_MSG(rest % kStateGroup == 0, "a cut inside a group of a state");
  return element / row * of_row + rest / kStateGroup;
}

}  // namespace

int64_t StateRow(const Shape& shape) {
  const int64_t row = shape.size() == 1 ? shape[0] : RowElements(shape);
  return row > 0 ? row : 1;
}

int64_t StateGroups(const Shape& shape, int64_t begin, int64_t end) {
  return begin == end ? 0 : GroupsBefore(shape, end) - GroupsBefore(shape, begin);
}

Shape ScaleShape(const Shape& shape) {
  const int64_t of_row = (StateRow(shape) + kStateGroup - 1) / kStateGroup;
  return shape.size() == 1 ? Shape{of_row} : Shape{shape[0], of_row};
}

float SquareOfCode(uint8_t code) {
  const int exponent = code >> 3;
  const int mantissa = code & 7;
  if (code == 0xFF) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -17)
                       : std::ldexp(static_cast<float>(8 + mantissa), exponent - 18);
}

}  // namespace ravel::plan
