#pragma once

// A view of a tensor: address, type, sizes. Never owns. Standard library only.

#include <array>
#include <cstdint>

#include "common/check.h"
#include "common/dtype.h"

namespace ravel {

// Row-major; every dimension is contiguous but the first, whose stride may be larger than a row, so
// a view may be a range of columns of a wider matrix. An absent optional argument is a
// default-constructed view.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;
  std::array<int64_t, kMaxRank> size = {};
  int64_t row_stride = 0;  // elements from row i to row i + 1

  bool present() const { return data != nullptr; }
  int64_t rows() const { return rank == 0 ? 1 : size[0]; }
  // Elements of one row.
  int64_t columns() const {
    int64_t product = 1;
    for (int i = 1; i < rank; ++i) {
      product *= size[static_cast<size_t>(i)];
    }
    return product;
  }
  int64_t elements() const { return rows() * columns(); }
  bool contiguous() const { return row_stride == columns() || rows() <= 1; }
  template <typename T>
  T* As() const {
    return static_cast<T*>(data);
  }
  // Address of row i, for a type of DTypeBytes(dtype) bytes.
  template <typename T>
  T* Row(int64_t i) const {
    return static_cast<T*>(data) + i * row_stride;
  }
};

// Contiguous fp32 views over memory at `data`.
inline TensorView VectorView(float* data, int64_t n) {
  return {.data = data, .dtype = DType::kF32, .rank = 1, .size = {n}, .row_stride = 1};
}
inline TensorView MatrixView(float* data, int64_t rows, int64_t columns) {
  return {.data = data,
          .dtype = DType::kF32,
          .rank = 2,
          .size = {rows, columns},
          .row_stride = columns};
}
// Address of element `index` of memory of that type; nullptr of nullptr.
inline void* ElementAt(void* data, int64_t index, DType dtype) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + index * DTypeBytes(dtype);
}
// Columns [begin, begin + count) of a matrix view.
inline TensorView ColumnsOf(const TensorView& matrix, int64_t begin, int64_t count) {
  CHECK(matrix.rank == 2 && begin >= 0 && begin + count <= matrix.size[1]);
  TensorView view = matrix;
  view.data = ElementAt(matrix.data, begin, matrix.dtype);
  view.size[1] = count;
  return view;
}
// Rows [begin, begin + count) of a matrix view.
inline TensorView RowsOf(const TensorView& matrix, int64_t begin, int64_t count) {
  CHECK(matrix.rank == 2 && begin >= 0 && begin + count <= matrix.size[0]);
  TensorView view = matrix;
  view.data = ElementAt(matrix.data, begin * matrix.row_stride, matrix.dtype);
  view.size[0] = count;
  return view;
}

}  // namespace ravel
