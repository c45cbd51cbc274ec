// Norms. Gradients of weights come as partial sums, row r in partial r modulo their count, as the
// device's blocks leave them.

#include <algorithm>

#include "kernels/cpu/simd_ops.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

PlannedLaunch PlanRmsNormForward(const KernelLaunch& launch, const RmsNormForwardParams& p) {
  Operands operands(launch);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand residual =
      operands.Read("residual", p.residual, {p.rows, p.columns, p.residual_stride});
  const Operand w = operands.Read("w", p.w, {1, p.columns, p.columns});
  const Operand sum = operands.Write("sum", p.sum, {p.rows, p.columns, p.sum_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  const Operand rstd = operands.WriteFloats("rstd", p.rstd, p.rows);
  operands.Require(p.residual == nullptr || p.sum != nullptr,
                   "a residual needs a place for the sum");
  const float epsilon = p.epsilon;
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().rms_norm_forward({.x = on.View(x),
                                       .residual = on.View(residual),
                                       .w = on.View(w),
                                       .epsilon = epsilon,
                                       .sum = on.View(sum),
                                       .y = on.View(y),
                                       .rstd = on.View(rstd)});
  });
}

TensorView RowOf(const TensorView& view, int64_t row, int64_t column, int64_t columns) {
  return view.present() ? MatrixView(view.Row<float>(row) + column, 1, columns) : TensorView();
}

TensorView RowOf(const TensorView& view, int64_t row) {
  return RowOf(view, row, 0, view.columns());
}

// Which of the partial sums a row adds to, and whether it is the first to do so.
struct PartialRow {
  TensorView sums;
  Output output;
};

PartialRow PartialOf(const TensorView& partials, int64_t row) {
  const int64_t count = partials.rows();
  return {VectorView(partials.Row<float>(row % count), partials.columns()),
          row < count ? Output::kOverwrite : Output::kAccumulate};
}

PlannedLaunch PlanRmsNormBackward(const KernelLaunch& launch, const RmsNormBackwardParams& p) {
  Operands operands(launch);
  const int64_t partial_rows = launch.grid[0];
  operands.Require(partial_rows <= p.rows, "more partial sums than rows");
  const Operand dy = operands.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  const Operand sum = operands.Read("sum", p.sum, {p.rows, p.columns, p.sum_stride});
  const Operand w = operands.Read("w", p.w, {1, p.columns, p.columns});
  const Operand rstd = operands.ReadFloats("rstd", p.rstd, p.rows);
  const Operand dresidual =
      operands.Read("dresidual", p.dresidual, {p.rows, p.columns, p.dresidual_stride});
  const Operand dx = operands.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  const Operand partials = operands.Add(Access::Kind::kWrite,
                                        "partials",
                                        p.partials,
                                        {partial_rows, p.columns, p.columns},
                                        DType::kF32);
  return operands.Plan([=](Staging& on) {
    const TensorView dys = on.View(dy), sums = on.View(sum), ws = on.View(w), dxs = on.View(dx);
    const TensorView rstds = on.View(rstd), dresiduals = on.View(dresidual);
    const TensorView all = on.View(partials);
    for (int64_t row = 0; row < dys.rows(); ++row) {
      const PartialRow partial = PartialOf(all, row);
      cpu::ActiveOps().rms_norm_backward({.dy = RowOf(dys, row),
                                          .sum = RowOf(sums, row),
                                          .w = ws,
                                          .rstd = VectorView(rstds.As<float>() + row, 1),
                                          .dresidual = RowOf(dresiduals, row),
                                          .dx = RowOf(dxs, row),
                                          .dw = partial.sums,
                                          .dw_output = partial.output});
    }
  });
}

