// Ends of computations in parts (part_sum.h, vocabulary_loss.h); dispatch.cc says how ops are
// dispatched.

#include <bit>
#include <limits>

#include "common/check.h"
#include "kernels/cpu/simd_ops.h"
#include "kernels/cuda_host/ops.h"
#include "kernels/operand_checks.h"
#include "kernels/part_sum.h"
#include "kernels/vocabulary_loss.h"

namespace ravel::kernels {
namespace {

void CheckTargets(const TensorView& targets, int64_t tokens, int64_t vocabulary) {
  CheckFlat(targets, tokens, DType::kI32);
  for (int64_t i = 0; i < tokens; ++i) {
    const int32_t target = targets.As<int32_t>()[i];
    CHECK_MSG(target >= -1 && target < vocabulary, "id outside the vocabulary");
  }
}

void CheckBlock(const TensorView& logits, const TensorView& statistics, int64_t first_id) {
  CheckRank2(logits);
  CheckFloat(logits);
  CheckMatrix(logits, logits.size[0], logits.size[1], logits.dtype);
  CheckMatrix(statistics, 3, logits.size[0]);
  CHECK_MSG(first_id >= 0, "a block begins in the vocabulary");
}

}  // namespace

void SumParts(Stream& stream, const SumPartsArgs& args) {
  if (OnCuda(stream)) {
    cuda::SumParts(stream, args);
    return;
  }
  CheckRank2(args.out);
  CheckFloat(args.out);
  const int64_t rows = args.out.size[0];
  const int64_t columns = args.out.size[1];
  CheckMatrix(args.out, rows, columns, args.out.dtype);
  CHECK_MSG(std::has_single_bit(args.pieces.size()) && args.pieces.size() <= kMostPieces,
            "pieces are a power of two");
  for (const TensorView& piece : args.pieces) {
    CheckMatrix(piece, rows, columns);
  }
  if (args.residual.present()) {
    CheckMatrix(args.residual, rows, columns, args.out.dtype);
  }
  if (args.bias.present()) {
    CheckFlat(args.bias, columns, args.out.dtype);
  }
  cpu::ActiveOps().sum_parts(args);
}

void VocabularyStatistics(Stream& stream, const VocabularyStatisticsArgs& args) {
  if (OnCuda(stream)) {
    cuda::VocabularyStatistics(stream, args);
    return;
  }
  CheckBlock(args.logits, args.statistics, args.first_id);
  CheckTargets(args.targets, args.logits.size[0], std::numeric_limits<int32_t>::max());
  cpu::ActiveOps().vocabulary_statistics(args);
}

void VocabularyLoss(Stream& stream, const VocabularyLossArgs& args) {
  if (OnCuda(stream)) {
    cuda::VocabularyLoss(stream, args);
    return;
  }
  const int64_t tokens = args.loss.elements();
  CheckRank2(args.statistics);
  const auto blocks = static_cast<size_t>(args.statistics.size[0] / 3);
  CHECK_MSG(std::has_single_bit(blocks) && blocks <= kMostPieces, "blocks are a power of two");
  CheckMatrix(args.statistics, static_cast<int64_t>(3 * blocks), tokens);
  CheckFlat(args.loss, tokens);
  CheckTargets(args.targets, tokens, args.vocabulary);
  cpu::ActiveOps().vocabulary_loss(args);
}

void VocabularyGradient(Stream& stream, const VocabularyGradientArgs& args) {
  if (OnCuda(stream)) {
    cuda::VocabularyGradient(stream, args);
    return;
  }
  CheckBlock(args.logits, args.statistics, args.first_id);
  CheckTargets(args.targets, args.logits.size[0], std::numeric_limits<int32_t>::max());
  CHECK_MSG(args.loss_scale == 1.0f || args.logits.dtype == DType::kF16,
            "a loss scale is for fp16");
  CHECK_MSG(args.device_loss_scale == nullptr, "a host reads no memory of devices");
  cpu::ActiveOps().vocabulary_gradient(args);
}

}  // namespace ravel::kernels
