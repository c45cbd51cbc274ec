#pragma once

// What ops check of the views that they are given, before the CPU implementation sees them.

#include "common/check.h"
#include "common/tensor_view.h"
#include "kernels/stream.h"

namespace ravel::kernels {

inline bool OnCuda(const Stream& stream) {
  return stream.backend() == Backend::kCuda;
}

inline void CheckMatrix(const TensorView& view,
                        int64_t rows,
                        int64_t columns,
                        DType dtype = DType::kF32) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.rank == 2 && view.size[0] == rows && view.size[1] == columns, "wrong shape");
  CHECK_MSG(rows <= 1 || view.row_stride >= columns, "rows overlap");
  CHECK_MSG(view.present() || rows * columns == 0, "no data");
}

// A contiguous range of any rank.
inline void CheckFlat(const TensorView& view, int64_t elements, DType dtype = DType::kF32) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.elements() == elements && view.contiguous(), "wrong size, or not contiguous");
  CHECK_MSG(view.present() || elements == 0, "no data");
}

// Activations of an op have the type of the first one.
inline void CheckFloat(const TensorView& view) {
  CHECK_MSG(view.dtype == DType::kF32 || view.dtype == DType::kBF16 || view.dtype == DType::kF16,
            "fp32, bf16 or fp16 is expected");
}

inline void CheckRank2(const TensorView& view) {
  CHECK_MSG(view.rank == 2, "a matrix is expected");
}

}  // namespace ravel::kernels