PlannedLaunch PlanSumPartials(const KernelLaunch& launch, const SumPartialsParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand partials = operands.ReadFloats("partials", p.partials, p.partial_rows * p.columns);
  const bool accumulate = p.accumulate != 0;
  const Operand out = operands.Add(accumulate ? Access::Kind::kUpdate : Access::Kind::kWrite,
                                   "out",
                                   p.out,
                                   {1, p.columns, p.columns},
                                   OutputType(launch.variant));
  const int64_t rows = p.partial_rows;
  return operands.Plan([=](Staging& on) {
    const float* from = on.View(partials).As<float>();
    float* to = on.View(out).As<float>();
    for (int64_t j = 0; j < out.columns; ++j) {
      float sum = accumulate ? to[j] : 0.0f;
      for (int64_t row = 0; row < rows; ++row) {
        sum += from[row * out.columns + j];
      }
      to[j] = sum;
    }
  });
}

PlannedLaunch PlanHeadNormForward(const KernelLaunch& launch, const HeadNormParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kHeadNormWarps * kWarpThreads);
  const int64_t columns = p.heads * p.head_size;
  const Operand x = operands.Read("x", p.x, {p.rows, columns, p.x_stride});
  const Operand w = operands.Read("w", p.w, {1, p.head_size, p.head_size});
  const Operand y = operands.Write("y", p.y, {p.rows, columns, p.y_stride});
  const float epsilon = p.epsilon;
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().head_norm_forward(
        {.x = on.View(x), .w = on.View(w), .epsilon = epsilon, .y = on.View(y)});
  });
}

PlannedLaunch PlanHeadNormBackward(const KernelLaunch& launch, const HeadNormParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kHeadNormWarps * kWarpThreads);
  const int64_t columns = p.heads * p.head_size;
  const int64_t warps = launch.grid[0] * int64_t{kHeadNormWarps};
  const Operand x = operands.Read("x", p.x, {p.rows, columns, p.x_stride});
  const Operand w = operands.Read("w", p.w, {1, p.head_size, p.head_size});
  const Operand dy = operands.Read("dy", p.dy, {p.rows, columns, p.dy_stride});
  const Operand dx = operands.Write("dx", p.dx, {p.rows, columns, p.dx_stride});
  const Operand partials = operands.Add(
      Access::Kind::kWrite, "partials", p.partials, {warps, p.head_size, p.head_size}, DType::kF32);
  const int64_t heads = p.heads;
  const float epsilon = p.epsilon;
  return operands.Plan([=](Staging& on) {
    const TensorView xs = on.View(x), ws = on.View(w), dys = on.View(dy), dxs = on.View(dx);
    const TensorView all = on.View(partials);
    const int64_t size = ws.columns();
    for (int64_t warp = 0; warp < warps; ++warp) {  // those without a head leave zeros
      std::fill_n(all.Row<float>(warp), size, 0.0f);
    }
    for (int64_t i = 0; i < xs.rows() * heads; ++i) {
      const int64_t row = i / heads;
      const int64_t column = i % heads * size;
      cpu::ActiveOps().head_norm_backward({.dy = RowOf(dys, row, column, size),
                                           .x = RowOf(xs, row, column, size),
                                           .w = ws,
                                           .epsilon = epsilon,
                                           .dx = RowOf(dxs, row, column, size),
                                           .dw = VectorView(all.Row<float>(i % warps), size),
                                           .dw_output = Output::kAccumulate});
    }
  });
}

PlannedLaunch PlanLayerNormForward(const KernelLaunch& launch, const LayerNormForwardParams& p) {
  Operands operands(launch);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand w = operands.Read("w", p.w, {1, p.columns, p.columns});
  const Operand b = operands.Read("b", p.b, {1, p.columns, p.columns});
  const Operand copy = operands.Write("copy", p.copy, {p.rows, p.columns, p.copy_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  const Operand mean = operands.WriteFloats("mean", p.mean, p.rows);
  const Operand rstd = operands.WriteFloats("rstd", p.rstd, p.rows);
  const float epsilon = p.epsilon;
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().layer_norm_forward({.x = on.View(x),
                                         .w = on.View(w),
                                         .b = on.View(b),
                                         .epsilon = epsilon,
                                         .copy = on.View(copy),
                                         .y = on.View(y),
                                         .mean = on.View(mean),
                                         .rstd = on.View(rstd)});
  });
}

