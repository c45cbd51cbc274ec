// Host half of norms, and of gradients that are sums over rows. A backward pass writes one partial
// sum per block to scratch, and a second kernel adds the partials in order: dw = sum over blocks of
// sum over rows. The number of blocks depends on the shape alone, never on the device, so the bits
// are those of every device; no atomics are used.

#include <algorithm>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  const int64_t columns = args.x.size[1];
  RequireFloat(args.x);
  RequireMatrix(args.x, rows, columns, args.x.dtype);
  RequireMatrix(args.y, rows, columns, args.x.dtype);
  RequireFlat(args.w, columns, args.x.dtype);
  RequireFlat(args.rstd, rows, DType::kF32);
  if (args.residual.present()) {
    RequireMatrix(args.residual, rows, columns, args.x.dtype);
    CHECK_MSG(args.sum.present(), "a residual needs a place for the sum");
  }
  if (args.sum.present()) {
    RequireMatrix(args.sum, rows, columns, args.x.dtype);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.x, args.residual, args.w, args.sum, args.y});
  on.Run({.kernel = Kernel::kRmsNormForward,
          .variant = variant,
          .grid = {BlockPerRow(on, rows), 1, 1},
          .block = RowThreads(columns / WidthOf(variant), kNormVectors, kNormMaxThreads)},
         RmsNormForwardParams{.x = args.x.data,
                              .residual = args.residual.data,
                              .w = args.w.data,
                              .sum = args.sum.data,
                              .y = args.y.data,
                              .rstd = args.rstd.As<float>(),
                              .x_stride = args.x.row_stride,
                              .residual_stride = args.residual.row_stride,
                              .sum_stride = args.sum.row_stride,
                              .y_stride = args.y.row_stride,
                              .rows = rows,
                              .columns = columns,
                              .epsilon = args.epsilon});
}

namespace {

constexpr int64_t kBiasPartials = 128;

float* PartialsOf(LaunchStream& on, int64_t rows, int64_t columns) {
  return static_cast<float*>(on.Scratch(rows * columns * static_cast<int64_t>(sizeof(float))));
}

// `out` (=|+=) the column sums of `partials` [partial_rows, columns].
void SumPartials(LaunchStream& on,
                 const float* partials,
                 int64_t partial_rows,
                 const TensorView& out,
                 Output output) {
  on.Run({.kernel = Kernel::kSumPartials,
          .variant = ScalarVariantOf(out.dtype),
          .grid = {FlatGrid(on, out.elements()), 1, 1}},
         SumPartialsParams{.partials = partials,
                           .out = out.data,
                           .partial_rows = partial_rows,
                           .columns = out.elements(),
                           .accumulate = output == Output::kAccumulate ? 1 : 0});
}

// The column sum of a matrix without rows.
void SumNoRows(LaunchStream& on, const TensorView& out, Output output) {
  if (out.present() && output == Output::kOverwrite && out.elements() > 0) {
    on.FillZero(out.data, out.elements() * DTypeBytes(out.dtype));
  }
}

void RequireWeightGradient(const TensorView& dw, int64_t columns) {
  if (dw.present()) {
    RequireGradient(dw);
    RequireFlat(dw, columns, dw.dtype);
  }
}

}  // namespace

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.dy.size[0];
  const int64_t columns = args.dy.size[1];
  RequireFloat(args.dy);
  for (const TensorView& view : {args.dy, args.sum, args.dx}) {
    RequireMatrix(view, rows, columns, args.dy.dtype);
  }
  RequireFlat(args.w, columns, args.dy.dtype);
  RequireFlat(args.rstd, rows, DType::kF32);
  RequireWeightGradient(args.dw, columns);
  if (args.dresidual.present()) {
    RequireMatrix(args.dresidual, rows, columns, args.dy.dtype);
  }
  if (rows == 0 || columns == 0) {
    SumNoRows(on, args.dw, args.dw_output);
    return;
  }
  const int64_t partial_rows = std::min<int64_t>(rows, kNormPartials);
  float* partials = PartialsOf(on, partial_rows, columns);
  const Variant variant = VariantFor({args.dy, args.sum, args.w, args.dresidual, args.dx});
  on.Run({.kernel = Kernel::kRmsNormBackward,
          .variant = variant,
          .grid = {static_cast<uint32_t>(partial_rows), 1, 1},
          .block = RowThreads(columns / WidthOf(variant), kNormVectors / 2, kNormMaxThreads)},
         RmsNormBackwardParams{.dy = args.dy.data,
                               .sum = args.sum.data,
                               .w = args.w.data,
                               .rstd = args.rstd.As<float>(),
                               .dresidual = args.dresidual.data,
                               .dx = args.dx.data,
                               .partials = partials,
                               .dy_stride = args.dy.row_stride,
                               .sum_stride = args.sum.row_stride,
                               .dresidual_stride = args.dresidual.row_stride,
                               .dx_stride = args.dx.row_stride,
                               .rows = rows,
                               .columns = columns});
  if (args.dw.present()) {
    SumPartials(on, partials, partial_rows, args.dw, args.dw_output);
  }
}

