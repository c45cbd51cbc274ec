#pragma once

// The loops of quantize_strip.h. A strip is cut into chunks, whose values lie in arrays between the
// steps: each step is a loop over lanes of 32 bits without calls or branches, which compilers
// vectorise, and source and destination may be the same memory. Sources that include this are
// compiled with -O3; everything is inlined (flatten), so that no function of theirs is shared with
// those of another instruction set.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/quantize_strip.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/block_scales.h"
#include "kernels/scalar/float4.h"
#include "kernels/scalar/hadamard.h"

namespace ravel::kernels::cpu {
namespace {

constexpr size_t kChunk = 256;
// Draws of 16 elements; one more where a chunk begins inside one, and up to whole vectors.
constexpr size_t kChunkDraws = kChunk / 16 + 8;

struct alignas(64) ChunkFloats {
  float at[kChunk];
};
struct alignas(64) ChunkWords {
  uint32_t at[kChunk];
};
struct alignas(64) ChunkRandom {
  uint32_t at[kChunkDraws * 16];
};

// Formats: codes as 32 bits, and their values.
struct E4M3Form {
  static constexpr uint32_t Code(float x) { return scalar::E4M3::NearestCode(x); }
  static constexpr float Value(uint32_t code) { return scalar::E4M3::ValueOfCode(code); }
  static constexpr float Rounded(float x) { return scalar::E4M3::Rounded(x); }
};
struct E5M2Form {
  static constexpr uint32_t Code(float x) { return scalar::E5M2::NearestCode(x); }
  static constexpr float Value(uint32_t code) { return scalar::E5M2::ValueOfCode(code); }
  static constexpr float Rounded(float x) { return scalar::E5M2::Rounded(x); }
};
struct E2M1Form {
  static constexpr uint32_t Code(float x) { return scalar::E2M1Nearest(x); }
  static constexpr float Value(uint32_t code) { return scalar::E2M1Value(code); }
  static constexpr float Rounded(float x) { return scalar::E2M1Rounded(x); }
};
template <typename Visit>
void ByForm(CodeForm form, const Visit& visit) {
  if (form == CodeForm::kE4M3) {
    visit(E4M3Form{});
  } else if (form == CodeForm::kE5M2) {
    visit(E5M2Form{});
  } else {
    visit(E2M1Form{});
  }
}

// A scale for each of the elements [first, first + n) of a strip.
void Spread(const float* scales, int64_t block, int64_t first, size_t n, ChunkFloats& to) {
  if (block == 1) {
    std::memcpy(to.at, scales + first, n * sizeof(float));
    return;
  }
  const auto end = first + static_cast<int64_t>(n);
  for (int64_t i = first; i < end;) {
    const int64_t stop = std::min(end, (i / block + 1) * block);
    const float scale = scales[i / block];
    for (int64_t j = i - first; j < stop - first; ++j) {
      to.at[j] = scale;
    }
    i = stop;
  }
}

uint32_t MagnitudeAt(const float* from, size_t i) {
  return std::bit_cast<uint32_t>(from[i]) & 0x7FFFFFFFu;
}
uint32_t MagnitudeAt(const uint16_t* from, size_t i) {
  return (uint32_t{from[i]} << 16) & 0x7FFFFFFFu;
}

template <typename Element>
void BlockAmaxLoop(const Element* from, int64_t elements, int64_t block, uint32_t* amax) {
  if (block == 1) {
    for (size_t i = 0; i < static_cast<size_t>(elements); ++i) {
      amax[i] = std::max(amax[i], MagnitudeAt(from, i));
    }
    return;
  }
  for (int64_t first = 0; first < elements; first += block, ++amax) {
    const auto n = static_cast<size_t>(std::min(block, elements - first));
    uint32_t largest = 0;
    for (size_t i = 0; i < n; ++i) {
      largest = std::max(largest, MagnitudeAt(from + first, i));
    }
    RaiseWord(*amax, largest);
  }
}

[[gnu::flatten]] void AmaxOfF32(const float* from,
                                int64_t elements,
                                int64_t block,
                                uint32_t* amax) {
  BlockAmaxLoop(from, elements, block, amax);
}
[[gnu::flatten]] void AmaxOfBf16(const uint16_t* from,
                                 int64_t elements,
                                 int64_t block,
                                 uint32_t* amax) {
  BlockAmaxLoop(from, elements, block, amax);
}

template <plan::Recipe kRecipe>
void BlockScalesLoop(const BlockScalesStrip& strip) {
  ChunkFloats encode;
  ChunkFloats decode;
  for (int64_t first = 0; first < strip.blocks; first += static_cast<int64_t>(kChunk)) {
    const auto n = std::min(kChunk, static_cast<size_t>(strip.blocks - first));
    const uint32_t* amax = strip.amax + first;
    for (size_t i = 0; i < n; ++i) {
      const scalar::Scales scales = scalar::BlockScales<kRecipe>(amax[i], strip.tensor, strip.big);
      encode.at[i] = scales.encode;
      decode.at[i] = scales.decode;
    }
    std::memcpy(strip.encode + first, encode.at, n * sizeof(float));
    std::memcpy(strip.decode + first, decode.at, n * sizeof(float));
  }
}

[[gnu::flatten]] void BlockScalesLoops(const BlockScalesStrip& strip) {
  switch (strip.recipe) {
    case plan::Recipe::kFloat8Block:
      return BlockScalesLoop<plan::Recipe::kFloat8Block>(strip);
    case plan::Recipe::kMxFp8:
      return BlockScalesLoop<plan::Recipe::kMxFp8>(strip);
    case plan::Recipe::kNvFp4:
      return BlockScalesLoop<plan::Recipe::kNvFp4>(strip);
    default:
      return BlockScalesLoop<plan::Recipe::kCurrent>(strip);
  }
}

// The random bytes of elements [first, first + n) of a strip; returns where in `random` they begin.
size_t DrawBytes(const StripDraws& draws, int64_t first, size_t n, ChunkRandom& random) {
  alignas(64) uint32_t c0[kChunkDraws];
  alignas(64) uint32_t c1[kChunkDraws];
  alignas(64) uint32_t c2[kChunkDraws];
  alignas(64) uint32_t c3[kChunkDraws];
  const uint64_t index = draws.index + static_cast<uint64_t>(first);
  const size_t skipped = index % 16;
  const size_t count = (skipped + n + 15) / 16;
  const scalar::PhiloxWords counter = scalar::PhiloxCounter(draws.position);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t at = index / 16 + i;
    c0[i] = static_cast<uint32_t>(at);
    c1[i] = (static_cast<uint32_t>(at >> 32) & 0xFFFu) | counter[1];
    c2[i] = counter[2];
    c3[i] = counter[3];
  }
  uint32_t key0 = static_cast<uint32_t>(draws.seed);
  uint32_t key1 = static_cast<uint32_t>(draws.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < count; ++i) {
      const uint64_t product0 = uint64_t{0xD2511F53u} * c0[i];
      const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(product1 >> 32) ^ c1[i] ^ key0;
      c1[i] = static_cast<uint32_t>(product1);
      c2[i] = static_cast<uint32_t>(product0 >> 32) ^ c3[i] ^ key1;
      c3[i] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (size_t i = 0; i < count; ++i) {
    const uint32_t words[4] = {c0[i], c1[i], c2[i], c3[i]};
    for (size_t j = 0; j < 16; ++j) {
      random.at[16 * i + j] = (words[j / 4] >> (8 * (j % 4))) & 0xFFu;
    }
  }
  return skipped;
}

// E2M1 by draws. Three short loops, because one would need more registers than there are.
void RoundTripByDraws(const RoundTripStrip& strip,
                      int64_t first,
                      size_t n,
                      const uint32_t* random) {
  ChunkFloats x;
  ChunkFloats encode;
  ChunkFloats decode;
  alignas(64) uint16_t rounded[kChunk];
  Spread(strip.scales.encode, strip.scales.block, first, n, encode);
  Spread(strip.scales.decode, strip.scales.block, first, n, decode);
  const uint16_t* from = strip.from + first;
  for (size_t i = 0; i < n; ++i) {
    x.at[i] = scalar::Bf16Value(from[i]) * encode.at[i];
  }
  ChunkWords codes;
  for (size_t i = 0; i < n; ++i) {
    codes.at[i] = scalar::E2M1Stochastic(x.at[i], random[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    rounded[i] = scalar::Bf16Nearest(scalar::E2M1Value(codes.at[i]) * decode.at[i]);
  }
  std::memcpy(strip.to + first, rounded, n * sizeof(uint16_t));
}

// to[i] = from[i], scaled, rounded to nearest and scaled back. The two may be the same memory, but
// never lie apart and overlap, so that no iteration reads what another one wrote.
template <typename Form, typename Encode, typename Decode>
void RoundTripRange(
    const uint16_t* from, uint16_t* to, int64_t n, const Encode& encode, const Decode& decode) {
#if !defined(__clang__)
#pragma GCC ivdep
#endif
  for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
    const float x = scalar::Bf16Value(from[i]) * encode(i);
    to[i] = scalar::Bf16Nearest(Form::Rounded(x) * decode(i));
  }
}

template <typename Form>
void RoundTripNearest(const RoundTripStrip& strip) {
  const StripScales& scales = strip.scales;
  if (scales.block == 1) {
    RoundTripRange<Form>(
        strip.from,
        strip.to,
        strip.elements,
        [&](size_t i) { return scales.encode[i]; },
        [&](size_t i) { return scales.decode[i]; });
    return;
  }
  for (int64_t first = 0; first < strip.elements; first += scales.block) {
    const float encode = scales.encode[first / scales.block];
    const float decode = scales.decode[first / scales.block];
    RoundTripRange<Form>(
        strip.from + first,
        strip.to + first,
        std::min(scales.block, strip.elements - first),
        [=](size_t) { return encode; },
        [=](size_t) { return decode; });
  }
}

// visit(first, n) for the chunks of a strip.
template <typename Visit>
void ForEachChunk(int64_t elements, const Visit& visit) {
  for (int64_t first = 0; first < elements; first += static_cast<int64_t>(kChunk)) {
    visit(first, std::min(kChunk, static_cast<size_t>(elements - first)));
  }
}

[[gnu::flatten]] void RoundTripLoops(const RoundTripStrip& strip) {
  if (strip.draws.present) {
    ChunkRandom random;
    ForEachChunk(strip.elements, [&](int64_t first, size_t n) {
      const size_t skipped = DrawBytes(strip.draws, first, n, random);
      RoundTripByDraws(strip, first, n, random.at + skipped);
    });
    return;
  }
  ByForm(strip.form, [&](auto form) { RoundTripNearest<decltype(form)>(strip); });
}

[[gnu::flatten]] void EncodeLoops(const EncodeStrip& strip) {
  ByForm(strip.form, [&](auto form) {
    using Form = decltype(form);
    ForEachChunk(strip.elements, [&](int64_t first, size_t n) {
      ChunkFloats encode;
      ChunkWords codes;
      Spread(strip.scales.encode, strip.scales.block, first, n, encode);
      const float* from = strip.from + first;
      for (size_t i = 0; i < n; ++i) {
        codes.at[i] = Form::Code(from[i] * encode.at[i]);
      }
      if constexpr (std::is_same_v<Form, E2M1Form>) {
        uint8_t* to = strip.codes + first / 2;
        for (size_t i = 0; i < n / 2; ++i) {
          to[i] = static_cast<uint8_t>(codes.at[2 * i] | (codes.at[2 * i + 1] << 4));
        }
      } else {
        uint8_t* to = strip.codes + first;
        for (size_t i = 0; i < n; ++i) {
          to[i] = static_cast<uint8_t>(codes.at[i]);
        }
      }
    });
  });
}

[[gnu::flatten]] void DecodeLoops(const DecodeStrip& strip) {
  ByForm(strip.form, [&](auto form) {
    using Form = decltype(form);
    ForEachChunk(strip.elements, [&](int64_t first, size_t n) {
      ChunkFloats decode;
      ChunkWords codes;
      Spread(strip.scales.decode, strip.scales.block, first, n, decode);
      if constexpr (std::is_same_v<Form, E2M1Form>) {
        const uint8_t* from = strip.codes + first / 2;
        for (size_t i = 0; i < n / 2; ++i) {
          codes.at[2 * i] = from[i] & 0xFu;
          codes.at[2 * i + 1] = uint32_t{from[i]} >> 4;
        }
      } else {
        const uint8_t* from = strip.codes + first;
        for (size_t i = 0; i < n; ++i) {
          codes.at[i] = from[i];
        }
      }
      uint16_t* to = strip.to + first;
      for (size_t i = 0; i < n; ++i) {
        to[i] = scalar::Bf16Nearest(Form::Value(codes.at[i]) * decode.at[i]);
      }
    });
  });
}

[[gnu::flatten]] void HadamardLoops(const HadamardStrip& strip) {
  constexpr size_t kWidth = 64;
  constexpr size_t kRows = scalar::kHadamardSize;
  alignas(64) float rows[kRows][kWidth];
  for (int64_t first = 0; first < strip.columns; first += static_cast<int64_t>(kWidth)) {
    const auto n = std::min(kWidth, static_cast<size_t>(strip.columns - first));
    for (size_t row = 0; row < kRows; ++row) {
      const uint16_t* from = strip.from + static_cast<int64_t>(row) * strip.from_stride + first;
      const float sign = scalar::HadamardSign(row);
      for (size_t i = 0; i < n; ++i) {
        rows[row][i] = scalar::Bf16Value(from[i]) * sign;
      }
    }
    for (size_t stride = 1; stride < kRows; stride *= 2) {
      for (size_t row = 0; row < kRows; ++row) {
        if ((row & stride) != 0) {
          continue;
        }
        float* __restrict low = rows[row];
        float* __restrict high = rows[row + stride];
        for (size_t i = 0; i < n; ++i) {
          const float sum = low[i] + high[i];
          high[i] = low[i] - high[i];
          low[i] = sum;
        }
      }
    }
    for (size_t row = 0; row < kRows; ++row) {
      uint16_t* to = strip.to + static_cast<int64_t>(row) * strip.to_stride + first;
      for (size_t i = 0; i < n; ++i) {
        to[i] = scalar::Bf16Nearest(rows[row][i] * scalar::kHadamardFactor);
      }
    }
  }
}

constexpr QuantizeLoops kQuantizeLoops = {
    .block_amax_f32 = AmaxOfF32,
    .block_amax_bf16 = AmaxOfBf16,
    .block_scales = BlockScalesLoops,
    .round_trip = RoundTripLoops,
    .encode = EncodeLoops,
    .decode = DecodeLoops,
    .hadamard = HadamardLoops,
};

}  // namespace
}  // namespace ravel::kernels::cpu
