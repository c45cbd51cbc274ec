// The host half of sums of parts and of the loss over blocks of a vocabulary.

#include <bit>

#include "common/check.h"
#include "kernels/cuda_host/launch_rules.h"
#include "kernels/cuda_host/ops.h"

namespace ravel::kernels::cuda {
namespace {

static_assert(kMaxPartPieces == kMostPieces);
constexpr int64_t kMaxThreads = 1024;

void RequireBlock(const TensorView& logits,
                  const TensorView& targets,
                  const TensorView& statistics,
                  int64_t first_id) {
  RequireFloat(logits);
  RequireMatrix(logits, logits.size[0], logits.size[1], logits.dtype);
  RequireFlat(targets, logits.size[0], DType::kI32);
  RequireMatrix(statistics, 3, logits.size[0], DType::kF32);
  CHECK_MSG(first_id >= 0, "a block begins in the vocabulary");
}

// One block of threads per token.
void RunOfBlock(LaunchStream& on,
                Kernel kernel,
                const TensorView& logits,
                const TensorView& targets,
                const TensorView& statistics,
                int64_t first_id,
                const VocabularyGradientArgs& scale = {}) {
  if (logits.size[0] == 0) {
    return;
  }
  const Variant variant = VariantFor({logits});
  on.Run({.kernel = kernel,
          .variant = variant,
          .grid = {BlockPerRow(on, logits.size[0]), 1, 1},
          .block = RowThreads(logits.size[1] / WidthOf(variant), 4, kMaxThreads)},
         VocabularyBlockParams{.logits = logits.data,
                               .targets = targets.As<int32_t>(),
                               .statistics = statistics.As<float>(),
                               .logits_stride = logits.row_stride,
                               .statistics_stride = statistics.row_stride,
                               .tokens = logits.size[0],
                               .columns = logits.size[1],
                               .first_id = first_id,
                               .device_loss_scale = scale.device_loss_scale,
                               .loss_scale = scale.loss_scale});
}

int64_t LogarithmOf(size_t count) {
  CHECK_MSG(std::has_single_bit(count) && count <= kMostPieces, "a power of two is expected");
  return std::countr_zero(count);
}

}  // namespace

void SumParts(Stream& stream, const SumPartsArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t rows = args.out.size[0];
  const int64_t columns = args.out.size[1];
  RequireFloat(args.out);
  RequireMatrix(args.out, rows, columns, args.out.dtype);
  SumPartsParams params = {.pieces = {},
                           .residual = args.residual.data,
                           .bias = args.bias.data,
                           .out = args.out.data,
                           .piece_stride = 0,
                           .residual_stride = args.residual.row_stride,
                           .out_stride = args.out.row_stride,
                           .rows = rows,
                           .columns = columns,
                           .pieces_log = LogarithmOf(args.pieces.size())};
  Variant variant = VariantFor({args.out, args.residual, args.bias});
  for (size_t i = 0; i < args.pieces.size(); ++i) {
    const TensorView& piece = args.pieces[i];
    RequireMatrix(piece, rows, columns, DType::kF32);
    CHECK_MSG(rows <= 1 || piece.row_stride == args.pieces[0].row_stride, "pieces lie alike");
    params.pieces[i] = piece.As<float>();
    params.piece_stride = piece.row_stride;
    if (!FitsVectors({piece})) {
      variant = ScalarVariantOf(args.out.dtype);
    }
  }
  if (args.residual.present()) {
    RequireMatrix(args.residual, rows, columns, args.out.dtype);
  }
  if (args.bias.present()) {
    RequireFlat(args.bias, columns, args.out.dtype);
  }
  if (rows * columns > 0) {
    on.Run({.kernel = Kernel::kSumParts,
            .variant = variant,
            .grid = RowGrid(on, rows, columns / WidthOf(variant))},
           params);
  }
}

void VocabularyStatistics(Stream& stream, const VocabularyStatisticsArgs& args) {
  RequireBlock(args.logits, args.targets, args.statistics, args.first_id);
  RunOfBlock(LaunchStreamOf(stream),
             Kernel::kVocabularyStatistics,
             args.logits,
             args.targets,
             args.statistics,
             args.first_id);
}

void VocabularyLoss(Stream& stream, const VocabularyLossArgs& args) {
  LaunchStream& on = LaunchStreamOf(stream);
  const int64_t tokens = args.loss.elements();
  const auto blocks = static_cast<size_t>(args.statistics.size[0] / 3);
  RequireMatrix(args.statistics, static_cast<int64_t>(3 * blocks), tokens, DType::kF32);
  RequireFlat(args.loss, tokens, DType::kF32);
  RequireFlat(args.targets, tokens, DType::kI32);
  const VocabularyLossParams params = {.statistics = args.statistics.As<float>(),
                                       .targets = args.targets.As<int32_t>(),
                                       .loss = args.loss.As<float>(),
                                       .statistics_stride = args.statistics.row_stride,
                                       .tokens = tokens,
                                       .vocabulary = args.vocabulary,
                                       .blocks_log = LogarithmOf(blocks)};
  if (tokens > 0) {
    on.Run({.kernel = Kernel::kVocabularyLoss, .grid = {FlatGrid(on, tokens), 1, 1}}, params);
  }
}

void VocabularyGradient(Stream& stream, const VocabularyGradientArgs& args) {
  RequireBlock(args.logits, args.targets, args.statistics, args.first_id);
  CHECK_MSG((args.loss_scale == 1.0f && args.device_loss_scale == nullptr) ||
                args.logits.dtype == DType::kF16,
            "a loss scale is for fp16");
  RunOfBlock(LaunchStreamOf(stream),
             Kernel::kVocabularyGradient,
             args.logits,
             args.targets,
             args.statistics,
             args.first_id,
             args);
}

}  // namespace ravel::kernels::cuda
