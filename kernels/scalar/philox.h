#pragma once

// Philox4x32 [Salmon et al. 2011] and the counter layout of Ravel's random bits: a draw is a
// function of (seed, step, site, purpose, global index) and of nothing else.

#include <array>
#include <cstdint>

namespace ravel::kernels::scalar {

using PhiloxWords = std::array<uint32_t, 4>;

// `key` low word first. Seven rounds pass every test of the paper, ten are its default.
template <int kRounds = 10>
constexpr PhiloxWords Philox4x32(uint64_t key, PhiloxWords counter) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1,
               static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The purpose of a draw, which is the top byte of counter word 3.
enum class PhiloxPurpose : uint32_t {
  kInitialisation = 0,
  kDropout = 1,
  kOptimizerState = 2,
  kGradientAlongColumns = 3,  // rounding of E2M1, blocks along columns
  kGradientAlongRows = 4,     // the same, blocks along rows
};

// block: global row-major element index / draws per call (44 bits); sample: index in the global
// batch (20 bits, 0 for parameters); site: ordinal of the canonical tensor (24 bits); piece: which
// of several matrices of a site (11 bits); those after piece 0 have blocks of 33 bits.
struct PhiloxPosition {
  uint64_t block = 0;
  uint32_t sample = 0;
  uint32_t step = 0;
  uint32_t site = 0;
  uint32_t piece = 0;
  PhiloxPurpose purpose = PhiloxPurpose::kInitialisation;
};

constexpr PhiloxWords PhiloxCounter(const PhiloxPosition& position) {
  return {static_cast<uint32_t>(position.block),
          ((static_cast<uint32_t>(position.block >> 32) | position.piece << 1) & 0xFFFu) |
              (position.sample << 12),
          position.step,
          (position.site & 0xFFFFFFu) | (static_cast<uint32_t>(position.purpose) << 24)};
}

// The random bits of optimizer states. A draw of seven rounds has eight half words, half 0 the
// lowest of word 0; a block of 64 elements has four draws, so 32 halves. Half e is that of element
// e of the block and, with its bytes exchanged, of element e + 32. These bits round v, and the same
// with their bytes exchanged once more round m. A half and its exchanged bytes are two shares of
// [0, 1) whose chances are independent within 2^-8, and each of the 2^16 halves is equally often
// either. So are m and v of one element, and one state of any two; m of an element and v of that 32
// from it are rounded by the same bits, and nothing adds or multiplies these two.
inline constexpr int kStateRounds = 7;
inline constexpr int kDrawHalves = 8;
inline constexpr int kStateBlock = 64;  // elements
inline constexpr int kBlockHalves = kStateBlock / 2;
inline constexpr int kBlockDraws = kBlockHalves / kDrawHalves;

// The draw that has an element's half, by its global index, and whether it is exchanged.
constexpr uint64_t StateDraw(uint64_t index) {
  return index / kStateBlock * kBlockDraws + index % kBlockHalves / kDrawHalves;
}
constexpr bool IsExchanged(uint64_t index) {
  return index % kStateBlock >= kBlockHalves;
}

// `position`: purpose kOptimizerState, block: StateDraw of a global index.
constexpr PhiloxWords DrawStates(uint64_t seed, PhiloxPosition position) {
  position.purpose = PhiloxPurpose::kOptimizerState;
  return Philox4x32<kStateRounds>(seed, PhiloxCounter(position));
}
// Half `index` (0 to 7) of a draw.
constexpr uint32_t PhiloxHalf(const PhiloxWords& words, uint32_t index) {
  return (words[index / 2] >> (16 * (index % 2))) & 0xFFFFu;
}
// The bytes of a half exchanged, of each of several halves in one number.
template <typename Bits>
constexpr Bits ExchangeBytes(Bits halves) {
  constexpr Bits kLowBytes = static_cast<Bits>(0x00FF00FF00FF00FFu);
  return (halves & kLowBytes) << 8 | (halves >> 8 & kLowBytes);
}

// Byte `index` (0 to 15) of a draw; byte 0 is the lowest of word 0.
constexpr uint32_t PhiloxByte(const PhiloxWords& words, uint32_t index) {
  return (words[index / 4] >> (8 * (index % 4))) & 0xFFu;
}

}  // namespace ravel::kernels::scalar
