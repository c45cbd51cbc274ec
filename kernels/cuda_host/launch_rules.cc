#include "kernels/cuda_host/launch_rules.h"

#include <algorithm>

#include "common/check.h"

namespace ravel::kernels::cuda {
namespace {

constexpr int64_t kAccessBytes = 16;
constexpr int64_t kBlocksPerMultiprocessor = 16;
constexpr int64_t kMaxGridY = 65535;

// A vector is one row.
bool FitsVectors(const TensorView& view) {
  const int64_t bytes = DTypeBytes(view.dtype);
  const bool one_row = view.rank <= 1 || view.rows() <= 1;
  const int64_t columns = view.rank <= 1 ? view.elements() : view.columns();
  return reinterpret_cast<uintptr_t>(view.data) % kAccessBytes == 0 &&
         (one_row || view.row_stride * bytes % kAccessBytes == 0) &&
         columns * bytes % kAccessBytes == 0;
}

}  // namespace

LaunchStream& LaunchStreamOf(Stream& stream) {
  CHECK_MSG(stream.backend() == Backend::kCuda, "a CUDA op needs a CUDA stream");
  return static_cast<LaunchStream&>(stream);
}

void RequireMatrix(const TensorView& view, int64_t rows, int64_t columns, DType dtype) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.rank == 2 && view.size[0] == rows && view.size[1] == columns, "wrong shape");
  CHECK_MSG(rows <= 1 || view.row_stride >= columns, "rows overlap");
  CHECK_MSG(view.present() || rows * columns == 0, "no data");
}

void RequireFlat(const TensorView& view, int64_t elements, DType dtype) {
  CHECK_MSG(view.dtype == dtype, "wrong element type");
  CHECK_MSG(view.elements() == elements && view.contiguous(), "wrong size, or not contiguous");
  CHECK_MSG(view.present() || elements == 0, "no data");
}

void RequireFloat(const TensorView& view) {
  CHECK_MSG(view.dtype == DType::kF32 || IsNarrow(view.dtype), "fp32, bf16 or fp16 is expected");
}

void RequireGradient(const TensorView& view) {
  CHECK_MSG(view.dtype == DType::kF32 || view.dtype == DType::kBF16, "fp32 or bf16 is expected");
}

bool IsNarrow(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16;
}

bool FitsVectors(std::initializer_list<TensorView> views) {
  return std::all_of(views.begin(), views.end(), [](const TensorView& view) {
    return !view.present() || FitsVectors(view);
  });
}

Variant VariantFor(std::initializer_list<TensorView> views) {
  const bool vectors = FitsVectors(views);
  switch (views.begin()->dtype) {
    case DType::kBF16:
      return vectors ? kBf16Vector : kBf16Scalar;
    case DType::kF16:
      return vectors ? kFp16Vector : kFp16Scalar;
    default:
      return vectors ? kF32Vector : kF32Scalar;
  }
}

Variant MixedVariantFor(std::initializer_list<TensorView> views) {
  const bool vectors = FitsVectors(views);
  if (views.begin()->dtype == DType::kF16) {
    return vectors ? kFp16MixedVector : kFp16MixedScalar;
  }
  return vectors ? kMixedVector : kMixedScalar;
}

int64_t WidthOf(Variant variant) {
  switch (variant) {
    case kF32Vector:
      return 4;
    case kBf16Vector:
    case kMixedVector:
    case kFp16Vector:
    case kFp16MixedVector:
      return 8;
    default:
      return 1;
  }
}

Variant ScalarVariantOf(DType dtype) {
  return dtype == DType::kBF16 ? kBf16Scalar : dtype == DType::kF16 ? kFp16Scalar : kF32Scalar;
}

uint32_t FlatGrid(const LaunchStream& stream, int64_t accesses) {
  const int64_t most = stream.multiprocessors() * kBlocksPerMultiprocessor;
  return static_cast<uint32_t>(
      std::clamp<int64_t>(DivCeil(accesses, int64_t{kFlatThreads}), 1, most));
}

std::array<uint32_t, 3> RowGrid(const LaunchStream& stream, int64_t rows, int64_t accesses) {
  const uint32_t along = FlatGrid(stream, accesses);
  const int64_t most = stream.multiprocessors() * kBlocksPerMultiprocessor;
  const int64_t down = std::clamp<int64_t>(most / along, 1, std::min(rows, kMaxGridY));
  return {along, static_cast<uint32_t>(down), 1};
}

uint32_t BlockPerRow(const LaunchStream& stream, int64_t rows) {
  return static_cast<uint32_t>(
      std::min<int64_t>(rows, stream.multiprocessors() * kBlocksPerMultiprocessor));
}

uint32_t RowThreads(int64_t accesses, int64_t each, int64_t limit) {
  const int64_t threads = RoundUp(DivCeil(accesses, each), int64_t{kWarpThreads});
  return static_cast<uint32_t>(std::clamp<int64_t>(threads, kWarpThreads, limit));
}

void ZeroMatrix(LaunchStream& stream, const TensorView& matrix) {
  const int64_t bytes = DTypeBytes(matrix.dtype);
  if (matrix.elements() == 0) {
    return;
  }
  if (matrix.contiguous()) {
    stream.FillZero(matrix.data, matrix.elements() * bytes);
    return;
  }
  CHECK_MSG(bytes == 2 || bytes == 4, "elements of two or four bytes");
  stream.Run({.kernel = Kernel::kFill,
              .variant = bytes == 4 ? kF32Scalar : kBf16Scalar,
              .grid = RowGrid(stream, matrix.rows(), matrix.columns())},
             FillParams{.to = matrix.data,
                        .stride = matrix.row_stride,
                        .rows = matrix.rows(),
                        .columns = matrix.columns()});
}

}  // namespace ravel::kernels::cuda
