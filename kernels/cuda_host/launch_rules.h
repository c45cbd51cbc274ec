#pragma once

// How the host half of the CUDA ops looks at views and cuts work into blocks.

#include <initializer_list>

#include "common/tensor_view.h"
#include "kernels/cuda_host/launch_stream.h"

namespace ravel::kernels::cuda {

LaunchStream& LaunchStreamOf(Stream& stream);

// As in kernels/dispatch.cc, for any element type.
void RequireMatrix(const TensorView& view, int64_t rows, int64_t columns, DType dtype);
void RequireFlat(const TensorView& view, int64_t elements, DType dtype);
// fp32, bf16 or fp16; the second refuses fp16, which has no gradients of weights and no states.
void RequireFloat(const TensorView& view);
void RequireGradient(const TensorView& view);
// bf16 or fp16.
bool IsNarrow(DType dtype);

// Returns true if every view and each of its rows begins at 16 bytes, and rows are whole accesses
// of 16 bytes. Absent views do not matter, nor do strides of a single row.
bool FitsVectors(std::initializer_list<TensorView> views);
// The first view's type decides; accesses have 16 bytes where all views fit.
Variant VariantFor(std::initializer_list<TensorView> views);
// The same where fp32 is written, of a narrow type.
Variant MixedVariantFor(std::initializer_list<TensorView> views);
// Elements of one access.
int64_t WidthOf(Variant variant);
Variant ScalarVariantOf(DType dtype);

// Blocks of kFlatThreads for so many accesses; a kernel's loop covers what is beyond them.
uint32_t FlatGrid(const LaunchStream& stream, int64_t accesses);
// Accesses of a row along x, rows along y.
std::array<uint32_t, 3> RowGrid(const LaunchStream& stream, int64_t rows, int64_t accesses);
// Blocks for one row each.
uint32_t BlockPerRow(const LaunchStream& stream, int64_t rows);
// Whole warps for so many accesses of one row, `each` of them per thread.
uint32_t RowThreads(int64_t accesses, int64_t each, int64_t limit);

// matrix = 0, whatever its rows' stride.
void ZeroMatrix(LaunchStream& stream, const TensorView& matrix);

}  // namespace ravel::kernels::cuda