namespace {

// Heads per token of a matrix of heads side by side.
int64_t HeadsOf(const TensorView& x, const TensorView& w) {
  RequireFloat(x);
  RequireFlat(w, w.elements(), x.dtype);
  CHECK_MSG(w.elements() > 0 && x.size[1] % w.elements() == 0, "columns are whole heads");
  CHECK_MSG(w.elements() <= kAttentionMaxHead, "heads of at most 256");
  return x.size[1] / w.elements();
}

}  // namespace

void HeadNormForward(Stream& stream, const HeadNormForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  RequireMatrix(args.x, rows, args.x.size[1], args.x.dtype);
  RequireMatrix(args.y, rows, args.x.size[1], args.x.dtype);
  HeadNormParams params = {};
  params.heads = HeadsOf(args.x, args.w);
  if (args.x.elements() == 0) {
    return;
  }
  params.x = args.x.data;
  params.w = args.w.data;
  params.y = args.y.data;
  params.x_stride = args.x.row_stride;
  params.y_stride = args.y.row_stride;
  params.rows = rows;
  params.head_size = args.w.elements();
  params.epsilon = args.epsilon;
  const int64_t blocks = DivCeil(rows * params.heads, int64_t{kHeadNormWarps});
  on.Run({.kernel = Kernel::kHeadNormForward,
          .variant = ScalarVariantOf(args.x.dtype),
          .grid = {BlockPerRow(on, blocks), 1, 1},
          .block = kHeadNormWarps * kWarpThreads},
         params);
}

void HeadNormBackward(Stream& stream, const HeadNormBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  for (const TensorView& view : {args.x, args.dy, args.dx}) {
    RequireMatrix(view, rows, args.x.size[1], args.x.dtype);
  }
  RequireWeightGradient(args.dw, args.w.elements());
  HeadNormParams params = {};
  params.heads = HeadsOf(args.x, args.w);
  if (args.x.elements() == 0) {
    SumNoRows(on, args.dw, args.dw_output);
    return;
  }
  // Blocks that the shape alone decides: their partial sums are added in order.
  const int64_t blocks =
      std::min<int64_t>(DivCeil(rows * params.heads, int64_t{kHeadNormWarps}), kNormPartials);
  const int64_t partial_rows = blocks * kHeadNormWarps;
  params.x = args.x.data;
  params.w = args.w.data;
  params.dy = args.dy.data;
  params.dx = args.dx.data;
  params.partials = PartialsOf(on, partial_rows, args.w.elements());
  params.x_stride = args.x.row_stride;
  params.dy_stride = args.dy.row_stride;
  params.dx_stride = args.dx.row_stride;
  params.rows = rows;
  params.head_size = args.w.elements();
  params.epsilon = args.epsilon;
  on.Run({.kernel = Kernel::kHeadNormBackward,
          .variant = ScalarVariantOf(args.x.dtype),
          .grid = {static_cast<uint32_t>(blocks), 1, 1},
          .block = kHeadNormWarps * kWarpThreads},
         params);
  if (args.dw.present()) {
    SumPartials(on, params.partials, partial_rows, args.dw, args.dw_output);
  }
}

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.x.size[0];
  const int64_t columns = args.x.size[1];
  RequireFloat(args.x);
  RequireMatrix(args.x, rows, columns, args.x.dtype);
  RequireMatrix(args.y, rows, columns, args.x.dtype);
  RequireFlat(args.w, columns, args.x.dtype);
  RequireFlat(args.b, columns, args.x.dtype);
  RequireFlat(args.mean, rows, DType::kF32);
  RequireFlat(args.rstd, rows, DType::kF32);
  if (args.copy.present()) {
    RequireMatrix(args.copy, rows, columns, args.x.dtype);
  }
  if (rows == 0 || columns == 0) {
    return;
  }
  const Variant variant = VariantFor({args.x, args.w, args.b, args.copy, args.y});
  on.Run({.kernel = Kernel::kLayerNormForward,
          .variant = variant,
          .grid = {BlockPerRow(on, rows), 1, 1},
          .block = RowThreads(columns / WidthOf(variant), kNormVectors, kNormMaxThreads)},
         LayerNormForwardParams{.x = args.x.data,
                                .w = args.w.data,
                                .b = args.b.data,
                                .copy = args.copy.data,
                                .y = args.y.data,
                                .mean = args.mean.As<float>(),
                                .rstd = args.rstd.As<float>(),
                                .x_stride = args.x.row_stride,
                                .copy_stride = args.copy.row_stride,
                                .y_stride = args.y.row_stride,
                                .rows = rows,
                                .columns = columns,
                                .epsilon = args.epsilon});
}

