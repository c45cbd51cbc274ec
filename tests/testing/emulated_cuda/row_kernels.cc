// Activations, rotary embedding, embedding, bias, cross-entropy: kernels over rows.

#include <algorithm>

#include "common/check.h"
#include "kernels/cpu/reference_ops.h"
#include "kernels/cpu/simd_ops.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;

int64_t WidthOf(int32_t variant) {
  constexpr int64_t kVectorBytes = 16;
  return HasVectors(variant) ? kVectorBytes / DTypeBytes(InputType(variant)) : 1;
}

// A range of int32 that is read: `count` of them.
TensorView IdsOf(const int32_t* ids, int64_t count) {
  return {.data = const_cast<int32_t*>(ids),
          .dtype = DType::kI32,
          .rank = 1,
          .size = {count},
          .row_stride = 1};
}

void TouchIds(Operands& operands, const char* name, const int32_t* ids, int64_t count) {
  operands.Touch(kRead, name, ids, count * int64_t{sizeof(int32_t)});
}

PlannedLaunch PlanSwiGluForward(const KernelLaunch& launch, const SwiGluForwardParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand gate = operands.Read("gate", p.gate, {p.rows, p.columns, p.gate_stride});
  const Operand up = operands.Read("up", p.up, {p.rows, p.columns, p.up_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().swi_glu_forward({.gate = on.View(gate), .up = on.View(up), .y = on.View(y)});
  });
}

PlannedLaunch PlanSwiGluBackward(const KernelLaunch& launch, const SwiGluBackwardParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand gate = operands.Read("gate", p.gate, {p.rows, p.columns, p.gate_stride});
  const Operand up = operands.Read("up", p.up, {p.rows, p.columns, p.up_stride});
  const Operand dy = operands.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  const Operand dgate = operands.Write("dgate", p.dgate, {p.rows, p.columns, p.dgate_stride});
  const Operand dup = operands.Write("dup", p.dup, {p.rows, p.columns, p.dup_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().swi_glu_backward({.gate = on.View(gate),
                                       .up = on.View(up),
                                       .dy = on.View(dy),
                                       .dgate = on.View(dgate),
                                       .dup = on.View(dup),
                                       .y = on.View(y)});
  });
}

PlannedLaunch PlanGeluForward(const KernelLaunch& launch, const GeluParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  return operands.Plan(
      [=](Staging& on) { cpu::ActiveOps().gelu_forward({.x = on.View(x), .y = on.View(y)}); });
}

PlannedLaunch PlanGeluBackward(const KernelLaunch& launch, const GeluParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand dy = operands.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  const Operand dx = operands.Write("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  const Operand y = operands.Write("y", p.y, {p.rows, p.columns, p.y_stride});
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().gelu_backward(
        {.x = on.View(x), .dy = on.View(dy), .dx = on.View(dx), .y = on.View(y)});
  });
}

PlannedLaunch PlanAddInPlace(const KernelLaunch& launch, const AddInPlaceParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand x = operands.Read("x", p.x, {p.rows, p.columns, p.x_stride});
  const Operand y = operands.Update("y", p.y, {p.rows, p.columns, p.y_stride});
  return operands.Plan(
      [=](Staging& on) { cpu::ActiveOps().add_in_place({.x = on.View(x), .y = on.View(y)}); });
}

PlannedLaunch PlanAddBias(const KernelLaunch& launch, const AddRowsParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(p.period == 1, "a bias is a table of one row");
  const Operand bias = operands.Read("bias", p.table, {1, p.columns, p.columns});
  const Shape shape = {p.rows, p.columns, p.x_stride};
  const bool accumulate = p.accumulate != 0;
  const Operand y = accumulate ? operands.Update("y", p.x, shape) : operands.Write("y", p.x, shape);
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().add_bias({.bias = on.View(bias),
                               .y = on.View(y),
                               .output = accumulate ? Output::kAccumulate : Output::kOverwrite});
  });
}

PlannedLaunch PlanAddPositions(const KernelLaunch& launch, const AddRowsParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(p.accumulate == 1 && p.period > 0, "positions are added");
  const Operand table = operands.Read("table", p.table, {p.period, p.columns, p.table_stride});
  const Operand x = operands.Update("x", p.x, {p.rows, p.columns, p.x_stride});
  const int64_t period = p.period;
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().add_positions(
        {.x = on.View(x), .table = on.View(table), .sequence_tokens = period});
  });
}

