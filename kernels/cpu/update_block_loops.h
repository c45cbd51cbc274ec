#pragma once

// The loops of update_block.h. Values lie in arrays of a block's size between the steps, so that
// each step is a loop without calls or branches; sources that include this are compiled with -O3
// and -fno-math-errno. All calls are inlined (flatten): no function of these sources is shared with
// those of another instruction set.

#include <bit>
#include <cstddef>
#include <cstring>

#include "kernels/cpu/update_groups.h"
#include "kernels/scalar/bfloat16.h"
#include "kernels/scalar/float16.h"
#include "kernels/scalar/fp8_state.h"
#include "kernels/scalar/philox.h"

namespace ravel::kernels::cpu {
namespace {

constexpr size_t kBlock = static_cast<size_t>(kUpdateGroup);
// Blocks of scalar/philox.h, one more where it begins inside one, and their draws.
constexpr size_t kStateBlocks = kBlock / scalar::kStateBlock + 1;
constexpr size_t kDraws = kStateBlocks * scalar::kBlockDraws;

struct alignas(64) Lanes {
  float values[kBlock];
};

void LoadWeights(const UpdateBlock& block, size_t n, Lanes& to) {
  if (block.remainder == nullptr) {
    std::memcpy(to.values, block.main, n * sizeof(float));
    return;
  }
  const uint16_t* weight = block.weight;
  const int16_t* remainder = block.remainder;
  for (size_t i = 0; i < n; ++i) {
    to.values[i] = scalar::JoinOf({.weight = weight[i], .remainder = remainder[i]});
  }
}

void StoreWeights(const UpdateBlock& block, size_t n, const Lanes& from) {
  if (block.remainder == nullptr) {
    std::memcpy(block.main, from.values, n * sizeof(float));
  } else {
    int16_t* remainder = block.remainder;
    for (size_t i = 0; i < n; ++i) {
      remainder[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(from.values[i]));
    }
  }
  uint16_t* weight = block.weight;
  if (weight != nullptr && block.fp16_weight) {
    for (size_t i = 0; i < n; ++i) {
      weight[i] = scalar::Fp16Nearest(from.values[i]);
    }
  } else if (weight != nullptr) {
    for (size_t i = 0; i < n; ++i) {
      weight[i] = scalar::Bf16HalfAway(from.values[i]);
    }
  }
}

void LoadBf16(const void* from, size_t n, Lanes& to) {
  const auto* bits = static_cast<const uint16_t*>(from);
  for (size_t i = 0; i < n; ++i) {
    to.values[i] = scalar::Bf16Value(bits[i]);
  }
}

template <bool kSquare>
void LoadState(const StateBlock& state, size_t n, Lanes& to) {
  if (state.form == StateForm::kF32) {
    std::memcpy(to.values, state.values, n * sizeof(float));
  } else if (state.form == StateForm::kBf16) {
    LoadBf16(state.values, n, to);
  } else if (state.form == StateForm::kFp8) {
    const auto* codes = static_cast<const uint8_t*>(state.values);
    const float scale = scalar::E8M0Value(*state.scale);
    for (size_t i = 0; i < n; ++i) {
      to.values[i] = (kSquare ? scalar::UE5M3Value(codes[i]) : scalar::E4M3Value(codes[i])) * scale;
    }
  }
}

// The 16 random bits of every element. Draws are made beside each other, one round of all at a
// time.
struct Halves {
  alignas(64) uint32_t values[kStateBlocks * scalar::kStateBlock];
  size_t first = 0;  // elements of the first block of scalar/philox.h that are before these
};

void Draw(const UpdateBlock& block, size_t n, Halves& halves) {
  alignas(64) uint32_t c0[kDraws];
  alignas(64) uint32_t c1[kDraws];
  alignas(64) uint32_t c2[kDraws];
  alignas(64) uint32_t c3[kDraws];
  constexpr auto kOfBlock = static_cast<size_t>(scalar::kStateBlock);
  constexpr auto kOfDraw = static_cast<size_t>(scalar::kDrawHalves);
  halves.first = block.index % kOfBlock;
  const size_t draws =
      (halves.first + n + kOfBlock - 1) / kOfBlock * static_cast<size_t>(scalar::kBlockDraws);
  const uint64_t position = scalar::StateDraw(block.index - halves.first);
  const scalar::PhiloxWords counter =
      scalar::PhiloxCounter({.block = position,
                             .step = block.step,
                             .site = block.site,
                             .purpose = scalar::PhiloxPurpose::kOptimizerState});
  for (size_t i = 0; i < draws; ++i) {
    const uint64_t at = position + i;
    c0[i] = static_cast<uint32_t>(at);
    c1[i] = static_cast<uint32_t>(at >> 32) & 0xFFFu;
    c2[i] = counter[2];
    c3[i] = counter[3];
  }
  uint32_t key0 = static_cast<uint32_t>(block.seed);
  uint32_t key1 = static_cast<uint32_t>(block.seed >> 32);
  for (int round = 0; round < scalar::kStateRounds; ++round) {
    for (size_t i = 0; i < draws; ++i) {
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
  for (size_t i = 0; i < draws; ++i) {
    constexpr auto kOf = static_cast<size_t>(scalar::kBlockDraws);
    uint32_t* of_draw = halves.values + i / kOf * kOfBlock + i % kOf * kOfDraw;
    of_draw[0] = c0[i] & 0xFFFFu;
    of_draw[1] = c0[i] >> 16;
    of_draw[2] = c1[i] & 0xFFFFu;
    of_draw[3] = c1[i] >> 16;
    of_draw[4] = c2[i] & 0xFFFFu;
    of_draw[5] = c2[i] >> 16;
    of_draw[6] = c3[i] & 0xFFFFu;
    of_draw[7] = c3[i] >> 16;
    for (size_t e = 0; e < kOfDraw; ++e) {
      of_draw[scalar::kBlockHalves + e] = scalar::ExchangeBytes(of_draw[e]);
    }
  }
}

template <bool kSquare>
void StoreFp8(const StateBlock& state, size_t n, const uint32_t* halves, const Lanes& from) {
  uint32_t amax = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = scalar::MagnitudeBits(from.values[i]);
    amax = amax < bits ? bits : amax;
  }
  const uint8_t scale = kSquare ? scalar::ScaleOfSquares(amax) : scalar::ScaleOfMeans(amax);
  auto* codes = static_cast<uint8_t*>(state.values);
  for (size_t i = 0; i < n; ++i) {
    codes[i] = kSquare
                   ? scalar::EncodeSquare(from.values[i], scale, halves[i])
                   : scalar::EncodeMean(from.values[i], scale, scalar::ExchangeBytes(halves[i]));
  }
  *state.scale = scale;
}

template <bool kSquare>
void StoreState(const StateBlock& state, size_t n, const uint32_t* halves, const Lanes& from) {
  if (state.form == StateForm::kF32) {
    std::memcpy(state.values, from.values, n * sizeof(float));
  } else if (state.form == StateForm::kBf16) {
    auto* bits = static_cast<uint16_t*>(state.values);
    for (size_t i = 0; i < n; ++i) {
      bits[i] = kSquare ? scalar::Bf16Stochastic(from.values[i], halves[i])
                        : scalar::Bf16Nearest(from.values[i]);
    }
  } else if (state.form == StateForm::kFp8) {
    StoreFp8<kSquare>(state, n, halves, from);
  }
}

// The four arrays are apart.
template <typename Rule>
void Step(const UpdateScalars& scalars,
          size_t n,
          const float* __restrict g,
          float* __restrict p,
          float* __restrict m,
          float* __restrict v) {
  for (size_t i = 0; i < n; ++i) {
    const scalar::AdamWElement next = Rule::Step(scalars, {p[i], m[i], v[i]}, g[i]);
    p[i] = next.p;
    m[i] = next.m;
    v[i] = next.v;
  }
}

template <typename Rule>
void UpdateBy(const UpdateBlock& block) {
  const auto n = static_cast<size_t>(block.elements);
  Lanes p;
  Lanes g;
  Lanes m;
  Lanes v = {};
  LoadWeights(block, n, p);
  if (block.bf16_gradient) {
    LoadBf16(block.gradient, n, g);
  } else {
    std::memcpy(g.values, block.gradient, n * sizeof(float));
  }
  LoadState<false>(block.mean, n, m);
  LoadState<true>(block.square, n, v);
  const UpdateScalars scalars = block.scalars;
  Step<Rule>(scalars, n, g.values, p.values, m.values, v.values);
  StoreWeights(block, n, p);
  Halves halves;
  const bool draws = block.mean.form == StateForm::kFp8 || block.square.form == StateForm::kFp8 ||
                     block.square.form == StateForm::kBf16;
  if (draws) {
    Draw(block, n, halves);
  }
  StoreState<false>(block.mean, n, halves.values + halves.first, m);
  StoreState<true>(block.square, n, halves.values + halves.first, v);
}

inline void UpdateLoops(const UpdateBlock& block) {
  scalar::ForEachRule([&](auto rule) {
    using Rule = decltype(rule);
    for (int64_t at = 0; Rule::kRule == block.rule && at < block.elements; at += kUpdateGroup) {
      UpdateBy<Rule>(GroupAt(block, at));
    }
  });
}

}  // namespace
}  // namespace ravel::kernels::cpu
