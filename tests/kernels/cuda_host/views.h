#pragma once

// Views for ops that nobody runs: addresses are 256-byte aligned plus what is asked, and hold
// nothing.

#include <cstdint>

#include "common/tensor_view.h"

namespace ravel::kernels::cuda::testing {

class Memory {
 public:
  TensorView Matrix(int64_t rows,
                    int64_t columns,
                    DType dtype = DType::kF32,
                    int64_t gap = 0,
                    int64_t offset = 0) {
    TensorView view = {.data = Next(offset * DTypeBytes(dtype)),
                       .dtype = dtype,
                       .rank = 2,
                       .size = {rows, columns},
                       .row_stride = columns + gap};
    return view;
  }
  TensorView Vector(int64_t n, DType dtype = DType::kF32, int64_t offset = 0) {
    return {.data = Next(offset * DTypeBytes(dtype)),
            .dtype = dtype,
            .rank = 1,
            .size = {n},
            .row_stride = 1};
  }
  TensorView Ids(int64_t n) { return Vector(n, DType::kI32); }

 private:
  void* Next(int64_t offset) {
    next_ += uintptr_t{1} << 36;
    return reinterpret_cast<void*>(next_ + static_cast<uintptr_t>(offset));
  }
  uintptr_t next_ = uintptr_t{1} << 40;
};

}  // namespace ravel::kernels::cuda::testing