PlannedLaunch PlanBiasGradient(const KernelLaunch& launch, const BiasGradientParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, DivCeil(p.columns / WidthOf(launch.variant), int64_t{kFlatThreads}));
  const int64_t partials = launch.grid[1];
  const Operand dy = operands.Read("dy", p.dy, {p.rows, p.columns, p.dy_stride});
  const Operand sums = operands.WriteFloats("partials", p.partials, partials * p.columns);
  return operands.Plan([=](Staging& on) {
    const TensorView all = on.View(dy);
    float* to = on.View(sums).As<float>();
    for (int64_t partial = 0; partial < partials; ++partial) {
      TensorView rows = all;  // partial, partial + partials, ...
      rows.data = all.Row<float>(partial);
      rows.size[0] = std::max<int64_t>(0, DivCeil(dy.rows - partial, partials));
      rows.row_stride = all.row_stride * partials;
      cpu::ActiveOps().bias_gradient(
          {.dy = rows, .db = VectorView(to + partial * dy.columns, dy.columns)});
    }
  });
}

PlannedLaunch PlanPositionGradient(const KernelLaunch& launch, const PositionGradientParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(p.period > 0, "a sequence has tokens");
  const int64_t positions = std::min(p.period, p.rows);
  const Operand dx = operands.Read("dx", p.dx, {p.rows, p.columns, p.dx_stride});
  const Operand dtable = operands.Add(kUpdate,
                                      "dtable",
                                      p.dtable,
                                      {positions, p.columns, p.dtable_stride},
                                      OutputType(launch.variant));
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().position_gradient({.dx = on.View(dx),
                                        .dtable = on.View(dtable),
                                        .sequence_tokens = positions,
                                        .output = Output::kAccumulate});
  });
}

PlannedLaunch PlanRope(const KernelLaunch& launch, const RopeParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.Require(p.sequence_tokens > 0, "a sequence has tokens");
  operands.Require(p.half % WidthOf(launch.variant) == 0, "a half of a head is no whole vector");
  const int64_t positions = std::min(p.sequence_tokens, p.rows);
  const Operand x = operands.Update("x", p.x, {p.rows, p.heads * 2 * p.half, p.x_stride});
  const Operand cosine =
      operands.Add(kRead, "cosine", p.cosine, {positions, p.half, p.cosine_stride}, DType::kF32);
  const Operand sine =
      operands.Add(kRead, "sine", p.sine, {positions, p.half, p.sine_stride}, DType::kF32);
  return operands.Plan([=](Staging& on) {
    cpu::ActiveOps().rope(
        {.x = on.View(x),
         .head_size = 2 * p.half,
         .sequence_tokens = p.sequence_tokens,
         .cosine = on.View(cosine),
         .sine = on.View(sine),
         .direction = p.sign > 0.0f ? RopeDirection::kForward : RopeDirection::kBackward});
  });
}

PlannedLaunch PlanRopeTable(const KernelLaunch& launch, const RopeTableParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  const Operand frequency = operands.ReadFloats("inverse_frequency", p.inverse_frequency, p.half);
  const Operand cosine =
      operands.Add(kWrite, "cosine", p.cosine, {p.positions, p.half, p.cosine_stride}, DType::kF32);
  const Operand sine =
      operands.Add(kWrite, "sine", p.sine, {p.positions, p.half, p.sine_stride}, DType::kF32);
  return operands.Plan([=](Staging& on) {
    cpu::BuildRopeTable({.inverse_frequency = on.View(frequency),
                         .cosine = on.View(cosine),
                         .sine = on.View(sine)});
  });
}

// Rows are copied as they are, whatever their type.
PlannedLaunch PlanEmbeddingForward(const KernelLaunch& launch, const EmbeddingForwardParams& p) {
  Operands operands(launch);
  operands.Read("table", p.table, {p.vocabulary, p.hidden, p.table_stride});
  operands.Write("out", p.out, {p.tokens, p.hidden, p.out_stride});
  TouchIds(operands, "ids", p.ids, p.tokens);
  const int64_t bytes = DTypeBytes(InputType(launch.variant));
  return operands.Plan([=](Staging&) {
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t id = p.ids[token];
      CHECK_MSG(id >= 0 && id < p.vocabulary, "id outside the vocabulary");
      std::memcpy(static_cast<char*>(p.out) + token * p.out_stride * bytes,
                  static_cast<const char*>(p.table) + id * p.table_stride * bytes,
                  static_cast<size_t>(p.hidden * bytes));
    }
  });
}

