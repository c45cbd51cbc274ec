#include "common/ckpt/box_runs.h"

#include "common/check.h"

namespace ravel::ckpt {

void VisitBoxRuns(const Shape& shape,
                  const Box& box,
                  const std::function<void(const BoxRun&)>& visit) {
  CHECK(box.offset.size() == shape.size() && box.length.size() == shape.size());
  const int64_t total = ElementCount(box.length);
  if (total == 0) {
    return;
  }
  // The innermost dimensions that the box spans whole, and one more, make a run.
  size_t outer = shape.size();
  int64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= box.length[outer];
    if (box.length[outer] != shape[outer]) {
      break;
    }
  }
  Shape at = box.offset;
  for (int64_t done = 0; done < total; done += run) {
    int64_t index = 0;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      index = index * shape[dim] + at[dim];
    }
    visit({index, done, run});
    for (size_t dim = outer; dim > 0; --dim) {
      if (++at[dim - 1] < box.offset[dim - 1] + box.length[dim - 1]) {
        break;
      }
      at[dim - 1] = box.offset[dim - 1];
    }
  }
}

}  // namespace ravel::ckpt
