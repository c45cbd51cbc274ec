// NVFP4 activations as codes, two to a byte, with a scale for each 16, for comparison with devices:
// one element after another. Along rows each 16 are transformed first (scalar/hadamard.h).

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "common/signed_size.h"
#include "kernels/cpu/quantize.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/float4.h"
#include "kernels/scalar/hadamard.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {
namespace {

constexpr int64_t kEdge = plan::BlockEdge(plan::Recipe::kNvFp4);
static_assert(kEdge == scalar::kHadamardSize);

// The values that are quantized, [outer, inner]: blocks lie along the inner index.
std::vector<float> ValuesOf(const QuantizeBlocksArgs& args) {
  const bool turned = args.along == BlocksAlong::kRows;
  const int64_t outer = args.from.size[turned ? 1 : 0];
  const int64_t inner = args.from.size[turned ? 0 : 1];
  std::vector<float> values(Size(outer * inner));
  for (int64_t row = 0; row < outer; ++row) {
    for (int64_t first = 0; first < inner; first += kEdge) {
      float block[kEdge];
      for (int64_t i = 0; i < kEdge; ++i) {
        const auto* line = args.from.Row<uint16_t>(turned ? first + i : row);
        block[i] = scalar::Bf16Value(line[turned ? row : first + i]);
      }
      if (turned) {
        scalar::Hadamard16(block);
        for (float& x : block) {
          x = scalar::Bf16Value(scalar::Bf16Nearest(x));
        }
      }
      std::copy_n(block, kEdge, values.begin() + row * inner + first);
    }
  }
  return values;
}

uint32_t AmaxOf(const float* values, int64_t count) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    amax = std::max(amax, scalar::MagnitudeBits(values[i]));
  }
  return amax;
}

// The random bits of an element, by its place in `from`.
uint32_t DrawOf(const QuantizeBlocksArgs& args, int64_t token, int64_t column) {
  constexpr int64_t kPerDraw = 16;
  const ActivationDraws& draws = args.draws;
  const int64_t index = token % draws.sequence_tokens * args.from.size[1] + column;
  const scalar::PhiloxWords words = scalar::Philox4x32(
      draws.seed,
      scalar::PhiloxCounter(
          {.block = static_cast<uint64_t>(index / kPerDraw),
           .sample = draws.first_sample + static_cast<uint32_t>(token / draws.sequence_tokens),
           .step = draws.device_step != nullptr ? static_cast<uint32_t>(*draws.device_step)
                                                : draws.step,
           .site = draws.site,
           .piece = draws.piece,
           .purpose = args.along == BlocksAlong::kColumns
                          ? scalar::PhiloxPurpose::kGradientAlongColumns
                          : scalar::PhiloxPurpose::kGradientAlongRows}));
  return scalar::PhiloxByte(words, static_cast<uint32_t>(index % kPerDraw));
}

}  // namespace

void QuantizeFp4Blocks(const QuantizeBlocksArgs& args) {
  const bool turned = args.along == BlocksAlong::kRows;
  const bool draws = args.role == ActivationRole::kGradient;
  const int64_t outer = args.from.size[turned ? 1 : 0];
  const int64_t inner = args.from.size[turned ? 0 : 1];
  const int64_t blocks = inner / kEdge;
  const std::vector<float> values = ValuesOf(args);
  const uint32_t amax = AmaxOf(values.data(), std::ssize(values));
  const scalar::Scales tensor = scalar::NvFp4TensorScales(amax);
  std::memset(args.scales.data, 0, Size(args.scales.elements()));
  for (int64_t row = 0; row < outer; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      const float* from = values.data() + row * inner + block * kEdge;
      const uint32_t of_block = AmaxOf(from, kEdge);
      args.scales.As<uint8_t>()[ScaleIndex(ScaleForm::kBlocks16, row, block, outer, blocks)] =
          static_cast<uint8_t>(scalar::NvFp4BlockCode(of_block, tensor.encode));
      const float encode = scalar::NvFp4BlockScales(of_block, tensor.encode).encode;
      uint8_t* to = args.codes.Row<uint8_t>(row) + block * kEdge / 2;
      for (int64_t i = 0; i < kEdge; ++i) {
        const int64_t at = block * kEdge + i;
        const float x = from[i] * encode;
        const uint32_t code =
            draws ? scalar::E2M1Stochastic(x, DrawOf(args, turned ? at : row, turned ? row : at))
                  : scalar::E2M1Nearest(x);
        to[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code : to[i / 2] | code << 4);
      }
    }
  }
  *args.scale.As<float>() = tensor.decode;
  if (args.non_finite.present() && amax >= scalar::kInfinityBits) {
    *args.non_finite.As<uint32_t>() |= 1;
  }
}

}  // namespace ravel::kernels::cpu
