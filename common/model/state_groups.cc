#include "common/model/state_groups.h"

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

}  // namespace ravel::plan
