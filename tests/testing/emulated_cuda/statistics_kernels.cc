// What decides a step: sums of losses and of rows, the decision.

#include <bit>

#include "kernels/cpu/step_statistics.h"
#include "tests/testing/emulated_cuda/emulated_kernels.h"

namespace ravel::kernels::cuda::emulated {
namespace {

constexpr auto kRead = Access::Kind::kRead;
constexpr auto kWrite = Access::Kind::kWrite;
constexpr auto kUpdate = Access::Kind::kUpdate;

constexpr int64_t kWordBytes = sizeof(int64_t);

PlannedLaunch PlanSumLoss(const KernelLaunch& launch, const SumLossParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, 1);
  operands.Touch(kRead, "losses", p.losses, p.elements * int64_t{sizeof(float)});
  operands.Touch(kRead, "targets", p.targets, p.elements * int64_t{sizeof(int32_t)});
  operands.Touch(kUpdate, "sum", p.sum, sizeof(double));
  operands.Touch(kUpdate, "tokens", p.tokens, sizeof(int64_t));
  return operands.Plan([=](Staging&) {
    TensorView targets = VectorView(nullptr, p.elements);
    targets.data = const_cast<int32_t*>(p.targets);
    targets.dtype = DType::kI32;
    cpu::SumLoss({.losses = VectorView(const_cast<float*>(p.losses), p.elements),
                  .targets = targets,
                  .sum = p.sum,
                  .tokens = p.tokens});
  });
}

PlannedLaunch PlanSumRowNodes(const KernelLaunch& launch, const SumRowNodesParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, p.count);
  operands.Touch(kRead, "row_sums", p.row_sums, p.rows * int64_t{sizeof(float)});
  operands.Touch(kRead, "nodes", p.nodes, p.count * int64_t{sizeof(DeviceRowNode)});
  operands.Touch(kWrite, "out", p.out, p.count * kWordBytes);
  return operands.Plan([=](Staging&) {
    cpu::SumRowNodes({.row_sums = p.row_sums,
                      .rows = p.rows,
                      .nodes = reinterpret_cast<const RowNode*>(p.nodes),
                      .count = p.count,
                      .out = p.out});
  });
}

PlannedLaunch PlanDecideUpdate(const KernelLaunch& launch, const DecideUpdateParams& p) {
  Operands operands(launch);
  operands.RequireBlock(kFlatThreads);
  operands.RequireGrid(0, 1);
  operands.Touch(kRead, "messages", p.messages, p.ranks * p.words * kWordBytes);
  operands.Touch(kRead, "steps", p.steps, p.step_count * int64_t{sizeof(DeviceSumStep)});
  operands.Touch(kRead, "level_ends", p.level_ends, p.levels * kWordBytes);
  operands.Touch(kWrite, "sums", p.sums, p.step_count * kWordBytes);
  operands.Touch(kUpdate, "outcome", p.outcome, sizeof(DeviceStepOutcome));
  return operands.Plan([=](Staging&) {
    cpu::DecideUpdate({.messages = p.messages,
                       .ranks = p.ranks,
                       .words = p.words,
                       .tensors = p.tensors,
                       .steps = reinterpret_cast<const SumStep*>(p.steps),
                       .level_ends = p.level_ends,
                       .levels = p.levels,
                       .step_count = p.step_count,
                       .sums = p.sums,
                       .total = p.total,
                       .clip_norm = p.clip_norm,
                       .hyper = std::bit_cast<UpdateHyper>(p.hyper),
                       .outcome = reinterpret_cast<StepOutcome*>(p.outcome)});
  });
}

}  // namespace

std::vector<EmulatedKernel> StatisticsKernels() {
  std::vector<EmulatedKernel> all;
  AddKernel<SumLossParams, PlanSumLoss>(Kernel::kSumLoss, "SumLoss", {0}, all);
  AddKernel<SumRowNodesParams, PlanSumRowNodes>(Kernel::kSumRowNodes, "SumRowNodes", {0}, all);
  AddKernel<DecideUpdateParams, PlanDecideUpdate>(Kernel::kDecideUpdate, "DecideUpdate", {0}, all);
  return all;
}

}  // namespace ravel::kernels::cuda::emulated
