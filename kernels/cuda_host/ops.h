#pragma once

// The host half of every op on a CUDA stream: checks, choice of kernel, grid, arguments. Contracts
// are those of kernels/<op>.h, with these differences. Activations may be bf16 or fp16 (sums
// are fp32 then); gradients of parameters may be fp32 or, of bf16, bf16. Sums over rows have a
// fixed order of their own. Ids are checked on the device, where a bad one ends the process.
// Workspaces of loss and attention: the loss takes as many tokens at a time as its workspace has
// rows; attention takes the larger of this one and the stream's. Nothing here waits, but
// DigestRange and PrepareAttention.

#include "kernels/activation.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/bias.h"
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/element_update.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/grouped_update.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/part_sum.h"
#include "kernels/philox.h"
#include "kernels/quantize.h"
#include "kernels/reduce_add.h"
#include "kernels/rope.h"
#include "kernels/row_sum.h"
#include "kernels/step_statistics.h"
#include "kernels/tree_reduce.h"
#include "kernels/vocabulary_loss.h"
#include "kernels/weight_update.h"

namespace ravel::kernels::cuda {

void Gemm(Stream& stream, const GemmArgs& args);
void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args);
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);
void HeadNormForward(Stream& stream, const HeadNormForwardArgs& args);
void HeadNormBackward(Stream& stream, const HeadNormBackwardArgs& args);
void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args);
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args);
void SumParts(Stream& stream, const SumPartsArgs& args);
void VocabularyStatistics(Stream& stream, const VocabularyStatisticsArgs& args);
void VocabularyLoss(Stream& stream, const VocabularyLossArgs& args);
void VocabularyGradient(Stream& stream, const VocabularyGradientArgs& args);
void AddBias(Stream& stream, const AddBiasArgs& args);
void BiasGradient(Stream& stream, const BiasGradientArgs& args);
void AddPositions(Stream& stream, const AddPositionsArgs& args);
void PositionGradient(Stream& stream, const PositionGradientArgs& args);
void GeluForward(Stream& stream, const GeluForwardArgs& args);
void GeluBackward(Stream& stream, const GeluBackwardArgs& args);
void BuildRopeTable(Stream& stream, const RopeTableArgs& args);
void Rope(Stream& stream, const RopeArgs& args);
void SwiGluForward(Stream& stream, const SwiGluForwardArgs& args);
void SwiGluBackward(Stream& stream, const SwiGluBackwardArgs& args);
void AddInPlace(Stream& stream, const AddArgs& args);
void EmbeddingForward(Stream& stream, const EmbeddingForwardArgs& args);
void EmbeddingBackward(Stream& stream, const EmbeddingBackwardArgs& args);
void LinearCrossEntropyForward(Stream& stream, const LinearCrossEntropyForwardArgs& args);
void LinearCrossEntropyTrain(Stream& stream, const LinearCrossEntropyTrainArgs& args);
void AttentionForward(Stream& stream, const AttentionForwardArgs& args);
void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args);
int64_t PrepareAttention(Stream& stream, const AttentionBackwardArgs& args);
void AdamWUpdate(Stream& stream, const AdamWArgs& args);
void ElementUpdate(Stream& stream, const ElementUpdateArgs& args);
void GroupedUpdate(Stream& stream, const GroupedUpdateArgs& args);
void WeightUpdate(Stream& stream, const WeightUpdateArgs& args);
void TreeAdd(Stream& stream, const TreeAddArgs& args);
void TreeSum(Stream& stream, const TreeSumArgs& args);
void ReduceAdd(Stream& stream, const ReduceAddArgs& args);
void CopyBytes(Stream& stream, const CopyArgs& args);
void RowSumSquares(Stream& stream, const RowSumSquaresArgs& args);
void AddDigest(Stream& stream, const AddDigestArgs& args);
uint64_t DigestRange(Stream& stream, const TensorView& range, uint64_t first_index);
void InitNormal(Stream& stream, const InitNormalArgs& args);
void Cast(Stream& stream, const CastArgs& args);
void TransposeMatrix(Stream& stream, const TransposeArgs& args);
void SumLoss(Stream& stream, const SumLossArgs& args);
void SumRowNodes(Stream& stream, const SumRowNodesArgs& args);
void CountFlags(Stream& stream, const CountFlagsArgs& args);
void DecideUpdate(Stream& stream, const DecideUpdateArgs& args);
void BlockAmax(Stream& stream, const BlockAmaxArgs& args);
void QuantizeWeight(Stream& stream, const QuantizeWeightArgs& args);
void DecodeWeight(Stream& stream, const DecodeWeightArgs& args);
void QuantizeActivation(Stream& stream, const QuantizeActivationArgs& args);
void QuantizeCodes(Stream& stream, const QuantizeCodesArgs& args);
void TransposeCodes(Stream& stream, const TransposeCodesArgs& args);
void QuantizeBlocks(Stream& stream, const QuantizeBlocksArgs& args);
void PlaceScales(Stream& stream, const PlaceScalesArgs& args);
void UpdateDelayedScales(Stream& stream, const DelayedScalesArgs& args);
void LargestWords(Stream& stream, const LargestWordsArgs& args);

}  // namespace ravel::kernels::cuda
