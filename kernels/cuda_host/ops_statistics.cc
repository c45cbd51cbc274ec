// Host half of the ops that decide a step: sums of losses and of rows, the decision.

#include <bit>
#include <cstddef>
#include <type_traits>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/scalar/decide_step.h"

namespace ravel::kernels::cuda {
namespace {

static_assert(sizeof(DeviceRowNode) == sizeof(RowNode));
static_assert(sizeof(DeviceSumStep) == sizeof(SumStep));
static_assert(sizeof(DeviceStepOutcome) == sizeof(StepOutcome));
static_assert(offsetof(DeviceStepOutcome, loss_scale) == offsetof(StepOutcome, loss_scale));
static_assert(sizeof(DeviceUpdateHyper) == sizeof(UpdateHyper));
static_assert(sizeof(DeviceLossScaleRule) == sizeof(LossScaleRule));
static_assert(std::is_trivially_copyable_v<StepOutcome>);

}  // namespace

void SumLoss(Stream& stream, const SumLossArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.losses.elements();
  RequireFlat(args.losses, n, DType::kF32);
  RequireFlat(args.targets, n, DType::kI32);
  if (n == 0) {
    return;
  }
  on.Run({.kernel = Kernel::kSumLoss},
         SumLossParams{.losses = args.losses.As<float>(),
                       .targets = args.targets.As<int32_t>(),
                       .sum = args.sum,
                       .tokens = args.tokens,
                       .elements = n});
}

void SumRowNodes(Stream& stream, const SumRowNodesArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  if (args.count == 0) {
    return;
  }
  constexpr int64_t kMostBlocks = int64_t{1} << 20;
  CHECK_MSG(args.count <= kMostBlocks, "more nodes than blocks");
  on.Run({.kernel = Kernel::kSumRowNodes, .grid = {static_cast<uint32_t>(args.count), 1, 1}},
         SumRowNodesParams{.row_sums = args.row_sums,
                           .nodes = reinterpret_cast<const DeviceRowNode*>(args.nodes),
                           .out = args.out,
                           .rows = args.rows,
                           .count = args.count});
}

void CountFlags(Stream& stream, const CountFlagsArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t n = args.flags.elements();
  RequireFlat(args.flags, n, DType::kU32);
  if (n == 0) {
    return;
  }
  on.Run({.kernel = Kernel::kCountFlags, .grid = {FlatGrid(on, n), 1, 1}},
         CountFlagsParams{.flags = args.flags.As<uint32_t>(), .counts = args.counts, .count = n});
}

// The device reads the header by the word.
static_assert(kStatisticsHeaderWords == scalar::kStatisticsHeaderWords);
static_assert(offsetof(StatisticsHeader, learning_rate) ==
              scalar::kStatisticsRateWord * sizeof(int64_t));

void DecideUpdate(Stream& stream, const DecideUpdateArgs& args) {
  CHECK(args.ranks > 0 && args.words >= kStatisticsHeaderWords + args.tensors);
  LaunchStreamOf(stream).Run(
      {.kernel = Kernel::kDecideUpdate},
      DecideUpdateParams{.messages = static_cast<const int64_t*>(args.messages),
                         .steps = reinterpret_cast<const DeviceSumStep*>(args.steps),
                         .level_ends = args.level_ends,
                         .sums = args.sums,
                         .outcome = reinterpret_cast<DeviceStepOutcome*>(args.outcome),
                         .ranks = args.ranks,
                         .words = args.words,
                         .tensors = args.tensors,
                         .levels = args.levels,
                         .step_count = args.step_count,
                         .clip_norm = args.clip_norm,
                         .hyper = {.beta1 = args.hyper.beta1,
                                   .beta2 = args.hyper.beta2,
                                   .epsilon = args.hyper.epsilon,
                                   .weight_decay = args.hyper.weight_decay,
                                   .learning_rate = args.hyper.learning_rate},
                         .loss_scale = std::bit_cast<DeviceLossScaleRule>(args.loss_scale),
                         .total = args.total});
}

}  // namespace ravel::kernels::cuda