namespace {

void RequireLayerNormBackward(const LayerNormBackwardArgs& args) {
  const int64_t rows = args.dy.size[0];
  const int64_t columns = args.dy.size[1];
  RequireFloat(args.dy);
  for (const TensorView& view : {args.dy, args.x, args.dx}) {
    RequireMatrix(view, rows, columns, args.dy.dtype);
  }
  RequireFlat(args.w, columns, args.dy.dtype);
  RequireFlat(args.mean, rows, DType::kF32);
  RequireFlat(args.rstd, rows, DType::kF32);
  RequireWeightGradient(args.dw, columns);
  RequireWeightGradient(args.db, columns);
  if (args.dresidual.present()) {
    RequireMatrix(args.dresidual, rows, columns, args.dy.dtype);
  }
}

}  // namespace

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.dy.size[0];
  const int64_t columns = args.dy.size[1];
  RequireLayerNormBackward(args);
  if (rows == 0 || columns == 0) {
    SumNoRows(on, args.dw, args.output);
    SumNoRows(on, args.db, args.output);
    return;
  }
  const int64_t partial_rows = std::min<int64_t>(rows, kNormPartials);
  float* partials = PartialsOf(on, 2 * partial_rows, columns);
  const Variant variant = VariantFor({args.dy, args.x, args.w, args.dresidual, args.dx});
  on.Run({.kernel = Kernel::kLayerNormBackward,
          .variant = variant,
          .grid = {static_cast<uint32_t>(partial_rows), 1, 1},
          .block = RowThreads(columns / WidthOf(variant), kNormVectors / 2, kNormMaxThreads)},
         LayerNormBackwardParams{.dy = args.dy.data,
                                 .x = args.x.data,
                                 .w = args.w.data,
                                 .mean = args.mean.As<float>(),
                                 .rstd = args.rstd.As<float>(),
                                 .dresidual = args.dresidual.data,
                                 .dx = args.dx.data,
                                 .dw_partials = partials,
                                 .db_partials = partials + partial_rows * columns,
                                 .dy_stride = args.dy.row_stride,
                                 .x_stride = args.x.row_stride,
                                 .dresidual_stride = args.dresidual.row_stride,
                                 .dx_stride = args.dx.row_stride,
                                 .rows = rows,
                                 .columns = columns});
  if (args.dw.present()) {
    SumPartials(on, partials, partial_rows, args.dw, args.output);
  }
  if (args.db.present()) {
    SumPartials(on, partials + partial_rows * columns, partial_rows, args.db, args.output);
  }
}

void BiasGradient(Stream& stream, const BiasGradientArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.dy.size[0];
  const int64_t columns = args.dy.size[1];
  RequireFloat(args.dy);
  RequireMatrix(args.dy, rows, columns, args.dy.dtype);
  RequireWeightGradient(args.db, columns);
  if (rows == 0 || columns == 0) {
    SumNoRows(on, args.db, args.output);
    return;
  }
  const int64_t partial_rows = std::min<int64_t>(rows, kBiasPartials);
  float* partials = PartialsOf(on, partial_rows, columns);
  const Variant variant = VariantFor({args.dy});
  const int64_t blocks = DivCeil(columns / WidthOf(variant), int64_t{kFlatThreads});
  on.Run({.kernel = Kernel::kBiasGradient,
          .variant = variant,
          .grid = {static_cast<uint32_t>(blocks), static_cast<uint32_t>(partial_rows), 1}},
         BiasGradientParams{.dy = args.dy.data,
                            .partials = partials,
                            .dy_stride = args.dy.row_stride,
                            .rows = rows,
                            .columns = columns});
  SumPartials(on, partials, partial_rows, args.db, args.output);
}

}  // namespace ravel::kernels::cuda