PlannedLaunch PlanEmbeddingBackward(const KernelLaunch& launch, const EmbeddingBackwardParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, p.tokens);
  operands.RequireGrid(1, DivCeil(p.hidden / WidthOf(launch.variant), int64_t{kFlatThreads}));
  const Operand dout = operands.Read("dout", p.dout, {p.tokens, p.hidden, p.dout_stride});
  const Operand dtable = operands.Add(kUpdate,
                                      "dtable",
                                      p.dtable,
                                      {p.vocabulary, p.hidden, p.dtable_stride},
                                      OutputType(launch.variant));
  TouchIds(operands, "ids", p.ids, p.tokens);
  return operands.Plan([=](Staging& on) {
    for (int64_t token = 0; token < p.tokens; ++token) {
      CHECK_MSG(p.ids[token] >= 0 && p.ids[token] < p.vocabulary, "id outside the vocabulary");
    }
    cpu::ActiveOps().embedding_backward({.ids = IdsOf(p.ids, p.tokens),
                                         .dout = on.View(dout),
                                         .dtable = on.View(dtable),
                                         .output = Output::kAccumulate});
  });
}

template <bool kGradient>
PlannedLaunch PlanCrossEntropy(const KernelLaunch& launch, const CrossEntropyParams& p) {
  Operands operands(launch);
  const Shape shape = {p.tokens, p.vocabulary, p.logits_stride};
  const Operand logits = kGradient ? operands.Update("logits", p.logits, shape)
                                   : operands.Read("logits", p.logits, shape);
  const Operand loss = operands.WriteFloats("loss", p.loss, p.tokens);
  TouchIds(operands, "targets", p.targets, p.tokens);
  return operands.Plan([=](Staging& on) {
    const TensorView rows = on.View(logits);
    for (int64_t token = 0; token < p.tokens; ++token) {
      CHECK_MSG(p.targets[token] < p.vocabulary, "a target is outside the vocabulary");
      const cpu::CrossEntropyRowsArgs row = {.logits = rows.Row<float>(token),
                                             .tokens = 1,
                                             .vocabulary = p.vocabulary,
                                             .targets = p.targets + token,
                                             .loss = static_cast<float*>(loss.data) + token};
      if (kGradient) {
        cpu::ActiveOps().cross_entropy_gradient(row);
      } else {
        cpu::ActiveOps().cross_entropy_loss(row);
      }
    }
  });
}

}  // namespace

std::vector<EmulatedKernel> RowKernels() {
  const std::vector<int32_t> typed = {kF32Scalar, kF32Vector, kBf16Scalar, kBf16Vector};
  const std::vector<int32_t> with_mixed = {
      kF32Scalar, kF32Vector, kBf16Scalar, kBf16Vector, kMixedScalar, kMixedVector};
  std::vector<EmulatedKernel> all;
  AddKernel<SwiGluForwardParams, PlanSwiGluForward>(
      Kernel::kSwiGluForward, "SwiGluForward", typed, all);
  AddKernel<SwiGluBackwardParams, PlanSwiGluBackward>(
      Kernel::kSwiGluBackward, "SwiGluBackward", typed, all);
  AddKernel<GeluParams, PlanGeluForward>(Kernel::kGeluForward, "GeluForward", typed, all);
  AddKernel<GeluParams, PlanGeluBackward>(Kernel::kGeluBackward, "GeluBackward", typed, all);
  AddKernel<AddInPlaceParams, PlanAddInPlace>(Kernel::kAddInPlace, "AddInPlace", typed, all);
  AddKernel<AddRowsParams, PlanAddBias>(Kernel::kAddBias, "AddBias", typed, all);
  AddKernel<AddRowsParams, PlanAddPositions>(Kernel::kAddPositions, "AddPositions", typed, all);
  AddKernel<BiasGradientParams, PlanBiasGradient>(
      Kernel::kBiasGradient, "BiasGradient", typed, all);
  AddKernel<PositionGradientParams, PlanPositionGradient>(
      Kernel::kPositionGradient, "PositionGradient", with_mixed, all);
  AddKernel<RopeParams, PlanRope>(Kernel::kRope, "Rope", typed, all);
  AddKernel<RopeTableParams, PlanRopeTable>(Kernel::kRopeTable, "RopeTable", {kF32Scalar}, all);
  AddKernel<EmbeddingForwardParams, PlanEmbeddingForward>(
      Kernel::kEmbeddingForward, "EmbeddingForward", typed, all);
  AddKernel<EmbeddingBackwardParams, PlanEmbeddingBackward>(
      Kernel::kEmbeddingBackward, "EmbeddingBackward", with_mixed, all);
  AddKernel<CrossEntropyParams, PlanCrossEntropy<false>>(
      Kernel::kCrossEntropyLoss, "CrossEntropyLoss", typed, all);
  AddKernel<CrossEntropyParams, PlanCrossEntropy<true>>(
      Kernel::kCrossEntropyGradient, "CrossEntropyGradient", typed, all);
  return all;
}

}  // namespace ravel::kernels::cuda::emulated
