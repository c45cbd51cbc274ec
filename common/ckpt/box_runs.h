#pragma once

// A box of a tensor as runs of elements that are contiguous in the tensor and in the box. Pure.

#include <cstdint>
#include <functional>

#include "common/shape.h"

namespace ravel::ckpt {

struct BoxRun {
  int64_t tensor_begin = 0;  // row-major index in the tensor
  int64_t box_begin = 0;     // row-major index in the box
  int64_t elements = 0;
};

// Runs in ascending order of both indices; a box of whole rows is one run, an empty box none. The
// box lies in the shape.
void VisitBoxRuns(const Shape& shape,
                  const Box& box,
                  const std::function<void(const BoxRun&)>& visit);

}  // namespace ravel::ckpt
