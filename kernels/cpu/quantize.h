#pragma once

// The ops of kernels/quantize.h on the CPU. Shapes are already checked (dispatch_quantize.cc).

#include "kernels/quantize.h"

namespace ravel::kernels::cpu {

void BlockAmax(const BlockAmaxArgs& args);
void QuantizeWeight(const QuantizeWeightArgs& args);
void DecodeWeight(const DecodeWeightArgs& args);
void QuantizeActivation(const QuantizeActivationArgs& args);
void QuantizeCodes(const QuantizeCodesArgs& args);
void TransposeCodes(const TransposeCodesArgs& args);
void QuantizeBlocks(const QuantizeBlocksArgs& args);
void QuantizeFp4Blocks(const QuantizeBlocksArgs& args);  // fp4_codes.cc: QuantizeBlocks of kNvFp4
void PlaceScales(const PlaceScalesArgs& args);
void UpdateDelayedScales(const DelayedScalesArgs& args);
void LargestWords(const LargestWordsArgs& args);

}  // namespace ravel::kernels::cpu