PlannedLaunch PlanLayerNormBackward(const KernelLaunch& launch, const LayerNormBackwardParams& p) {
  Operands operands(launch);
  const int64_t partial_rows = launch.grid[0];
  operands.Require(partial_rows <= p.rows, "more partial sums than rows");
  const Shape partial_shape = {partial_rows, p.columns, p.columns};
  const Operand dy = operands.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand w = operands.Read("w", p.w, {1, p.columns, p.columns});
  const Operand mean = operands.ReadFloats("mean", p.mean, p.rows);
  const Operand rstd = operands.ReadFloats("rstd", p.rstd, p.rows);
  const Operand dresidual =
      operands.Read("dresidual", p.dresidual, {p.rows, p.columns, p.dresidual_stride});
  const Operand dx = operands.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  const Operand dw =
      operands.Add(Access::Kind::kWrite, "dw_partials", p.dw_partials, partial_shape, DType::kF32);
  const Operand db =
      operands.Add(Access::Kind::kWrite, "db_partials", p.db_partials, partial_shape, DType::kF32);
  return operands.Plan([=](Staging& on) {
    const TensorView dys = on.View(dy), xs = on.View(x), ws = on.View(w), dxs = on.View(dx);
    const TensorView means = on.View(mean), rstds = on.View(rstd);
    const TensorView dresiduals = on.View(dresidual), dws = on.View(dw), dbs = on.View(db);
    for (int64_t row = 0; row < dys.rows(); ++row) {
      const PartialRow partial = PartialOf(dws, row);
      cpu::ActiveOps().layer_norm_backward({.dy = RowOf(dys, row),
                                            .x = RowOf(xs, row),
                                            .w = ws,
                                            .mean = VectorView(means.As<float>() + row, 1),
                                            .rstd = VectorView(rstds.As<float>() + row, 1),
                                            .dresidual = RowOf(dresiduals, row),
                                            .dx = RowOf(dxs, row),
                                            .dw = partial.sums,
                                            .db = PartialOf(dbs, row).sums,
                                            .output = partial.output});
    }
  });
}

}  // namespace

std::vector<EmulatedKernel> NormKernels() {
  const std::vector<int32_t> typed = {kF32Scalar, kF32Vector, kBf16Scalar, kBf16Vector};
  const std::vector<int32_t> scalars = {kF32Scalar, kBf16Scalar};
  std::vector<EmulatedKernel> all;
  AddKernel<RmsNormForwardParams, PlanRmsNormForward>(
      Kernel::kRmsNormForward, "RmsNormForward", typed, all);
  AddKernel<RmsNormBackwardParams, PlanRmsNormBackward>(
      Kernel::kRmsNormBackward, "RmsNormBackward", typed, all);
  AddKernel<SumPartialsParams, PlanSumPartials>(Kernel::kSumPartials, "SumPartials", scalars, all);
  AddKernel<HeadNormParams, PlanHeadNormForward>(
      Kernel::kHeadNormForward, "HeadNormForward", scalars, all);
  AddKernel<HeadNormParams, PlanHeadNormBackward>(
      Kernel::kHeadNormBackward, "HeadNormBackward", scalars, all);
  AddKernel<LayerNormForwardParams, PlanLayerNormForward>(
      Kernel::kLayerNormForward, "LayerNormForward", typed, all);
  AddKernel<LayerNormBackwardParams, PlanLayerNormBackward>(
      Kernel::kLayerNormBackward, "LayerNormBackward", typed, all);
  return all;
}

}  // namespace ravel::kernels::cuda::emulated
